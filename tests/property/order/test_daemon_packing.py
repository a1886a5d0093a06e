"""Packing: what best fit is, every document once, and the same sequences whatever else happens."""

import itertools

import numpy as np
import pytest
from gyre_daemon.config import PackConfig
from gyre_daemon.datasets.dataset import Dataset, pack
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.fetching.layout import lay_out_packed, locate_packed, max_packed_bytes
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import NO_SAMPLES, BatchPlanner, Order, Tail
from gyre_daemon.order.sequences import Overlong, PackRule, Sequences, best_fit, pack_documents
from gyre_daemon.storage.reads import MixedStorage
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing as textbooks have it; returns what is free in each sequence, sorted."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [place for place, left in enumerate(free) if left >= length]
        if fits:
            free[min(fits, key=free.__getitem__)] -= length
        else:
            free.append(capacity - length)
    return sorted(free)


@given(LENGTHS, st.integers(40, 90))
def test_groups_are_packed_as_one_document_after_the_other_would_be(
    lengths: list[int], capacity: int
) -> None:
    numbers, counts = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(numbers.tolist()) == list(range(len(lengths)))
    bounds = np.concatenate(([0], np.cumsum(counts)))
    rows = [
        [lengths[number] for number in numbers[begin:end].tolist()]
        for begin, end in itertools.pairwise(bounds.tolist())
    ]
    assert sorted(capacity - sum(row) for row in rows) == one_by_one(lengths, capacity)


def packed(lengths: Int64Array, rule: PackRule, left_out: Int64Array = NO_SAMPLES) -> Sequences:
    return pack_documents(len(lengths), lambda documents: lengths[documents], rule, left_out)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=80),
    st.sampled_from(["drop", "truncate", "split"]),
    st.integers(1, 30),
    st.integers(1, 100),
    st.integers(0, 1 << 62),
    st.data(),
)
def test_each_token_is_in_one_sequence_unless_the_rule_leaves_it_out(
    given_lengths: list[int],
    overlong: Overlong,
    length: int,
    window: int,
    seed: int,
    data: st.DataObject,
) -> None:
    lengths = np.array(given_lengths)
    left_out = np.array(
        sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=3))), np.int64
    )
    is_in = np.isin(np.arange(len(lengths)), left_out, invert=True)
    kept = lengths.copy()
    if overlong == "truncate":
        kept = np.minimum(kept, length)
    elif overlong == "drop":
        kept[kept > length] = 0
    kept[~is_in] = 0
    rule = PackRule(length, overlong, window, seed)
    if not kept.any():
        with pytest.raises(InvalidRequest, match="nothing to pack"):
            packed(lengths, rule, left_out)
        return
    sequences = packed(lengths, rule, left_out)
    begins = np.zeros_like(sequences.documents) if sequences.begins is None else sequences.begins
    seen = [
        (document, token)
        for document, begin, count in zip(
            sequences.documents.tolist(), begins.tolist(), sequences.lengths.tolist(), strict=True
        )
        for token in range(begin, begin + count)
    ]
    assert sorted(seen) == [
        (document, token) for document, count in enumerate(kept.tolist()) for token in range(count)
    ]
    fills = np.add.reduceat(sequences.lengths, sequences.bounds[:-1])
    assert fills.max() <= length
    assert sequences.num_tokens == len(seen)
    assert sequences.num_empty == np.count_nonzero(lengths[is_in] == 0)
    assert sequences.num_overlong == np.count_nonzero(lengths[is_in] > length)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(0, 9),
)
def test_no_run_of_places_has_more_parts_than_its_bound(
    lengths: list[int], num_sequences: int, first: int, seed: int
) -> None:
    sequences = packed(np.array(lengths), PackRule(20, window=1024))
    shuffles = np.random.default_rng(seed)
    order = np.concatenate([shuffles.permutation(sequences.num_samples) for _ in range(130)])
    numbers, bounds = sequences.parts_of(order[first : first + num_sequences])
    assert len(numbers) == bounds[-1] <= sequences.most_parts(num_sequences)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.sampled_from(["wrap", "pad"]),
    st.integers(1, 12),
)
def test_no_packed_batch_is_larger_than_its_bound(
    lengths: list[int], tail: Tail, size: int
) -> None:
    sizes = 2 * np.array(lengths)[:, None]
    spec = FieldSpec("tokens", np.dtype("<u2"), (), ragged=True, codec="bytes")
    index = SampleTable(
        [spec], [len(lengths)], np.cumsum(sizes)[:, None] - sizes, sizes, identity=b""
    )
    documents = Dataset("", "", "", MixedStorage([], []), [], index, "")
    made = pack(documents, PackConfig("tokens", 20)).packed
    assert made
    planner = BatchPlanner(Order("full", tail, 0, size), made.num_samples)
    plan = planner.batches(0, 9, 0, 1)
    rows, extents = locate_packed(index, made, plan)
    layout = lay_out_packed(made, rows, plan)
    assert max(batch.num_bytes for batch in layout.batches) <= max_packed_bytes(made, size)
    held = (layout.destinations[:, :, 1] - layout.destinations[:, :, 0]).tolist()
    assert held == extents.size.tolist()


def test_the_seed_decides_what_shares_a_sequence() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 5000)
    first, again, other = (packed(lengths, PackRule(256, seed=seed)) for seed in (1, 1, 2))
    assert (first.documents == again.documents).all()
    assert (first.bounds == again.bounds).all()
    assert (first.documents != other.documents).any()


def test_a_long_document_is_never_cut_in_silence() -> None:
    with pytest.raises(InvalidRequest, match=r"2 of 4 documents .* the longest has 9\. .*overlong"):
        packed(np.array([1, 9, 3, 8]), PackRule(4))


def test_documents_of_web_text_fill_their_sequences() -> None:
    lengths = np.random.default_rng(0).lognormal(6.2, 1.1, 20_000).astype(np.int64) + 1
    sequences = packed(lengths, PackRule(2048, "split"))
    assert sequences.num_tokens / (sequences.num_samples * 2048) > 0.99
