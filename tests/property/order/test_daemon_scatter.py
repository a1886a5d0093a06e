"""Many small permutations at once.

Each is a bijection of its range with an inverse, and none leans to any value.
"""

import numpy as np
import numpy.typing as npt
import pytest
import scipy
from gyre_daemon.order.permutation import SCATTER_KEY_BYTES, Scatter
from hypothesis import given
from hypothesis import strategies as st

KEY = bytes(range(SCATTER_KEY_BYTES))


def every_value(ranges: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Where each range's values 0 to size - 1 go: [ranges, size]."""
    names, values = np.repeat(ranges, size), np.tile(np.arange(size), len(ranges))
    return Scatter(KEY)(names, values, np.full(len(values), size)).reshape(len(ranges), size)


@given(st.binary(min_size=SCATTER_KEY_BYTES, max_size=SCATTER_KEY_BYTES), st.data())
def test_each_range_is_permuted(key: bytes, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=8))
    names = np.repeat([data.draw(st.integers(0, 2**62)) for _ in sizes], sizes)
    values, each_size = np.concatenate([np.arange(size) for size in sizes]), np.repeat(sizes, sizes)
    scatter = Scatter(key)
    moved = scatter(names, values, each_size)
    begin = 0
    for size in sizes:
        assert sorted(moved[begin : begin + size]) == list(range(size))
        begin += size
    assert np.array_equal(scatter.inverse(names, moved, each_size), values)
    assert np.array_equal(scatter(names[::-1], values[::-1], each_size[::-1])[::-1], moved), (
        "each value is on its own"
    )


@pytest.mark.parametrize("size", [2**16 + 1, 2**31 - 1])
def test_wide_ranges(size: int) -> None:
    values = np.unique(np.random.default_rng(size).integers(size, size=4000))
    names, sizes = np.full(len(values), 7), np.full(len(values), size)
    moved = Scatter(KEY)(names, values, sizes)
    assert 0 <= moved.min() <= moved.max() < size
    assert len(np.unique(moved)) == len(values)
    assert np.array_equal(Scatter(KEY).inverse(names, moved, sizes), values)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 17, 40, 257])
def test_every_value_is_equally_likely_everywhere(size: int) -> None:
    """A value that comes to a place a fifth too often (size 17) is found 97 times in a hundred.

    Alpha is 0.001 each.
    """
    num_ranges = 20_000
    moved = every_value(np.arange(num_ranges), size)
    for place in {0, 1, size // 2, size - 1}:
        counts = np.bincount(moved[:, place], minlength=size)
        assert scipy.stats.chisquare(counts).pvalue > 0.001, f"place {place} of {size}"


@pytest.mark.parametrize("size", [4, 5, 6, 8, 16, 41, 257])
def test_neighbours_are_separated(size: int) -> None:
    """Where the values 0 and 1 go differs by anything but 0 with equal probability.

    20,000 ranges, alpha 0.001.

    With six rounds sizes 5, 6 and 8 fail, with a network of three bits too.
    """
    moved = every_value(np.arange(20_000), size)
    counts = np.bincount((moved[:, 1] - moved[:, 0]) % size, minlength=size)
    assert counts[0] == 0
    assert scipy.stats.chisquare(counts[1:]).pvalue > 0.001


def test_ranges_are_independent() -> None:
    """Neighbouring ranges agree at one place on average, as Poisson(1)."""
    moved = every_value(np.arange(500), 101)
    agreeing = (moved[1:] == moved[:-1]).sum(axis=1)
    assert abs(agreeing.mean() - 1) < 0.2
    assert agreeing.max() < 10
