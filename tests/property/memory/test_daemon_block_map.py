"""Which block contains a read: the one with all of it, or none."""

import numpy as np
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.reads import Reads
from hypothesis import given
from hypothesis import strategies as st

blocks = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=12
)
reads = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 80), st.integers(1, 20)), min_size=1, max_size=20
)


def block_map(lengths: list[tuple[int, int, int]]) -> BlockMap:
    """Blocks one after the other in each shard, with gaps between them.

    Some have no byte, and begin anywhere.
    """
    shard, start, stop = [], [], []
    for index in sorted({each[0] for each in lengths}):
        end = 0
        for _, gap, size in (each for each in lengths if each[0] == index):
            shard.append(index)
            start.append(end + gap if size else 1000 - end)
            stop.append(start[-1] + size)
            end = stop[-1] if size else end
    return BlockMap.of(np.array(shard), np.array(start), np.array(stop))


@given(blocks, reads)
def test_a_read_lies_in_the_block_that_has_all_of_it(
    lengths: list[tuple[int, int, int]], wanted: list[tuple[int, int, int]]
) -> None:
    its = block_map(lengths)
    shard, start, size = (np.array(column, np.int64) for column in zip(*wanted, strict=True))
    found = its.blocks_of(Reads(shard, start, size, start.astype(np.uint64), start, ()))
    for index, block in enumerate(found.tolist()):
        holders = np.flatnonzero(
            (its.shard == shard[index])
            & (its.start <= start[index])
            & (start[index] + size[index] <= its.stop)
        )
        assert block == (holders[0] if holders.size else -1)


@given(blocks)
def test_no_two_blocks_share_a_page_of_the_file(
    lengths: list[tuple[int, int, int]],
) -> None:
    its = block_map(lengths)
    offsets = its.offsets()
    assert len(offsets) == its.num_blocks + 1
    assert (offsets % 4096 == 0).all()
    assert (np.diff(offsets) >= its.sizes()).all()
    assert (np.diff(offsets) < its.sizes() + 4096).all()


def test_blocks_may_overlap_where_samples_do() -> None:
    its = BlockMap.of(np.zeros(3, np.int64), np.array([0, 90, 180]), np.array([100, 190, 280]))
    starts = np.array([0, 80, 90, 95, 170, 185])
    one = np.zeros(6, np.int64)
    assert its.blocks_of(Reads(one, starts, one + 10, one.astype(np.uint64), one, ())).tolist() == [
        0,
        0,
        1,
        1,
        1,
        2,
    ]


def test_moved_blocks_have_another_digest() -> None:
    one = BlockMap.of(np.zeros(2, np.int64), np.array([0, 100]), np.array([100, 200]))
    same = BlockMap.of(np.zeros(2, np.int64), np.array([0, 100]), np.array([100, 200]))
    other = BlockMap.of(np.zeros(2, np.int64), np.array([0, 101]), np.array([100, 200]))
    assert one.digest() == same.digest() != other.digest()
