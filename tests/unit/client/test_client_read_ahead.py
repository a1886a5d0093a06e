"""How far the daemon may read ahead, by what a trainer took at which times."""

from gyre_client.batches.attachment import NEVER, ReadAhead


def bounds(
    step_s: float, waits_s: float = 0.0, num_steps: int = 40, stop: int = NEVER
) -> list[int]:
    """How many batches ahead may be read, heard of every 0.1 s, for a trainer of this pace."""
    ahead, found = ReadAhead(), []
    for tenth in range(round(num_steps * (step_s + waits_s) * 10)):
        now_s = tenth / 10
        taken = int(now_s / (step_s + waits_s))
        found.append(ahead.until(now_s, 7 + taken, taken * waits_s, stop) - 7 - taken)
    return found


def test_a_trainer_has_five_seconds_of_its_own_pace() -> None:
    half, fast, slow = (
        bounds(0.5)[30:],
        bounds(0.05, num_steps=200)[30:],
        bounds(20.0, num_steps=3)[-150:],
    )
    assert (min(half) >= 10, max(half) <= 14, min(fast) >= 100, max(fast) <= 106) == (True,) * 4
    assert max(slow) <= 5, "a batch in hand is no pause"


def test_a_trainer_that_waits_is_not_bound() -> None:
    assert min(bounds(0.1, waits_s=0.2)) > 1 << 60


def test_a_trainer_that_has_not_begun_is_not_bound() -> None:
    ahead = ReadAhead()
    assert [ahead.until(now_s, 7, 0.0, 90) for now_s in (0.0, 1.0, 60.0)] == [90] * 3


def test_a_trainer_that_gets_faster_is_known_within_its_next_seconds() -> None:
    ahead = ReadAhead()
    for second in range(60):
        slow = ahead.until(second, 1 + second // 20, 0.0, NEVER)
    assert slow - 3 <= 5
    for tenth in range(1, 31):
        found = ahead.until(60 + tenth / 10, 3 + tenth, 0.0, NEVER) - 3 - tenth
    assert 45 <= found <= 55


def test_nothing_is_read_beyond_the_iteration() -> None:
    stop = 20
    assert all(each <= 13 for each in bounds(0.5, num_steps=13, stop=stop))
