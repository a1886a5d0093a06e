"""Steps that are left out: the others keep their numbers, their samples and their epochs."""

from dataclasses import replace

import numpy as np
import pytest
from gyre_client.loader.place import Epochs
from gyre_daemon.errors import CursorRejected, InvalidRequest
from gyre_daemon.order.cursor import Cursor, decode_cursor, skipping
from gyre_daemon.order.mixture import MixtureState, planner_for
from gyre_daemon.order.planner import BatchPlanner, Order, Tail
from gyre_daemon.order.steps import Phase, SkippedSteps, Stage, batch_of, before, step_of, steps_of
from hypothesis import given
from hypothesis import strategies as st

from tests.mixtures import mixture

NUM_STEPS = 60


@st.composite
def skips(draw: st.DrawFn) -> SkippedSteps:
    bounds = sorted(draw(st.sets(st.integers(0, NUM_STEPS), max_size=8)))
    pairs = tuple(zip(bounds[::2], bounds[1::2], strict=False))
    return tuple(each for each in pairs if each[0] < each[1])


def kept(skipped: SkippedSteps) -> list[int]:
    return [
        step
        for step in range(NUM_STEPS)
        if not any(first <= step < stop for first, stop in skipped)
    ]


@given(skips())
def test_steps_are_counted_without_those_left_out(skipped: SkippedSteps) -> None:
    steps = kept(skipped)
    assert [step_of(skipped, batch) for batch in range(len(steps))] == steps
    assert [batch_of(skipped, step) for step in steps] == list(range(len(steps)))
    assert steps_of(skipped, 0, len(steps)).tolist() == steps
    assert steps_of(skipped, 3, 4).tolist() == [step_of(skipped, batch) for batch in range(3, 7)]
    for step in range(NUM_STEPS):
        assert batch_of(skipped, step) == sum(each < step for each in steps)
        left = [*(each for each in steps if each < step), *range(step, NUM_STEPS)]
        assert kept(before(skipped, step)) == left


def planners(
    kind: str, tail: Tail, num_samples: int, size: int, skipped: SkippedSteps
) -> tuple[BatchPlanner, BatchPlanner]:
    """The planner of an order, and that of the same order with steps left out."""
    order = Order("full", tail, 7, size)
    both = [order, replace(order, skipped=skipped)]
    if kind == "mixture":
        phases = (Phase(0, (3, 1)), Phase(11, (1, 2)))
        mixed = mixture([num_samples, 9], phases, 20, bad=2)
        plain, skips = (planner_for(each, mixed) for each in both)
    else:
        corrupt = np.arange(num_samples // 3)
        stages = [Stage(0, num_samples)]
        if kind == "grown":
            stages = [Stage(0, num_samples - 5), Stage(2, num_samples)]
        plain, skips = (
            BatchPlanner(each, num_samples, corrupt=corrupt, stages=stages) for each in both
        )
    return plain, skips


@given(
    skips(),
    st.sampled_from(["plain", "grown", "mixture"]),
    st.sampled_from(["wrap", "drop", "pad"]),
    st.integers(20, 40),
    st.sampled_from([1, 2, 3]),
)
def test_the_other_steps_are_what_they_were(
    skipped: SkippedSteps, kind: str, tail: Tail, num_samples: int, num_ranks: int
) -> None:
    size = 6
    plain, its = planners(kind, "wrap" if kind == "mixture" else tail, num_samples, size, skipped)
    steps = kept(skipped)
    whole = plain.batches(0, NUM_STEPS, 0, 1)
    found = its.batches(0, len(steps), 0, 1)
    assert (found.sample_ids == whole.sample_ids[steps]).all()
    assert (found.epochs == whole.epochs[steps]).all()
    if whole.mask is not None:
        assert found.mask is not None
        assert (found.mask == whole.mask[steps]).all()
    parts = [its.batches(0, len(steps), rank, num_ranks) for rank in range(num_ranks)]
    assert (np.concatenate([part.sample_ids for part in parts], axis=1) == found.sample_ids).all()
    assert (parts[-1].epochs == found.epochs).all()
    by_epoch = plain.epochs(0, NUM_STEPS, 0, 1)
    assert (its.epochs(0, len(steps), 0, 1) == by_epoch[steps]).all()
    for batch, step in enumerate(steps):
        assert (its.batch(batch).sample_ids == whole.sample_ids[step]).all()
    assert its.num_steps(1) == sum(step < plain.num_steps(1) for step in steps)


def test_a_jump_over_all_epochs_takes_no_time() -> None:
    """As far as positions go, where counting epochs one by one would never end."""
    far = (1 << 62) // 8
    for kind in ("plain", "mixture"):
        _, its = planners(kind, "wrap", 21, 8, ((2, far - 10),))
        ids = its.batches(0, 6, 0, 1).sample_ids
        assert ids.shape == (6, 8)
        assert (its.batch(4).sample_ids == ids[4]).all()


@given(skips(), st.sampled_from(["wrap", "drop", "pad"]), st.integers(1, 3))
def test_the_client_counts_as_the_daemon(
    skipped: SkippedSteps, tail: Tail, num_epochs: int
) -> None:
    plain, its = planners("plain", tail, 31, 4, skipped)
    epochs = Epochs([(0, 31)], 4, tail, skipped)
    steps = kept(skipped)
    for batch, step in enumerate(steps):
        assert (epochs.step_of(batch), epochs.batch_of(step)) == (step, batch)
        assert epochs.epoch_of(batch) == plain.batch(step).epoch
        stop = epochs.stop(batch, num_epochs)
        assert stop > batch
        last = (epochs.epoch_of(batch) // num_epochs + 1) * num_epochs
        assert stop == its.num_steps(last)


ORDER = Order("full", "wrap", 3, 8)
AT_50 = Cursor("f", ORDER, 50 * 8)
WITHOUT = replace(AT_50, order=replace(ORDER, skipped=((10, 20), (60, 70))))


def test_a_cursor_keeps_what_is_left_out() -> None:
    mixed = MixtureState.of(mixture([5, 6], (Phase(0, (3, 1)),), 30))
    stages = (Stage(0, 9), Stage(4, 12))
    for cursor in (
        WITHOUT,
        replace(WITHOUT, mixture=mixed),
        replace(WITHOUT, stages=stages, num_shards=3),
    ):
        assert decode_cursor(cursor.encode()) == cursor
        assert cursor.encode()[8:].startswith(b"[4,")
    assert AT_50.encode()[8:].startswith(b"[1,")


def test_more_can_be_left_out_ahead_and_nothing_else() -> None:
    for cursor in (AT_50, WITHOUT):
        assert skipping(cursor, None) is cursor
        assert skipping(cursor, cursor.order.skipped) is cursor
    ahead = ((10, 20), (50, 52), (55, 80))
    assert skipping(WITHOUT, ahead) == replace(WITHOUT, order=replace(ORDER, skipped=ahead))
    assert skipping(AT_50, ((50, 51),)).order.skipped == ((50, 51),)
    refused: dict[SkippedSteps, str] = {
        (): r"leaves out the steps \[\(10, 20\), \(60, 70\)\], and skip_steps says \[\]",
        ((10, 20), (60, 69)): "name these steps too",
        ((10, 21), (60, 70)): "stands at step 50 and has read those before it",
        ((10, 20), (49, 70)): "Resume from an earlier state",
    }
    for wanted, message in refused.items():
        with pytest.raises(CursorRejected, match=message):
            skipping(WITHOUT, wanted)
    with pytest.raises(CursorRejected, match="leaves no step out"):
        skipping(AT_50, ((49, 51),))
    with pytest.raises(InvalidRequest, match="beyond any training"):
        skipping(AT_50, ((50, 1 << 60),))
    many = tuple((each, each + 1) for each in range(10**17, 10**17 + 200, 2))
    with pytest.raises(InvalidRequest, match="no room for 100 ranges"):
        skipping(AT_50, many)
