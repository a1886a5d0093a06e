"""The order of a job whose dataset grows, against fresh orders of what each epoch has."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.permutation import BlockTable, blocks_of_equal_samples
from gyre_daemon.order.planner import NO_SAMPLES, BatchPlanner, Order, stages_of
from gyre_daemon.order.steps import NEVER, Stage
from hypothesis import given
from hypothesis import strategies as st

Ids = npt.NDArray[np.int64]

SIZES = (1, 2, 3, 4, 6, 12)
orders = st.builds(
    Order,
    st.sampled_from(("full", "block", "sequential")),
    st.sampled_from(("wrap", "drop", "pad")),
    st.integers(0, 2**64 - 1),
    st.sampled_from(SIZES),
    st.integers(1, 40),
    st.integers(1, 12),
)


@st.composite
def growths(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Samples of each shard, and from which epoch on there are how many shards."""
    counts = [*draw(st.lists(st.integers(12, 30), min_size=1, max_size=2))]
    grown = [(0, len(counts))]
    for _ in range(draw(st.integers(0, 2))):
        counts += draw(st.lists(st.integers(1, 20), min_size=1, max_size=2))
        grown.append((grown[-1][0] + draw(st.integers(1, 2)), len(counts)))
    counts += draw(st.lists(st.integers(0, 20), max_size=1))  # not of this job yet
    return counts, grown


def table_of(order: Order, counts: list[int]) -> BlockTable:
    return blocks_of_equal_samples(np.array(counts, np.int64), 2, order.io_block_bytes)


def planner(
    order: Order, counts: list[int], grown: list[tuple[int, int]], corrupt: Ids | None = None
) -> BatchPlanner:
    """The planner of a job whose dataset has all of the shards now."""
    table = table_of(order, counts)
    stages = [Stage(epoch, sum(counts[:num_shards])) for epoch, num_shards in grown]
    blocks = table if order.mode == "block" else None
    corrupt = NO_SAMPLES if corrupt is None else corrupt
    return BatchPlanner(order, table.num_samples, blocks, corrupt, stages)


def by_definition(
    order: Order, counts: list[int], grown: list[tuple[int, int]], num_epochs: int
) -> tuple[Ids, Ids, npt.NDArray[np.bool_]]:
    """Sample ids, epochs and masks: each epoch is that of a dataset that never had other shards."""
    ids, epochs, masks = [], [], []
    for epoch in range(num_epochs):
        num_shards = [shards for begin, shards in grown if begin <= epoch][-1]
        plan = planner(order, counts[:num_shards], [(0, num_shards)])
        length = plan.epoch_length
        size = order.global_batch_size
        step, skipped = divmod(epoch * length, size)
        batches = plan.batches(step, -(-(skipped + length) // size), 0, 1)
        of_epoch = slice(skipped, skipped + length)
        ids.append(batches.sample_ids.reshape(-1)[of_epoch])
        epochs.append(np.full(length, epoch))
        mask = np.ones(batches.sample_ids.shape, bool) if batches.mask is None else batches.mask
        masks.append(mask.reshape(-1)[of_epoch])
    return np.concatenate(ids), np.concatenate(epochs), np.concatenate(masks)


@given(orders, growths(), st.integers(0, 3), st.data())
def test_each_epoch_is_that_of_the_samples_it_has(
    order: Order, growth: tuple[list[int], list[tuple[int, int]]], step: int, data: st.DataObject
) -> None:
    ids, epochs, mask = by_definition(order, *growth, num_epochs=7)
    plan, size = planner(order, *growth), order.global_batch_size
    num_steps = len(ids) // size
    assert plan.num_steps(7) == -(-len(ids) // size)
    whole = plan.batches(0, num_steps, 0, 1)
    assert whole.sample_ids.reshape(-1).tolist() == ids[: num_steps * size].tolist()
    assert whole.epochs.tolist() == epochs[: num_steps * size : size].tolist()
    if whole.mask is not None:
        assert whole.mask.reshape(-1).tolist() == mask[: num_steps * size].tolist()
    world_size = data.draw(st.sampled_from([each for each in SIZES if size % each == 0]))
    parts = [plan.batches(step, 3, rank, world_size).sample_ids for rank in range(world_size)]
    assert np.concatenate(parts, axis=1).tolist() == whole.sample_ids[step : step + 3].tolist()


@given(orders, growths(), st.integers(0, 150))
def test_next_uses_are_those_of_the_stream(
    order: Order, growth: tuple[list[int], list[tuple[int, int]]], position: int
) -> None:
    ids, _, _ = by_definition(order, *growth, num_epochs=24)
    plan, (counts, _) = planner(order, *growth), growth
    every = np.arange(sum(counts))
    uses = plan.next_use(every, position)
    for sample, use in zip(every.tolist(), uses.tolist(), strict=True):
        later = np.flatnonzero(ids[position:] == sample)
        if len(later):
            assert use in (NEVER, position + later[0])
            assert use != NEVER or later[0] > 4 * sum(counts)
        else:
            assert use == NEVER
    table = table_of(replace(order, io_block_bytes=7), counts)
    blocks = np.arange(table.num_blocks)
    first, sizes = table.first_sample(blocks), table.sizes(blocks)
    expected = [
        uses[begin : begin + count].min() for begin, count in zip(first, sizes, strict=True)
    ]
    assert plan.next_use_of_blocks(table, blocks, position).tolist() == expected
    if order.mode == "block":
        own = plan._blocks
        assert own is not None
        blocks = np.arange(own.num_blocks)
        found = plan.next_use_of_blocks(own, blocks, position)
        first, sizes = own.first_sample(blocks), own.sizes(blocks)
        for block, use in enumerate(found.tolist()):
            exact = uses[first[block] : first[block] + sizes[block]].min()
            assert use <= exact
            assert (use == NEVER) == (exact == NEVER)


@given(orders, growths(), st.data())
def test_substitutes_are_counted_through_a_growth(
    order: Order, growth: tuple[list[int], list[tuple[int, int]]], data: st.DataObject
) -> None:
    counts, grown = growth
    bad = data.draw(st.sets(st.integers(0, sum(counts) - 1), max_size=5))
    corrupt = np.array(sorted(bad), np.int64)
    plan = planner(order, counts, grown, corrupt)
    ids, epochs, mask = by_definition(order, counts, grown, num_epochs=6)
    size = order.global_batch_size
    got = plan.batches(0, len(ids) // size, 0, 1)
    assert not np.isin(got.sample_ids, corrupt).any()
    if order.tail != "drop":  # which counts all of an epoch that is over
        num_replaced = np.cumsum(np.isin(ids, corrupt) & mask)
        for step in range(1, len(ids) // size):
            assert plan.num_substitutes(step * size) == num_replaced[step * size - 1]
    fresh = got.sample_ids.reshape(-1)
    for sample, epoch in zip(fresh.tolist(), epochs, strict=False):
        assert sample < sum(counts[: [shards for first, shards in grown if first <= epoch][-1]])


def test_a_job_grows_where_its_next_epoch_begins() -> None:
    """101 samples in batches of 10: step 10 is the last of epoch 0 and begins inside it."""
    order = Order("full", "wrap", 0, 10)
    stages = stages_of(order, [Stage(0, 101)])
    assert stages.grown(0, 150) == (Stage(0, 150),), "nothing was read yet"
    assert stages.grown(10, 150) == (Stage(0, 101), Stage(1, 150))
    assert stages.grown(110, 150) == (Stage(0, 101), Stage(2, 150)), "epoch 1 has begun"
    assert stages.grown(10, 101) == (Stage(0, 101),), "the new shards are empty"
    twice = stages_of(order, stages.grown(10, 150))
    assert twice.grown(20, 200) == (Stage(0, 101), Stage(1, 200)), "150 were never read"
    assert twice.grown(101 + 150, 200) == (Stage(0, 101), Stage(1, 150), Stage(2, 200))
    whole = stages_of(Order("full", "drop", 0, 10), [Stage(0, 101)])
    assert whole.grown(100, 150) == (Stage(0, 101), Stage(1, 150)), "between two epochs"


def test_stages_that_are_none() -> None:
    table = blocks_of_equal_samples(np.array([12, 12]), 2, 8)
    order = Order("block", "wrap", 0, 4, 8, 4)
    with pytest.raises(InvalidRequest, match="no shard of the dataset ends with its first 13"):
        BatchPlanner(order, 24, table, stages=[Stage(0, 13)])
    with pytest.raises(InvalidRequest, match="30 samples and its dataset 24"):
        BatchPlanner(order, 24, table, stages=[Stage(0, 30)])
    with pytest.raises(InvalidRequest, match="more than half"):
        BatchPlanner(Order("full", "wrap", 0, 4), 24, None, np.arange(8), [Stage(0, 12)])
