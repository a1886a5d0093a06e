"""Every order in a plan: elastic, resumable, and with next uses that tell the truth."""

import json
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gyre_daemon.errors import CursorRejected
from gyre_daemon.order.cursor import Cursor, check_cursor, decode_cursor
from gyre_daemon.order.permutation import BlockTable, blocks_of_equal_samples
from gyre_daemon.order.planner import BatchPlanner, Order
from gyre_daemon.order.steps import NEVER
from hypothesis import given
from hypothesis import strategies as st

orders = st.builds(
    Order,
    st.sampled_from(("full", "block", "sequential")),
    st.sampled_from(("wrap", "drop", "pad")),
    st.integers(0, 2**64 - 1),
    st.sampled_from((1, 2, 3, 4, 6, 8, 12)),
    st.integers(1, 40),
    st.integers(1, 12),
)
shards = st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(
    lambda counts: sum(counts) >= 12
)


def plan_of(order: Order, counts: list[int]) -> BatchPlanner:
    table = table_of(order, counts)
    return BatchPlanner(order, table.num_samples, table if order.mode == "block" else None)


def table_of(order: Order, counts: list[int]) -> BlockTable:
    return blocks_of_equal_samples(np.array(counts, np.int64), 2, order.io_block_bytes)


def stream(
    plan: BatchPlanner, num_positions: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Ids and masks of at least `num_positions`."""
    batches = plan.batches(0, -(-num_positions // plan.order.global_batch_size), 0, 1)
    masks = [
        np.ones(len(each.sample_ids), bool) if each.mask is None else each.mask for each in batches
    ]
    return np.concatenate([each.sample_ids for each in batches]), np.concatenate(masks)


@given(orders, shards)
def test_every_sample_once_in_every_epoch(order: Order, counts: list[int]) -> None:
    plan = plan_of(order, counts)
    ids, mask = stream(plan, 3 * plan.epoch_length)
    for epoch in range(3):
        of_epoch = slice(epoch * plan.epoch_length, (epoch + 1) * plan.epoch_length)
        read = ids[of_epoch][mask[of_epoch]]
        assert len(set(read.tolist())) == len(read) == min(plan.epoch_length, plan.num_samples)


@given(orders, shards, st.integers(0, 10))
def test_every_world_size_reads_the_same_global_batches(
    order: Order, counts: list[int], step: int
) -> None:
    whole = plan_of(order, counts).batch(step).sample_ids.tolist()
    for world_size in (2, 3, 4, 6, 12):
        if order.global_batch_size % world_size == 0:
            parts = [
                plan_of(order, counts).batch(step, rank, world_size).sample_ids
                for rank in range(world_size)
            ]
            assert np.concatenate(parts).tolist() == whole


@given(orders, shards, st.integers(0, 20))
def test_a_job_resumes_at_its_cursor(order: Order, counts: list[int], step: int) -> None:
    data = Cursor("f" * 32, order, step * order.global_batch_size).encode()
    cursor = decode_cursor(data)
    check_cursor(cursor, "wiki", "f" * 32, order)
    resumed, whole = plan_of(cursor.order, counts), plan_of(order, counts)
    for later in range(step, step + 5):
        assert resumed.batch(later).sample_ids.tolist() == whole.batch(later).sample_ids.tolist()


@given(orders, shards, st.integers(0, 200))
def test_next_uses_are_those_of_the_stream(order: Order, counts: list[int], position: int) -> None:
    plan = plan_of(order, counts)
    ids, _ = stream(plan, position + 2 * plan.epoch_length)
    everyone = np.arange(plan.num_samples)
    uses = plan.next_use(everyone, position)
    ahead = ids[position:].tolist()
    for sample, use in zip(everyone.tolist(), uses.tolist(), strict=True):
        if sample in ahead:
            assert use == position + ahead.index(sample)
        else:
            assert use >= position + plan.epoch_length, (
                "dropped this epoch: not before the next but one"
            )
    table = table_of(order, counts)
    blocks = table.block_of(everyone)
    by_block = [uses[blocks == block].min() for block in range(table.num_blocks)]
    assert (
        plan.next_use_of_blocks(table, np.arange(table.num_blocks), position).tolist() == by_block
    ), "of any table"


@given(orders, shards, st.integers(0, 200))
def test_the_window_has_a_block_when_it_is_used(
    order: Order, counts: list[int], position: int
) -> None:
    order = replace(order, mode="block")
    table = table_of(order, counts)
    plan, every = BatchPlanner(order, table.num_samples, table), np.arange(table.num_blocks)
    exact = plan.next_use_of_blocks(table_of(order, counts), every, position)
    fast = plan.next_use_of_blocks(table, every, position)
    assert (fast >= position).all()
    assert (fast <= exact).all()


def test_the_window_has_a_block_not_long_before_and_after() -> None:
    """32,000 samples in 500 blocks, seen from the middle.

    Blocks that are done are not wanted before the next epoch.
    """
    table = blocks_of_equal_samples(np.array([32_000]), 1, 64)
    plan, every = BatchPlanner(Order("block", "wrap", 1, 16, 64, 32), 32_000, table), np.arange(500)
    exact = plan.next_use_of_blocks(
        blocks_of_equal_samples(np.array([32_000]), 1, 64), every, 16_000
    )
    fast = plan.next_use_of_blocks(table, every, 16_000)
    in_window = exact < 16_000 + 64
    assert (fast[in_window] == exact[in_window]).all()
    assert in_window.sum() == 31
    assert (exact - fast).max() <= 2 * 64
    assert (fast >= 32_000).sum() == pytest.approx(250, abs=20)


def test_a_sample_that_is_always_dropped_is_never_used() -> None:
    plan = BatchPlanner(Order("sequential", "drop", 0, 4), 10)
    assert plan.next_use(np.array([7, 8, 9]), 0).tolist() == [7, NEVER, NEVER]
    assert (
        plan.next_use_of_blocks(
            table_of(replace(plan.order, io_block_bytes=4), [10]), np.array([], int), 0
        ).tolist()
        == []
    )


def test_by_sample_id() -> None:
    plan = BatchPlanner(Order("sequential", "pad", 9, 4), 6)
    assert [plan.batch(step).sample_ids.tolist() for step in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 0, 1],
        [0, 1, 2, 3],
    ]


BLOCK = Order("block", "wrap", 17, 8, 1 << 20, 256)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mode": "full"}, "the order mode is full there and block here"),
        (
            {"io_block_bytes": 4096},
            r"the block size \(io_block\) in bytes is 4096 there and 1048576 here",
        ),
        ({"window_blocks": 64}, "the window in blocks is 64 there and 256 here"),
    ],
)
def test_a_cursor_of_another_order_says_what_differs(change: dict[str, Any], sentence: str) -> None:
    cursor = decode_cursor(Cursor("abc", replace(BLOCK, **change), 80).encode())
    with pytest.raises(CursorRejected, match=sentence) as caught:
        check_cursor(cursor, "wiki", "abc", BLOCK)
    assert str(caught.value).count(".") == 0, "one sentence"


def test_a_cursor_from_before_there_were_blocks_and_substitutes_is_read() -> None:
    data = (
        b'[1,{"algorithm":2,"fingerprint":"abc","num_substitutes":0,"order":{"global_batch_size":8,"mode":"full","seed":1,'
        b'"tail":"wrap"},"position":16}]'
    )
    sealed = b"GYRE" + zlib.crc32(data).to_bytes(4, "little") + data
    cursor = Cursor("abc", Order("full", "wrap", 1, 8), 16)
    assert decode_cursor(sealed) == cursor
    assert json.loads(cursor.encode()[8:]) == json.loads(data), "nor does it say more"


def test_a_cursor_of_a_job_that_joined_another_one_is_refused_in_one_sentence() -> None:
    data = Cursor("abc", BLOCK, 80).encode()[8:].replace(b'"tail"', b'"start_position":640,"tail"')
    sealed = b"GYRE" + zlib.crc32(data).to_bytes(4, "little") + data
    with pytest.raises(CursorRejected, match=r"joined another one .*; begin a new run") as caught:
        decode_cursor(sealed)
    assert str(caught.value).count(".") == 0, "one sentence"


def test_the_far_end_of_the_positions_in_blocks() -> None:
    num_samples = 10**12
    table = blocks_of_equal_samples(np.full(1000, 10**9), 2048, 1 << 20)
    plan = BatchPlanner(replace(BLOCK, global_batch_size=1024), num_samples, table)
    for step in (0, 10**9 // 2, (1 << 62) // 1024):
        assert len(set(plan.batch(step).sample_ids.tolist())) == 1024
    ids = plan.batch(10**9 // 2).sample_ids
    assert plan.next_use(ids, 10**9 // 2 * 1024).tolist() == list(
        range(10**9 // 2 * 1024, (10**9 // 2 + 1) * 1024)
    )
