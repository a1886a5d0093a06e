"""The order of mixtures: exact quotas, epochs of each source, the same steps on any ranks."""

import numpy as np
import pytest
from gyre_daemon.errors import CursorRejected, InvalidRequest
from gyre_daemon.order.cursor import Cursor, decode_cursor, with_weights
from gyre_daemon.order.mixture import (
    Mixture,
    MixturePlanner,
    MixtureState,
    Quotas,
    apportioned,
    check_mixture,
    planner_for,
    whole_weights,
)
from gyre_daemon.order.planner import Order
from gyre_daemon.order.steps import Phase
from hypothesis import given
from hypothesis import strategies as st

from tests.mixtures import mixture

WEIGHTS = st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any)


def planner(its: Mixture, seed: int = 1, size: int = 12) -> MixturePlanner:
    found = planner_for(Order("full", "wrap", seed, size), its)
    assert isinstance(found, MixturePlanner)
    return found


@given(WEIGHTS, st.integers(1, 200))
def test_shares_add_up_and_stay_within_one(weights: list[int], block: int) -> None:
    before = [0] * len(weights)
    for number in range(1, 30):
        counts = apportioned(number * block, weights)
        assert sum(counts) == number * block
        for count, last, weight in zip(counts, before, weights, strict=True):
            due = weight * number * block / sum(weights)
            assert abs(count - due) < 1
            assert not (weight == 0 and count)
            if weight * block >= sum(weights):
                assert count >= last
        before = counts


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=3),
    st.data(),
    st.integers(20, 90),
    st.integers(0, 3),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_ranks_steps_and_sources(
    sizes: list[int], data: st.DataObject, block: int, bad: int, num_ranks: int
) -> None:
    weights = st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes))
    first, second = (tuple(data.draw(weights)) for _ in range(2))
    at = data.draw(st.integers(1, 25))
    its = planner(mixture(sizes, (Phase(0, first), Phase(at, second)), block, bad))
    whole = its.batches(0, 40, 0, 1)
    parts = [its.batches(0, 40, rank, num_ranks).sample_ids for rank in range(num_ranks)]
    assert (np.concatenate(parts, axis=1) == whole.sample_ids).all()
    single = [its.batch(step).sample_ids for step in range(40)]
    assert (np.stack(single) == whole.sample_ids).all()
    read = whole.sample_ids.reshape(-1)
    firsts = np.cumsum([0, *sizes])
    source = np.searchsorted(firsts, read, side="right") - 1
    for position in (0, 1, block, at * 12, 480):
        counts = np.bincount(source[:position], minlength=len(sizes)).tolist()
        assert its.quotas.counts(position) == counts
    for number, size in enumerate(sizes):
        own = read[source == number] - firsts[number]
        if not bad:
            for begin in range(0, len(own) - size + 1, size):
                assert sorted(own[begin : begin + size]) == list(range(size))
        alone = its._planners[number].batches(0, len(own), 0, 1).sample_ids
        assert (alone.reshape(-1) == own).all()
    assert its.num_substitutes(480) == whole.num_substitutes


def test_a_phase_begins_with_what_the_last_left() -> None:
    plain = planner(mixture([100, 50], (Phase(0, (3, 1)),), 64))
    same = planner(mixture([100, 50], (Phase(0, (3, 1)), Phase(30, (1, 1))), 64))
    assert (plain.batches(0, 30, 0, 1).sample_ids == same.batches(0, 30, 0, 1).sample_ids).all()
    later = same.batches(30, 32, 0, 1).sample_ids.reshape(-1)  # six blocks of 64
    assert np.count_nonzero(later < 100) == len(later) // 2


def test_seeds_and_sources_have_shuffles_of_their_own() -> None:
    its = mixture([40, 40], (Phase(0, (1, 1)),), 40)
    one, other = (planner(its, seed).batches(0, 20, 0, 1).sample_ids for seed in (1, 2))
    assert (one != other).any()
    read = one.reshape(-1)
    assert (read[read < 40] != read[read >= 40] - 40).any()


def test_weights_are_exact() -> None:
    assert whole_weights([0.7, 0.3]) == (7, 3)
    assert whole_weights([0.1, 0.2, 0]) == (1, 2, 0)
    for wrong in ([0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [1e-12]):
        with pytest.raises(InvalidRequest, match="weights"):
            whole_weights(wrong)
    with pytest.raises(InvalidRequest, match=r"`rare` has 0\.001"):
        Quotas([Phase(0, (999, 1))], ["often", "rare"], 500, 0, 8)


def test_a_cursor_keeps_its_mixture() -> None:
    its = mixture([5, 6], (Phase(0, (3, 1)), Phase(9, (0, 1))), 30)
    state = MixtureState.of(its)
    cursor = Cursor("f", Order("full", "wrap", 1, 4), 8, mixture=state)
    again = decode_cursor(cursor.encode())
    assert again == cursor
    check_mixture(again.mixture, its, "set")
    other = mixture([5, 6], (Phase(0, (3, 2)), Phase(9, (0, 1))), 30)
    with pytest.raises(CursorRejected, match=r"s0=0.75, s1=0.25; from step 9 .* and from step 0"):
        check_mixture(again.mixture, other, "set")
    changed = state.with_weights({"s1": 2.0, "s0": 2.0}, 0).with_weights({"s1": 1.0}, 4)
    assert changed.phases == (Phase(0, (1, 1)), Phase(4, (0, 1)), Phase(9, (0, 1)))
    assert changed.with_weights({"s1": 3.0}, 8) == changed  # it has them there
    assert changed.given == (0, 4)
    assert changed.with_weights({"s1": 1.0}, 12) == changed
    check_mixture(changed, its, "set")
    check_mixture(changed, mixture([5, 6], (Phase(0, (3, 2)), Phase(9, (0, 1))), 30), "set")
    with pytest.raises(InvalidRequest, match=r"no source 's2'\. Its sources are s0, s1"):
        state.with_weights({"s2": 1.0}, 4)
    for step in range(100, 162):
        state = state.with_weights({"s0": step, "s1": 1.0}, step)
    with pytest.raises(InvalidRequest, match="had 64 of them"):
        state.with_weights({"s0": 1.0}, 200)


SCHEDULED = (Phase(0, (1, 1)), Phase(5, (1, 9)), Phase(10, (9, 1)))
RATIOS = [(1, 1), (1, 9), (9, 1), (4, 1)]  # three of the schedule, and other ones


def resumed(state: MixtureState, weights: tuple[int, ...], step: int) -> MixtureState:
    """The mixture of a job that goes on from a saved state at a step, with these weights."""
    cursor = Cursor("f", Order("full", "wrap", 1, 4), 4 * step, mixture=state)
    named = {f"s{number}": float(weight) for number, weight in enumerate(weights)}
    found = with_weights(decode_cursor(cursor.encode()), named, "set").mixture
    assert found
    return found


def weights_at(state: MixtureState, step: int) -> tuple[int, ...]:
    return [each.weights for each in state.phases if each.first_step <= step][-1]


@given(st.lists(st.tuples(st.integers(0, 14), st.sampled_from(RATIOS)), max_size=8))
def test_only_weights_that_a_script_changes_count(
    resumes: list[tuple[int, tuple[int, ...]]],
) -> None:
    its = mixture([50, 60], SCHEDULED, 30)
    state, last = MixtureState.of(its), None
    for step, weights in resumes:
        found = resumed(state, weights, step)
        if weights == last:
            assert found == state
        else:
            assert weights_at(found, step) == weights
            for elsewhere in {*range(15)} - {step}:
                before, after = (
                    [each for each in phases if each.first_step == elsewhere]
                    for phases in (state.phases, found.phases)
                )
                assert before == after
        check_mixture(found, its, "set")
        state, last = found, weights


@pytest.mark.parametrize("weights", RATIOS)
@pytest.mark.parametrize("first", [0, 3, 7])
def test_a_script_that_keeps_its_weights_goes_on_in_the_same_order(
    first: int, weights: tuple[int, ...]
) -> None:
    whole = resumed(MixtureState.of(mixture([50, 60], SCHEDULED, 30)), weights, first)
    state = whole
    for step in (first, first + 1, 5, 6, 10, 12):
        state = resumed(state, weights, step)
    assert state == whole
    assert weights_at(state, 12) == (weights if first > 10 else (9, 1))


def test_weights_that_were_given_before_others_count_again() -> None:
    state = MixtureState.of(mixture([50, 60], SCHEDULED, 30))
    state = resumed(resumed(state, (4, 1), 0), (2, 1), 3)
    again = resumed(state, (4, 1), 7)
    assert again.phases == (
        Phase(0, (4, 1)),
        Phase(3, (2, 1)),
        Phase(5, (1, 9)),
        Phase(7, (4, 1)),
        Phase(10, (9, 1)),
    )
    # the schedule's own weights, which the job has there, are the ones given last
    scheduled = resumed(state, (1, 9), 7)
    assert scheduled.phases == state.phases
    assert resumed(scheduled, (1, 9), 12) == scheduled
    assert weights_at(resumed(scheduled, (2, 1), 12), 12) == (2, 1)
    # an earlier state has them not yet
    assert weights_at(resumed(state, (1, 9), 2), 2) == (1, 9)
