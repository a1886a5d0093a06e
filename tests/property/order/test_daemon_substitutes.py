"""Other samples in the places of corrupt ones: the same everywhere, and exactly counted."""

from typing import NamedTuple

import numpy as np
from gyre_daemon.order.permutation import BlockTable, blocks_of_equal_samples
from gyre_daemon.order.planner import BatchPlanner, Order, OrderMode, Tail
from hypothesis import assume, given
from hypothesis import strategies as st


class Case(NamedTuple):
    order: Order
    num_samples: int
    corrupt: list[int]

    @property
    def _blocks(self) -> BlockTable | None:
        if self.order.mode != "block":
            return None
        return blocks_of_equal_samples(np.array([self.num_samples]), 100, self.order.io_block_bytes)

    def plan(self, *, replaces: bool = True) -> BatchPlanner:
        corrupt = np.array(self.corrupt if replaces else [], np.int64)
        return BatchPlanner(self.order, self.num_samples, self._blocks, corrupt)


@st.composite
def cases(draw: st.DrawFn, tails: tuple[Tail, ...] = ("wrap", "drop", "pad")) -> Case:
    num_samples = draw(st.integers(2, 60))
    modes: tuple[OrderMode, ...] = ("full", "block", "sequential")
    mode, tail = draw(st.sampled_from(modes)), draw(st.sampled_from(tails))
    size = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    assume(size <= num_samples)
    blocks = (300, 3) if mode == "block" else (0, 0)
    order = Order(mode, tail, draw(st.integers(0, 2**64 - 1)), size, *blocks)
    ids = st.integers(0, num_samples - 1)
    corrupt = draw(st.lists(ids, min_size=1, max_size=num_samples // 2, unique=True))
    return Case(order, num_samples, sorted(corrupt))


@given(cases())
def test_only_corrupt_samples_are_replaced_and_none_is_served(case: Case) -> None:
    before = case.plan(replaces=False).batches(0, 40, 0, 1)
    after = case.plan().batches(0, 40, 0, 1)
    is_corrupt = np.isin(before.sample_ids, case.corrupt)
    assert after.is_substitute is not None
    assert (after.is_substitute == is_corrupt).all()
    assert (after.sample_ids == before.sample_ids)[~is_corrupt].all()
    assert not np.isin(after.sample_ids, case.corrupt).any()


@given(cases(), st.integers(0, 30), st.integers(1, 7))
def test_all_ranks_and_reruns_agree(case: Case, first_step: int, num_steps: int) -> None:
    size = case.order.global_batch_size
    whole = case.plan().batches(first_step, num_steps, 0, 1)
    again = case.plan()
    again.batch(3)
    parts = [again.batches(first_step, num_steps, rank, size) for rank in range(size)]
    assert (np.concatenate([part.sample_ids for part in parts], axis=1) == whole.sample_ids).all()
    assert sum(part.num_substitutes for part in parts) == whole.num_substitutes
    single = [whole[row : row + 1] for row in range(num_steps)]
    assert sum(part.num_substitutes for part in single) == whole.num_substitutes
    joined = single[0] + whole[1:]
    assert joined.num_substitutes == whole.num_substitutes


@given(cases(("wrap", "pad")), st.integers(0, 40))
def test_the_count_is_that_of_the_samples_that_were_replaced(case: Case, step: int) -> None:
    plan = case.plan()
    counted = plan.num_substitutes(step * case.order.global_batch_size)
    assert counted == plan.batches(0, step, 0, 1).num_substitutes


@given(cases(("drop",)), st.integers(0, 40))
def test_with_drop_each_epoch_counts_all_once_it_is_over(case: Case, step: int) -> None:
    plan, size = case.plan(), case.order.global_batch_size
    epoch, rest = divmod(step * size, plan.epoch_length)
    start = epoch * (plan.epoch_length // size)
    of_this_epoch = plan.batches(start, rest // size, 0, 1).num_substitutes
    assert plan.num_substitutes(step * size) == epoch * len(case.corrupt) + of_this_epoch


@given(cases(("wrap",)))
def test_no_sample_stands_in_for_two_others_of_one_epoch(case: Case) -> None:
    plan = case.plan()
    num_steps = plan.num_steps(1)
    ids = plan.batches(0, num_steps, 0, 1).sample_ids.ravel()[: case.num_samples]
    assert np.unique(ids, return_counts=True)[1].max() <= 2


def test_substitutes_are_drawn_from_all_good_samples_and_differ_between_epochs() -> None:
    case = Case(Order("sequential", "wrap", 5, 10), 10, [0, 4, 9])
    ids = np.stack([case.plan().batch(epoch).sample_ids[case.corrupt] for epoch in range(300)])
    found, counts = np.unique(ids, return_counts=True)
    assert found.tolist() == [1, 2, 3, 5, 6, 7, 8]
    assert counts.max() < 2 * counts.min(), "each of the seven has about 128 of 900"
