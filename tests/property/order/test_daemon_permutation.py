"""The permutation is a bijection with an inverse at every size, and each key gives another one."""

import hashlib

import numpy as np
import pytest
from gyre_daemon.order.permutation import (
    ALGORITHM_VERSION,
    MAX_SAMPLES,
    Permutation,
    _ComputedRounds,
    _TabledRounds,
    epoch_key,
)
from hypothesis import given
from hypothesis import strategies as st

# Around the powers of two at which the rounds come from tables, from arithmetic, or need 64 bits.
WHOLE_SIZES = [
    *(1, 2, 3),
    *(size for k in (2, 3, 11, 12, 13, 17) for size in (2**k - 1, 2**k, 2**k + 1)),
]
LARGE_SIZES = [
    size
    for k in (21, 22, 31, 32, 33, 40, 62)
    for size in (2**k - 1, 2**k, 2**k + 1)
    if size <= MAX_SAMPLES
]

keys = st.builds(epoch_key, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


@pytest.mark.parametrize("num_samples", WHOLE_SIZES)
def test_every_sample_once(num_samples: int) -> None:
    everywhere = np.arange(num_samples)
    for epoch in range(3):
        permutation = Permutation(epoch_key(5, epoch), num_samples)
        ids = permutation(everywhere)
        assert np.array_equal(np.sort(ids), everywhere)
        assert np.array_equal(permutation.inverse(ids), everywhere)
        assert np.array_equal(permutation(permutation.inverse(everywhere)), everywhere)


@pytest.mark.parametrize("num_samples", LARGE_SIZES)
def test_large_sizes_at_random_places(num_samples: int) -> None:
    generator = np.random.default_rng(num_samples)
    drawn = generator.integers(num_samples, size=4000)
    places = np.unique(np.concatenate((drawn, np.arange(64), num_samples - 1 - np.arange(64))))
    for seed in range(2):
        permutation = Permutation(epoch_key(seed, 9), num_samples)
        ids = permutation(places)
        assert ids.dtype == np.int64
        assert 0 <= ids.min() <= ids.max() < num_samples
        assert len(np.unique(ids)) == len(places)
        assert np.array_equal(permutation.inverse(ids), places)
        assert np.array_equal(permutation(permutation.inverse(places)), places)


@given(keys, st.integers(1, MAX_SAMPLES) | st.integers(1, 10_000), st.data())
def test_any_size_and_key(key: bytes, num_samples: int, data: st.DataObject) -> None:
    drawn = data.draw(
        st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=50, unique=True)
    )
    places = np.array(drawn, np.int64)
    permutation = Permutation(key, num_samples)
    ids = permutation(places)
    assert ((ids >= 0) & (ids < num_samples)).all()
    assert len(np.unique(ids)) == len(places)
    assert np.array_equal(permutation.inverse(ids), places)
    assert np.array_equal(
        np.concatenate([permutation(places[i : i + 1]) for i in range(len(places))]), ids
    )
    assert places.tolist() == drawn, "the argument is left alone"


@pytest.mark.parametrize("num_samples", [0, -1, MAX_SAMPLES + 1])
def test_sizes_that_nothing_permutes(num_samples: int) -> None:
    with pytest.raises(ValueError, match="1 to 2"):
        Permutation(epoch_key(0, 0), num_samples)


def test_neighbouring_seeds_and_epochs_share_nothing() -> None:
    """Orders that have nothing to do with each other agree at one place on average, as Poisson(1).

    12 is beyond one in 10⁹.
    """
    for num_samples in (2000, 5000):
        grid = {
            (seed, epoch): order(seed, epoch, num_samples)
            for seed in range(6)
            for epoch in range(6)
        }
        for (seed, epoch), ids in grid.items():
            others = [(seed + 1, epoch - 1), (seed + 1, epoch), (seed, epoch + 1), (epoch, seed)]
            for other in others:
                if other in grid and other != (seed, epoch):
                    assert (ids == grid[other]).sum() < 12, (
                        f"{(seed, epoch)} and {other} of {num_samples}"
                    )


@pytest.mark.parametrize("num_bits", [2, 3, 12, 13, 21, 22])
def test_rounds_from_tables_are_those_that_are_computed(num_bits: int) -> None:
    keys = [np.uint32(word) for word in np.random.default_rng(num_bits).integers(0, 2**32, 8)]
    values = np.random.default_rng(0).integers(0, 1 << num_bits, 3000)
    tabled, computed = _TabledRounds(keys, num_bits), _ComputedRounds(keys, num_bits)
    assert np.array_equal(tabled.forward(values), computed.forward(values))
    assert np.array_equal(tabled.backward(values), computed.backward(values))
    assert np.array_equal(tabled.backward(tabled.forward(values)), values)


def test_keys_differ() -> None:
    numbers = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    assert (
        len({epoch_key(seed, epoch) for seed in numbers for epoch in numbers}) == len(numbers) ** 2
    )


@pytest.mark.parametrize(
    ("num_samples", "digest"),
    [
        (1000, "1cd1ac6e1ea3143c"),
        (4096, "e82a69dc23c629fd"),
        (4097, "98d1ce508881e549"),
        (10**12, "5f3447d0c27355c4"),
    ],
)
def test_orders_of_this_version_never_change(num_samples: int, digest: str) -> None:
    """A cursor promises the order of its algorithm's version.

    A change of any order needs a new version number.
    """
    assert ALGORITHM_VERSION == 2
    ids = np.concatenate(
        [order(seed, epoch, num_samples) for seed, epoch in ((0, 0), (7, 3), (2**64 - 1, 2**63))]
    )
    assert hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8).hexdigest() == digest


def order(seed: int, epoch: int, num_samples: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return Permutation(epoch_key(seed, epoch), num_samples)(np.arange(min(num_samples, 5000)))
