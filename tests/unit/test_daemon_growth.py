import pytest
from gyre_daemon.memory.share import divide
from gyre_daemon.sessions.growth import Growth

SMALL = divide(1 << 17, 192, 1 << 30, in_strips=True, may_grow=True)  # strips of 8 MiB, which may be three times as long


def grown(growth: Growth, num_windows: int, *, is_awaited: bool, at: float = 0.0, share: float = 1.0) -> int:
    """How many windows it wants after one whole window, of which a share was awaited or not."""
    size = SMALL.num_ahead * num_windows
    num_first = int(size * share)
    if num_first < size:
        assert growth.sealed(size - num_first, num_windows, at, is_awaited=not is_awaited) == num_windows
    return growth.sealed(num_first, num_windows, at, is_awaited=is_awaited)


def test_strips_that_are_waited_for_become_longer_step_by_step() -> None:
    growth = Growth(SMALL, in_bulk=True)
    assert SMALL.max_windows == 3
    assert [grown(growth, num_windows, is_awaited=True) for num_windows in (1, 2, 3)] == [2, 3, 3]


def test_a_storage_that_answers_late_is_asked_for_twice_as_much() -> None:
    growth = Growth(SMALL, in_bulk=False)
    assert [grown(growth, num_windows, is_awaited=True) for num_windows in (1, 2, 4)] == [2, 4, 8]


@pytest.mark.parametrize("in_bulk", [True, False])
def test_nothing_grows_for_who_does_not_wait(in_bulk: bool) -> None:
    growth = Growth(SMALL, in_bulk=in_bulk)
    assert grown(growth, 1, is_awaited=False) == 1
    assert grown(growth, 1, is_awaited=True, share=0.4) == 1
    assert grown(growth, 1, is_awaited=True, share=0.6) == 2


def test_what_was_given_back_is_not_taken_again_at_once() -> None:
    growth = Growth(SMALL, in_bulk=True)
    growth.shrunk(100.0)
    assert grown(growth, 1, is_awaited=True, at=101.0) == 1
    assert grown(growth, 1, is_awaited=True, at=200.0) == 2


def test_a_window_that_was_asked_for_stays() -> None:
    share = divide(1 << 17, 192, 1 << 30, in_strips=True, may_grow=False)
    assert Growth(share, in_bulk=True).sealed(10_000, 1, 0.0, is_awaited=True) == 1
