"""Records of different sizes: where they lie, the blocks of the cache, and what a read has."""

import numpy as np
import pytest
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.fetching.transformed import pieces_of
from gyre_daemon.storage.reads import Reads
from gyre_daemon.transforms.declared import (
    RECORD_BLOCKS,
    MeasuredIndex,
    RecordIndex,
    as_records,
)

BLOCK = 64 << 10
STORED = FieldSpec("text", np.dtype(np.uint8), (), ragged=True, codec="bytes")
TOKENS = FieldSpec("tokens", np.dtype("<i4"), (), ragged=True, codec="bytes")


def records(lengths: list[int], left_out: tuple[int, ...] = ()) -> RecordIndex:
    """The records of samples that have so many tokens."""
    sizes = np.ones((len(lengths), 1), np.int64)
    starts = np.arange(len(lengths))[:, None]
    stored = SampleTable([STORED], [len(lengths)], starts, sizes, identity=b"test")
    told = np.array(lengths, np.int32)[:, None]
    sized = MeasuredIndex(stored, [STORED], [TOKENS], [], told)
    return RecordIndex(sized, [TOKENS], np.array(left_out, np.int64))


@pytest.mark.parametrize(
    ("lengths", "first"),
    [
        ([10] * 5, [0, 5]),  # all begin in the first bytes
        ([BLOCK // 4, 1, 1], [0, 1, 3]),  # a block is full
        ([BLOCK, 1, BLOCK, 1], [0, 1, 3, 4]),  # large ones are alone, or the last of theirs
        ([0, 0, 5, 0], [0, 4]),
        ([BLOCK // 4, 0, 0], [0, 3]),  # none is empty
        ([0, 0], [0, 2]),
        ([3], [0, 1]),
    ],
)
def test_records_that_begin_close_together_are_one_block(
    lengths: list[int], first: list[int]
) -> None:
    index = records(lengths)
    table = index.blocks(RECORD_BLOCKS)
    assert table.first_sample(np.arange(table.num_blocks + 1)).tolist() == first
    assert index.starts.tolist() == [0, *np.cumsum(np.array(lengths) * 4).tolist()]


def test_samples_that_nobody_reads_have_empty_records() -> None:
    index = records([3, 4, 5], left_out=(1,))
    assert index.starts.tolist() == [0, 12, 12, 32]
    assert index.locate(np.arange(3)).tensor_bytes.tolist() == [[12], [0], [20]]
    assert index.digest() != records([3, 4, 5]).digest()


def test_numbers_stored_as_digits_take_the_bytes_of_their_tensors() -> None:
    label = FieldSpec("cls", np.dtype("<i8"), (), ragged=False, codec="integer")
    sizes = np.array([[5, 1], [6, 3]])  # of text and digits
    stored = SampleTable([STORED, label], [2], np.array([[0, 5], [6, 12]]), sizes, identity=b"test")
    told = np.array([[3], [4]], np.int32)
    sized = MeasuredIndex(stored, [STORED, label], [TOKENS], [label], told)
    index = RecordIndex(sized, as_records([TOKENS], [label]))
    assert index.locate(np.arange(2)).size.tolist() == [[12, 8], [16, 8]]
    assert index.starts.tolist() == [0, 20, 44]


def test_a_read_of_several_records_is_cut_at_their_borders() -> None:
    generator = np.random.default_rng(1)
    sizes = generator.integers(0, 5, 200) * generator.integers(0, 2, 200)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    stored = generator.integers(0, 256, starts[-1]).astype(np.uint8)
    begins = generator.integers(0, starts[-1] - 30, 50)
    wanted = [stored[begin : begin + 1 + begin % 30] for begin in begins.tolist()]
    memories = [np.zeros(len(each), np.uint8) for each in wanted]
    pieces = pieces_of(Reads.into(memories, [0] * 50, begins.tolist()), starts)
    assert (pieces.size > 0).all()
    assert (pieces.start >= starts[pieces.sample]).all()
    assert (pieces.start + pieces.size <= starts[pieces.sample + 1]).all()
    addresses = {memory.ctypes.data: memory for memory in memories}
    owners = sorted(addresses)
    for start, size, target in zip(
        pieces.start.tolist(), pieces.size.tolist(), pieces.target.tolist(), strict=True
    ):
        owner = owners[int(np.searchsorted(owners, target, side="right")) - 1]
        addresses[owner][target - owner : target - owner + size] = stored[start : start + size]
    for memory, its in zip(memories, wanted, strict=True):
        assert memory.tolist() == its.tolist()
