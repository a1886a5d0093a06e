"""Packing into several lengths: every document once, and steps whose rows have one length."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gyre_daemon.config import PackConfig
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.indexes.table import SampleTable
from gyre_daemon.datasets.packing import Packed, pack
from gyre_daemon.fetching.layout import BatchLayout
from gyre_daemon.fetching.packed import (
    lay_out_packed,
    locate_packed,
    max_packed_bytes,
    write_packed,
)
from gyre_daemon.order.balance import Balance
from gyre_daemon.order.buckets import BucketRule, RowLengths
from gyre_daemon.order.packing import PackRule, pack_documents
from gyre_daemon.order.planner import BatchPlanner, Order, Tail
from gyre_daemon.order.sequences import Sequences
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.order.substitutes import NO_SAMPLES
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Batch
from tests.packing import check_packed

CHAINS = st.sampled_from([(8, 16), (8, 16, 64), (5, 20, 40), (1, 64), (4, 8, 16, 32, 64)])
DOCUMENTS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 150)), min_size=1, max_size=90)
SIZES = st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 8)])
WINDOW = 5


def table(lengths: list[int]) -> SampleTable:
    """Documents of so many tokens, as an index has them."""
    sizes = 4 * np.array(lengths, np.int64)[:, None]
    spec = FieldSpec("tokens", np.dtype("<i4"), (), ragged=True, codec="bytes")
    return SampleTable(
        [spec], [len(lengths)], np.cumsum(sizes)[:, None] - sizes, sizes, identity=b""
    )


def ids_of(document: int, lengths: list[int]) -> Int64Array:
    """The tokens of a document; none is 0, which is the padding."""
    return 1 + 1000 * document + np.arange(lengths[document])


def packed(index: SampleTable, chain: tuple[int, ...], seed: int) -> Packed:
    config = PackConfig("tokens", chain, overlong="split", seed=seed)
    return pack(index, index.fields, 0, NO_SAMPLES, config)


def planner(made: Packed, order: Order, balance: Balance | None = None) -> BatchPlanner:
    lengths_of = RowLengths(made.sequences.grouped.of)
    return BatchPlanner(order, made.num_samples, balance=balance, lengths_of=lengths_of)


def order_of(tail: Tail, seed: int, size: int) -> Order:
    return Order("full", tail, seed, size, bucket=BucketRule("tokens", WINDOW))


@given(DOCUMENTS, CHAINS, st.integers(0, 99))
def test_each_token_is_in_one_sequence_of_the_length_that_its_longest_document_needs(
    lengths: list[int], chain: tuple[int, ...], seed: int
) -> None:
    lengths = [*lengths, 3]
    known = np.array(lengths)
    rule = PackRule(chain[-1], "split", seed=seed, shorter=chain[:-1])
    made = pack_documents(len(known), known.take, rule, NO_SAMPLES)
    assert made.begins is not None
    tokens = sorted(
        (document, token)
        for document, begin, count in zip(
            made.documents.tolist(), made.begins.tolist(), made.lengths.tolist(), strict=True
        )
        for token in range(begin, begin + count)
    )
    assert tokens == [(at, token) for at, count in enumerate(lengths) for token in range(count)]
    for number, length in enumerate(chain):
        first, stop = made.grouped.first_sequences[number : number + 2].tolist()
        least = chain[number - 1] if number else 0
        its = [made.lengths[made.bounds[at] : made.bounds[at + 1]] for at in range(first, stop)]
        whole = [each for each in its if len(each)]
        assert all(each.sum() <= length for each in whole)
        assert all(each[0] == each.max() > least for each in whole)
        # only the last sample of a length may have sequences without a document
        assert len(its) - len(whole) < chain[-1] // length
        assert all(len(each) for each in its[: len(whole)])
    every = np.arange(made.num_samples)
    assert (np.diff(made.sample_bounds) > 0).all()
    sequences, bounds = made.grouped.sequences_of(every)
    assert sequences.tolist() == list(range(made.num_sequences))
    assert (np.diff(bounds) * made.grouped.of(every) == chain[-1]).all()


@given(DOCUMENTS, CHAINS, SIZES, st.sampled_from(["drop", "pad"]), st.integers(0, 99))
def test_steps_have_rows_of_one_length_and_all_ranks_know_it(
    lengths: list[int], chain: tuple[int, ...], ranks: tuple[int, int], tail: Tail, seed: int
) -> None:
    size, world_size = ranks
    made = packed(table([*lengths, *[3] * 8 * 64]), chain, seed)
    order = order_of(tail, seed, size)
    alone = planner(made, order)
    num_steps = alone.num_steps(1)
    whole = alone.batches(0, num_steps, 0, 1)
    counted = whole.sample_ids if whole.mask is None else whole.sample_ids[whole.mask]
    if tail == "pad":
        assert sorted(counted.reshape(-1).tolist()) == list(range(made.num_samples))
    assert len(np.unique(counted)) == counted.size
    its = made.sequences.grouped.of(whole.sample_ids.reshape(-1)).reshape(whole.sample_ids.shape)
    assert whole.row_lengths is not None
    assert whole.row_lengths.tolist() == its.max(axis=1).tolist()
    num_sorted = made.num_samples // size  # the last places fill no batch and are not sorted
    mixed = (its != its[:, :1]).any(axis=1)[:num_sorted]
    for begin in range(0, num_sorted, WINDOW):
        assert np.count_nonzero(mixed[begin : begin + WINDOW]) < len(chain)
    costs = made.sequences.grouped.of(np.arange(made.num_samples)).astype(np.float64)
    for balance in (None, Balance(lambda samples: costs[samples])):
        plans = [
            planner(made, order, balance).batches(0, num_steps, rank, world_size)
            for rank in range(world_size)
        ]
        joined = np.concatenate([plan.sample_ids for plan in plans], axis=1)
        assert np.sort(joined, axis=1).tolist() == np.sort(whole.sample_ids, axis=1).tolist()
        if balance is None:
            assert (joined == whole.sample_ids).all()
        for plan in plans:
            assert plan.row_lengths is not None
            assert (plan.row_lengths == whole.row_lengths).all()


@given(DOCUMENTS, CHAINS, SIZES, st.integers(0, 99))
def test_batches_have_the_documents_in_rows_of_the_length_of_their_step(
    lengths: list[int], chain: tuple[int, ...], ranks: tuple[int, int], seed: int
) -> None:
    size, world_size = ranks
    lengths = [*lengths, 3]
    index = table(lengths)
    made = packed(index, chain, seed)
    order = order_of("pad", seed, size)
    num_steps = planner(made, order).num_steps(1)
    found: dict[int, list[list[int]]] = {}
    for rank in range(world_size):
        plan = planner(made, order).batches(0, num_steps, rank, world_size)
        for step, batch in enumerate(written(index, made, plan, lengths)):
            assert plan.row_lengths is not None
            row_length = int(plan.row_lengths[step])
            num_rows = size // world_size * chain[-1] // row_length
            assert batch["tokens"].shape == (num_rows, row_length)
            parts = check_packed(batch, "tokens", 0, chain[0])
            counted = int(batch["mask"].sum()) * chain[-1] // row_length
            for document, ids in parts[: int(batch["document_id.offsets"][counted])]:
                found.setdefault(document, []).append(ids.tolist())
    tokens = {document: sorted(itertools.chain(*parts)) for document, parts in found.items()}
    assert tokens == {
        document: ids_of(document, lengths).tolist()
        for document, count in enumerate(lengths)
        if count
    }


def written(index: SampleTable, made: Packed, plan: GroupPlan, lengths: list[int]) -> list[Batch]:
    """The batches of a plan, with the documents' tokens where the layout says."""
    rows, extents = locate_packed(index, made, plan)
    layout = lay_out_packed(made, rows, plan)
    size = plan.sample_ids.shape[1]
    assert max(batch.num_bytes for batch in layout.batches) <= max_packed_bytes(made, size)
    memory = np.full(layout.num_bytes, 255, np.uint8)
    assert rows.begins is not None
    for document, begin, length, (at, end) in zip(
        rows.documents, rows.begins, rows.lengths, layout.destinations[:, 0], strict=True
    ):
        assert end - at == 4 * length
        ids = ids_of(int(document), lengths)[begin : begin + length]
        memory[at:end] = ids.astype("<i4").view(np.uint8)
    assert (extents.size[:, 0] == 4 * rows.lengths).all()
    write_packed(made, rows, plan, layout, memory.data)
    return [
        tensors(batch, memory[offset : offset + batch.num_bytes])
        for batch, offset in zip(layout.batches, layout.offsets.tolist(), strict=True)
    ]


def tensors(batch: BatchLayout, memory: npt.NDArray[np.uint8]) -> Batch:
    found: dict[str, npt.NDArray[Any]] = {
        each.name: np.ndarray(each.shape, each.dtype, memory.data, each.offset_bytes)
        for each in batch.tensors
    }
    return {name: torch.from_numpy(values.copy()) for name, values in found.items()}


def test_short_documents_fill_up_what_long_ones_leave() -> None:
    lengths = np.random.default_rng(0).lognormal(6.2, 1.1, 50_000).astype(np.int64) + 1
    rule = PackRule(8192, "split", shorter=(1024, 2048))
    made: Sequences = pack_documents(len(lengths), lengths.take, rule, NO_SAMPLES)
    assert made.num_tokens >= 0.998 * made.num_samples * 8192
    # longer ones than 1024 go in sequences of 2048 alone, and would leave a third of them empty
    begin, end = made.bounds[made.grouped.first_sequences[1:3]]
    assert (made.lengths[begin:end] <= 1024).any()
