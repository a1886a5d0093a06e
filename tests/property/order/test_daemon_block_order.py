"""The order `block`.

A bijection at any size, in which a block is read within one stretch, and batch-mates come from
afar.
"""

import hashlib
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import scipy
from gyre_daemon.order.permutation import (
    BlockOrder,
    BlockTable,
    blocks_of_equal_samples,
    blocks_of_unequal_samples,
    default_io_block_bytes,
    default_window_blocks,
)
from hypothesis import given
from hypothesis import strategies as st

Integers = npt.NDArray[np.int64]


def equal_table(counts: list[int], stride_bytes: int, io_block_bytes: int) -> BlockTable:
    return blocks_of_equal_samples(np.array(counts, np.int64), stride_bytes, io_block_bytes)


def unequal_table(shards: list[list[int]], io_block_bytes: int) -> BlockTable:
    shard = np.repeat(np.arange(len(shards)), [len(sizes) for sizes in shards])
    stop = np.concatenate([np.cumsum(sizes) for sizes in shards])
    return blocks_of_unequal_samples(shard, stop - np.concatenate(shards), stop, io_block_bytes)


tables = st.one_of(
    st.builds(
        equal_table,
        st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
        st.integers(1, 20),
        st.integers(1, 200),
    ),
    st.builds(
        unequal_table,
        st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=40), min_size=1, max_size=4),
        st.integers(1, 300),
    ),
)


@given(tables)
def test_every_sample_is_in_one_block_of_one_run_of_ids(table: BlockTable) -> None:
    blocks = table.block_of(np.arange(table.num_samples))
    assert (np.diff(blocks, prepend=-1) <= 1).all()
    assert (np.diff(blocks) >= 0).all()
    assert blocks[-1] == table.num_blocks - 1
    every = np.arange(table.num_blocks)
    assert np.array_equal(table.sizes(every), np.bincount(blocks))
    assert np.array_equal(table.first_sample(every), np.searchsorted(blocks, every))
    irregular = np.flatnonzero(table.sizes(every) != table.regular_size)
    assert table.irregular().tolist() == irregular.tolist()


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=5).filter(any),
    st.integers(1, 20),
    st.integers(1, 300),
)
def test_blocks_of_equal_samples_are_about_as_long_as_asked_for(
    counts: list[int], stride: int, wanted: int
) -> None:
    table = equal_table(counts, stride, wanted)
    size = max(1, wanted // stride)
    begin = 0
    for count in filter(None, counts):
        sizes = np.bincount(table.block_of(np.arange(begin, begin + count)))
        sizes = sizes[sizes > 0]
        assert (sizes[:-1] == size).all()
        assert sizes[-1] == count or size <= 2 * sizes[-1] <= 3 * size
        begin += count
        assert begin in table.first_sample(np.arange(table.num_blocks + 1)), (
            "no block spans two shards"
        )


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=60), min_size=1, max_size=4),
    st.integers(1, 500),
)
def test_blocks_of_unequal_samples_are_about_as_long_as_asked_for(
    shards: list[list[int]], wanted: int
) -> None:
    table = unequal_table(shards, wanted)
    begins = table.first_sample(np.arange(table.num_blocks + 1)).tolist()
    first = 0
    for sizes in shards:
        cuts = [at - first for at in begins if first <= at <= first + len(sizes)]
        assert cuts[0] == 0
        assert cuts[-1] == len(sizes), "no block spans two shards"
        lengths = [sum(sizes[a:b]) for a, b in pairwise(cuts)]
        assert max(lengths) <= 1.5 * wanted + max(sizes) + 1
        first += len(sizes)


@given(tables, st.integers(1, 70), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_every_sample_once(table: BlockTable, window_blocks: int, seed: int, epoch: int) -> None:
    order, everywhere = BlockOrder(seed, epoch, table, window_blocks), np.arange(table.num_samples)
    ids = order(everywhere)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), everywhere)
    assert np.array_equal(order.inverse(ids), everywhere)
    some = everywhere[:: max(1, len(everywhere) // 5)]
    assert np.array_equal(
        np.concatenate([order(some[i : i + 1]) for i in range(len(some))]), order(some)
    ), "from any place"


@pytest.mark.parametrize(
    ("num_samples", "shard_samples", "window_blocks"),
    [
        (10**12, 10**9, 1024),
        (10**12 - 1, 10**9 + 7, 256),
        (2**40, 2**28, 255),
        (2**40 + 1, 2**28 - 1, 512),
        (2**40 - 1, 999_983, 3),
        (10**9, 10**9, 1),
        (10**6 + 3, 10**5, 4096),
    ],
)
def test_large_sizes_at_random_places(
    num_samples: int, shard_samples: int, window_blocks: int
) -> None:
    num_shards, rest = divmod(num_samples, shard_samples)
    table = equal_table([shard_samples] * num_shards + [rest], 2048, 1 << 20)
    generator = np.random.default_rng(num_samples)
    places = np.unique(
        np.concatenate(
            (
                generator.integers(num_samples, size=4000),
                np.arange(64),
                num_samples - 1 - np.arange(64),
            )
        )
    )
    order = BlockOrder(3, 5, table, window_blocks)
    ids = order(places)
    assert 0 <= ids.min() <= ids.max() < num_samples
    assert len(np.unique(ids)) == len(places)
    assert np.array_equal(order.inverse(ids), places)
    assert np.array_equal(order(order.inverse(places)), places)


@pytest.mark.parametrize(
    "table",
    [equal_table([4000, 3777, 5], 10, 1000), unequal_table([[5] * 900, [1, 30] * 700], 200)],
)
@pytest.mark.parametrize("window_blocks", [1, 8, 33])
def test_a_block_is_read_within_one_stretch(table: BlockTable, window_blocks: int) -> None:
    """No block is alive outside a window of its turn, so each is read once.

    And few are alive at a time.
    """
    blocks = table.block_of(BlockOrder(1, 2, table, window_blocks)(np.arange(table.num_samples)))
    first, last = np.full(table.num_blocks, -1), np.zeros(table.num_blocks, np.int64)
    for place, block in enumerate(blocks.tolist()):
        first[block] = place if first[block] < 0 else first[block]
        last[block] = place
    alive = np.zeros(table.num_samples + 1, np.int64)
    np.add.at(alive, first, 1)
    np.add.at(alive, last + 1, -1)
    size = table.num_samples / table.num_blocks
    lace = window_blocks / size  # groups come interlaced where they are shorter than the window
    largest = float(table.sizes(np.arange(table.num_blocks)).max())
    assert alive.cumsum().max() <= window_blocks + 2 * lace + 3
    assert (last - first).max() <= (window_blocks + 2 * lace + 2) * size + 2 * largest


def test_blocks_come_one_after_the_other() -> None:
    """In steady state a group of places asks for one block that was not alive before."""
    table = equal_table([64 * 1000], 1, 64)
    blocks = table.block_of(BlockOrder(1, 2, table, 33)(np.arange(table.num_samples))).reshape(
        1000, 64
    )
    seen: set[int] = set()
    new = []
    for group in blocks:
        new.append(len(set(group.tolist()) - seen))
        seen |= set(group.tolist())
    assert new[0] == 17, "half a window to begin with"
    assert new[1:-16] == [1] * 983


@pytest.mark.parametrize(("size", "window_blocks"), [(64, 33), (512, 129), (8, 65), (3, 65)])
def test_successive_samples_come_from_different_blocks(size: int, window_blocks: int) -> None:
    """A quarter of the window, from anywhere.

    Nearly all are of different blocks where a random choice would double up.
    """
    table = equal_table([size * 600], 1, size)
    blocks = table.block_of(BlockOrder(4, 0, table, window_blocks)(np.arange(table.num_samples)))
    batch = window_blocks // 4
    starts = np.arange(40 * size, table.num_samples - 80 * size, 7)
    different = np.mean([len(np.unique(blocks[at : at + batch])) for at in starts])
    assert different >= 0.97 * batch


@pytest.mark.parametrize("window_blocks", [1, 16, 200])
def test_epochs_and_seeds_share_nothing(window_blocks: int) -> None:
    """Orders that have nothing to do with each other agree at one place on average, as Poisson(1).

    12 is beyond one in 10⁹.
    """
    table = equal_table([5000], 1, 25)
    orders = [
        BlockOrder(seed, epoch, table, window_blocks)(np.arange(5000))
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    for one in range(4):
        for other in range(one):
            assert (orders[one] == orders[other]).sum() < 12


NUM_KEYS = 4000
ALPHA = 0.001  # of each of eight p-values; the keys are fixed


@pytest.mark.parametrize(("place", "window_blocks"), [(0, 50), (137, 8), (499, 1)])
def test_every_sample_may_come_anywhere(place: int, window_blocks: int) -> None:
    """Over 4000 keys, each of 50 stretches of ten ids is at a place as often as any other.

    A stretch that comes there twice as often as it should is found 99 times in a hundred.
    """
    table = equal_table([500], 1, 10)
    ids = np.array(
        [BlockOrder(key, 0, table, window_blocks)(np.array([place]))[0] for key in range(NUM_KEYS)]
    )
    assert scipy.stats.chisquare(np.bincount(ids // 10, minlength=50)).pvalue > ALPHA
    assert scipy.stats.chisquare(np.bincount(ids % 10, minlength=10)).pvalue > ALPHA


@pytest.mark.parametrize("apart", [1, 100])
def test_samples_of_a_batch_lie_as_far_apart_as_uniformly_random_ones(apart: int) -> None:
    """Two samples `apart` places from each other have the right distances in the dataset.

    There are 1000 keys.

    The Kolmogorov-Smirnov test finds a deviation of 0.05 from its distribution 99 times in a
    hundred at this size.
    """
    table = equal_table([100_000], 1, 10)
    first = np.array([10_000, 40_000, 60_000, 90_000])
    places = np.concatenate((first, first + apart))
    pairs = np.concatenate(
        [BlockOrder(key, 1, table, 256)(places).reshape(2, 4).T for key in range(NUM_KEYS // 4)]
    )
    distance = np.abs(pairs[:, 0] - pairs[:, 1]) / 100_000
    assert scipy.stats.kstest(distance, lambda x: 1 - (1 - x) ** 2).pvalue > ALPHA


@pytest.mark.parametrize(
    ("table", "window_blocks", "digest"),
    [
        (equal_table([1000, 333], 3, 100), 16, "c78dae365edf46e3"),
        (equal_table([10**9] * 5, 2048, 1 << 20), 1024, "e3a74b2971e9ec97"),
        (unequal_table([[3, 1, 4, 1, 5, 9, 2, 6] * 50], 100), 9, "996e64f7203fe469"),
    ],
)
def test_orders_of_this_version_never_change(
    table: BlockTable, window_blocks: int, digest: str
) -> None:
    """A cursor promises the order of its algorithm's version.

    A change of any order needs a new version number.
    """
    ids = BlockOrder(7, 3, table, window_blocks)(np.arange(min(table.num_samples, 5000)))
    assert hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8).hexdigest() == digest


@pytest.mark.parametrize(
    ("batch", "window", "io_block"),
    [(1, 256, 2 << 20), (256, 1024, 512 << 10), (4096, 4096, 128 << 10)],
)
def test_defaults_follow_from_the_batch_alone(batch: int, window: int, io_block: int) -> None:
    assert default_window_blocks(batch) == window
    assert default_io_block_bytes(window) == io_block
