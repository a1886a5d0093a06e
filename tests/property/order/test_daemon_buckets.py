"""Buckets: batches of similar samples, in which each sample of an epoch is exactly once."""

from dataclasses import replace

import numpy as np
import pytest
from gyre_daemon.errors import CursorRejected, InvalidRequest
from gyre_daemon.order.balance import BucketRule, padding
from gyre_daemon.order.cursor import Cursor, check_cursor, check_transforms, decode_cursor
from gyre_daemon.order.planner import NO_SAMPLES, BatchPlanner, Order, OrderMode, Tail
from gyre_daemon.order.steps import Stage
from hypothesis import given
from hypothesis import strategies as st

RULE = BucketRule("tokens", 4)
LENGTHS = np.random.default_rng(7).lognormal(5, 1, 2000).astype(np.int64)

lengths = st.lists(st.integers(0, 9), min_size=12, max_size=90).map(np.array)
modes = st.sampled_from(["full", "sequential"])
tails = st.sampled_from(["drop", "pad"])
windows = st.integers(2, 7)


def planner(order: Order, known: np.ndarray, corrupt: np.ndarray = NO_SAMPLES) -> BatchPlanner:
    return BatchPlanner(order, len(known), corrupt=corrupt, lengths_of=known.take)


@given(lengths, modes, tails, windows, st.integers(0, 99))
def test_windows_keep_their_samples_and_batches_are_runs_of_their_lengths(
    known: np.ndarray, mode: OrderMode, tail: Tail, window: int, seed: int
) -> None:
    plain = Order(mode, tail, seed, 6)
    order = replace(plain, bucket=BucketRule("tokens", window))
    bucketed, inner = planner(order, known), planner(plain, known)
    num_whole, per_epoch = len(known) // 6, bucketed.num_steps(1)
    for epoch in range(2):
        first = epoch * per_epoch
        found = bucketed.batches(first, per_epoch, 0, 1)
        before = inner.batches(first, per_epoch, 0, 1)
        counts = np.ones_like(found.sample_ids, np.bool_)
        if found.mask is not None and before.mask is not None:
            counts = found.mask
            assert (counts == before.mask).all()
        for begin in range(0, num_whole, window):
            its = slice(begin, min(begin + window, num_whole))
            assert sorted(found.sample_ids[its].flat) == sorted(before.sample_ids[its].flat)
            spans = sorted((known[row].min(), known[row].max()) for row in found.sample_ids[its])
            ends = np.array(spans).reshape(-1)
            assert (np.diff(ends) >= 0).all()  # no two batches of a window overlap
        rest = counts[num_whole:]  # padding repeats what the epoch has first
        ids, others = found.sample_ids[num_whole:], before.sample_ids[num_whole:]
        assert (ids[rest] == others[rest]).all()
    places = np.arange(len(known))
    epoch_order = bucketed._epochs(1)
    assert (epoch_order.inverse(epoch_order(places)) == places).all()


@given(
    tails,
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 6]), st.integers(1, 8)), max_size=5),
    st.integers(0, 2**32),
)
def test_any_ranks_read_the_batches_of_one_across_cursors(
    tail: Tail, segments: list[tuple[int, int]], seed: int
) -> None:
    known, corrupt = LENGTHS[:100], np.array([3, 40, 97])
    start = Cursor("f", Order("full", tail, seed, 6, skipped=((5, 8),), bucket=RULE), 0)
    whole = planner(start.order, known, corrupt).batches(0, 40, 0, 1).sample_ids
    data, found = start.encode(), []
    for world_size, num in [*segments, (1, 40)]:
        cursor = decode_cursor(data)
        step = cursor.order.batch_of(cursor.position // 6)
        ours = planner(cursor.order, known, corrupt)
        parts = [ours.batches(step, num, rank, world_size) for rank in range(world_size)]
        found.append(np.concatenate([part.sample_ids for part in parts], axis=1))
        assert cursor.num_substitutes == ours.num_substitutes(cursor.position)
        position = cursor.order.position_of(step + num)
        counted = ours.num_substitutes(position)
        data = replace(cursor, position=position, num_substitutes=counted).encode()
    assert (np.concatenate(found)[:40] == whole).all()


@given(lengths, tails, windows, st.integers(0, 99))
def test_substitutes_are_counted_where_they_are_read(
    known: np.ndarray, tail: Tail, window: int, seed: int
) -> None:
    order = Order("full", tail, seed, 4, bucket=BucketRule("tokens", window))
    corrupt = np.array([0, 5, 9])
    plain = planner(order, known)
    ours = planner(order, known, corrupt)
    per_epoch = ours.num_steps(1)
    num_dropped = 3 - np.isin(corrupt, plain.batches(0, per_epoch, 0, 1).sample_ids).sum()
    for step in range(per_epoch):
        read = ours.batches(0, step, 0, 1)
        counted = 0
        if read.is_substitute is not None:
            counts = read.mask if read.mask is not None else np.ones_like(read.is_substitute)
            counted = int((read.is_substitute & counts).sum())
        assert ours.num_substitutes(order.position_of(step)) == counted
    if not num_dropped:
        assert ours.num_substitutes(order.position_of(per_epoch)) == 3


def test_padding_is_a_fraction_of_what_it_was() -> None:
    order = Order("full", "drop", 1, 16)

    def mean(order: Order) -> float:
        found = planner(order, LENGTHS).batches(0, 120, 0, 1).sample_ids
        return float(np.mean([padding(LENGTHS[row]) for row in found]))

    assert mean(replace(order, bucket=BucketRule("tokens", 64))) < 0.1 * mean(order)
    assert padding(np.array([0, 0])) == 0
    assert padding(np.array([1, 4, 4])) == 0.25


def test_a_dataset_that_grows_keeps_the_epoch_that_has_begun() -> None:
    order = Order("full", "drop", 5, 8, bucket=RULE)
    before = planner(order, LENGTHS[:70])
    stages = Stage(0, 70), Stage(1, 90)
    after = BatchPlanner(order, 90, stages=stages, lengths_of=LENGTHS[:90].take)
    num = before.num_steps(1)
    found = after.batches(0, num, 0, 1).sample_ids
    assert (found == before.batches(0, num, 0, 1).sample_ids).all()
    assert len(np.unique(after.batches(num, 11, 0, 1).sample_ids)) == 88


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (Order("block", "drop", 0, 8, 4096, 8, bucket=RULE), "order `full` or `sequential`"),
        (Order("full", "wrap", 0, 8, bucket=RULE), "use the tail `drop` or `pad`"),
        (Order("full", "drop", 0, 8, bucket=BucketRule("tokens", 1)), "window_batches = 1"),
        (Order("full", "drop", 0, 8, bucket=BucketRule("tokens", 1 << 20)), "must be 2 to 65536"),
        (Order("full", "drop", 0, 1 << 20, bucket=RULE), "Lower its window_batches"),
    ],
)
def test_orders_that_have_no_buckets_are_refused(order: Order, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        BatchPlanner(order, 1 << 21, lengths_of=LENGTHS.take)


def test_lengths_must_be_known() -> None:
    with pytest.raises(InvalidRequest, match="ask without `bucket`"):
        BatchPlanner(Order("full", "drop", 0, 8, bucket=RULE), 100)


def test_a_cursor_fits_its_own_buckets_alone() -> None:
    order = Order("full", "drop", 1, 8, bucket=RULE)
    cursor = decode_cursor(Cursor("f", order, 16, transforms="a").encode())
    check_cursor(cursor, "wiki", "f", order)
    for other in (None, BucketRule("tokens", 5), BucketRule("text", 4)):
        with pytest.raises(CursorRejected, match="buckets is 4 batches by `tokens` there"):
            check_cursor(cursor, "wiki", "f", replace(order, bucket=other))
    with pytest.raises(CursorRejected, match="begin a new run: its batches follow"):
        check_transforms(cursor, "b")
    for wrong in (BucketRule(3, 4), BucketRule("tokens", "4")):  # type: ignore[arg-type]
        with pytest.raises(CursorRejected, match="no beginning of a global batch"):
            decode_cursor(replace(cursor, order=replace(order, bucket=wrong)).encode())
