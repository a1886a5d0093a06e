"""Changes of weights that jobs were given: who gets them, and when they are forgotten."""

from dataclasses import replace
from pathlib import Path

import pytest
from gyre_daemon.errors import CursorRejected, Overloaded
from gyre_daemon.order.cursor import Cursor
from gyre_daemon.order.mixing.mixture_state import MixtureState
from gyre_daemon.order.mixing.quotas import Phase
from gyre_daemon.order.planner import Order
from gyre_daemon.sessions import weight_changes
from gyre_daemon.sessions.weight_changes import JobOnMixture, WeightChanges

from tests.mixtures import mixture

KEY = JobOnMixture("root", "train", "all", "f")
START = Cursor(
    "f",
    Order("full", "wrap", 1, 4),
    0,
    mixture=MixtureState.of(mixture([5, 6], (Phase(0, (3, 1)),), 30)),
)
LATER = Phase(9, (1, 1))


def phases(changes: WeightChanges, cursor: Cursor) -> tuple[Phase, ...]:
    """Those that a session gets which opens at a cursor."""
    found = changes.applied(cursor, KEY).mixture
    assert found
    return found.phases


def test_a_late_rank_gets_the_change_and_a_new_run_does_not(tmp_path: Path) -> None:
    changes = WeightChanges(tmp_path)
    changes.give(KEY, LATER)
    # All sessions have ended for the change. Before they are there again, a rank opens its first.
    changes.forget(KEY)
    assert phases(changes, START) == (Phase(0, (3, 1)), LATER)
    assert phases(WeightChanges(tmp_path), START) == (Phase(0, (3, 1)), LATER)
    # One rank has its cursor, and its session is not open yet: another one begins.
    changes.forget(KEY)
    assert phases(changes, START) == (Phase(0, (3, 1)), LATER)
    changes.was_opened(KEY)
    # The job has ended, and begins again.
    changes.forget(KEY)
    assert phases(changes, START) == (Phase(0, (3, 1)),)
    assert phases(WeightChanges(tmp_path), START) == (Phase(0, (3, 1)),)


def test_a_job_that_ended_with_the_change_begins_again_without_it(tmp_path: Path) -> None:
    now = [0.0]
    changes = WeightChanges(tmp_path, lambda: now[0])
    changes.give(KEY, LATER)
    now[0] = 299.0
    changes.forget(KEY)
    assert phases(changes, START) == (Phase(0, (3, 1)), LATER)
    now[0] = 301.0
    changes.forget(KEY)
    assert phases(changes, START) == (Phase(0, (3, 1)),)


def test_what_was_withdrawn_is_taken_out_of_cursors_until_it_is_given_again(tmp_path: Path) -> None:
    changes = WeightChanges(tmp_path)
    changes.give(KEY, LATER)
    given = changes.applied(START, KEY)
    changes.withdraw(KEY, LATER)
    for each in (changes, WeightChanges(tmp_path)):
        assert each.applied(given, KEY) == START
        assert each.applied(START, KEY) == START
        # a change that another daemon gave, and this one did not
        with pytest.raises(CursorRejected, match=r"withdrawn .* read on with it"):
            each.applied(replace(given, position=9 * 4 + 1), KEY)
    changes.give(KEY, LATER)
    for each in (changes, WeightChanges(tmp_path)):
        assert each.applied(START, KEY) == each.applied(given, KEY) == given


def test_one_user_cannot_fill_the_file_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_changes, "_MAX_USER_BYTES", 1000)
    changes = WeightChanges(tmp_path)
    step = 0
    with pytest.raises(Overloaded, match=r"root has \d+ bytes of changes .* may have 1000"):
        for step in range(1, 100):
            changes.give(KEY, Phase(step, (1, 1)))
    changes.withdraw(KEY, Phase(step - 1, (1, 1)))  # what was given can be taken back
    other = replace(KEY, user="other")
    for each in (changes, WeightChanges(tmp_path)):
        each.give(other, LATER)
        with pytest.raises(Overloaded, match="root has"):
            each.give(KEY, LATER)
    with pytest.raises(Overloaded, match="may have 2000"):
        for _ in range(100):
            changes.withdraw(KEY, LATER)
    for path in tmp_path.iterdir():  # as the operator is told to do
        path.unlink()
    changes.give(KEY, LATER)
