"""The order is indistinguishable from a uniformly random one, as far as these tests can see.

Each test gives one p-value, two-sided where too even is a fault as well. All together may reject a
perfect shuffle once in a hundred times (`FAMILY_ALPHA`, divided by the number of p-values:
Bonferroni); the keys are fixed, so a run never differs from the last. What each test would see is
shown on orders that are broken on purpose, and, for the chi-square tests, stated as the smallest
bias that is found 99 times in a hundred.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy
from gyre_daemon.order.permutation import (
    Permutation,
    _FeistelNetwork,
    _TabledRounds,
    epoch_key,
)

Orders = npt.NDArray[np.int64]  # [K, N]: the ids of K epochs at places 0 to N - 1
Shuffle = Callable[[int, int], npt.NDArray[np.int64]]  # number of a key, N -> ids [N]
Test = Callable[[Orders], float]

FAMILY_ALPHA = 0.01
FEW_KEYS, SOME_KEYS, MANY_KEYS = 24, 1000, 20_000
SMALL_SIZES = (2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 64)
LARGE_SIZES = (4097, 20_011, 1 << 15, (1 << 15) + 1)
SMALL_TABLE, SMALL_NETWORK = 64, 4099  # for the statistics of whole orders: a table, and a network


def gyre(key: int, num_samples: int) -> npt.NDArray[np.int64]:
    return Permutation(epoch_key(seed=key // 2, epoch=key % 2), num_samples)(np.arange(num_samples))


def uniform(key: int, num_samples: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(key).permutation(num_samples)


def shuffle_buffer(key: int, num_samples: int) -> npt.NDArray[np.int64]:
    """A sequential stream through a buffer of 1000: what the loader must never do."""
    generator, buffer, ids = random.Random(key), [], []
    for sample_id in range(num_samples):
        buffer.append(sample_id)
        if len(buffer) == 1000:
            chosen = generator.randrange(1000)
            buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
            ids.append(buffer.pop())
    generator.shuffle(buffer)
    return np.array(ids + buffer)


def two_rounds(key: int, num_samples: int) -> npt.NDArray[np.int64]:
    short = _FeistelNetwork(epoch_key(key, 0), num_samples)
    assert isinstance(short._rounds, _TabledRounds)
    short._rounds._tables = short._rounds._tables[:2]
    return short.forward(np.arange(num_samples))


def network(key: int, num_samples: int) -> npt.NDArray[np.int64]:
    """The network, where the table should be."""
    return _FeistelNetwork(epoch_key(key, 0), num_samples).forward(np.arange(num_samples))


def network_without_exchange(key: int, num_samples: int) -> npt.NDArray[np.int64]:
    """Even permutations of a power of two."""
    even = _FeistelNetwork(epoch_key(key, 0), num_samples)
    even._exchanges = 0
    return even.forward(np.arange(num_samples))


def affine(key: int, num_samples: int) -> npt.NDArray[np.int64]:
    generator = random.Random(key)
    factor = next(
        a
        for a in iter(lambda: generator.randrange(1, num_samples), 0)
        if np.gcd(a, num_samples) == 1
    )
    return (np.arange(num_samples) * factor + generator.randrange(num_samples)) % num_samples


def mostly_uniform(key: int, num_samples: int) -> npt.NDArray[np.int64]:
    """Uniform, but in 3 % of the epochs sample 0 comes first."""
    ids = uniform(key, num_samples)
    if key % 100 < 3:
        ids[[0, int(np.flatnonzero(ids == 0)[0])]] = ids[[int(np.flatnonzero(ids == 0)[0]), 0]]
    return ids


def orders_of(shuffle: Shuffle, num_keys: int, num_samples: int) -> Orders:
    return np.stack([shuffle(key, num_samples) for key in range(num_keys)])


def two_sided(statistic: float, degrees: int) -> float:
    return float(
        2 * min(scipy.stats.chi2.cdf(statistic, degrees), scipy.stats.chi2.sf(statistic, degrees))
    )


def chi_square(counts: npt.NDArray[Any], expected: npt.NDArray[Any] | float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def ids_at_places(orders: Orders) -> float:
    """Every id comes at every place equally often.

    The cells of permutations vary a little more than those of a multinomial.
    """
    num_keys, num_samples = orders.shape
    cells = (orders + np.arange(num_samples) * num_samples).ravel()
    counts = np.bincount(cells, minlength=num_samples**2)
    return two_sided(
        chi_square(counts, num_keys / num_samples) * (num_samples - 1) / num_samples,
        (num_samples - 1) ** 2,
    )


def pairs_at_places(orders: Orders) -> float:
    """Every ordered pair of ids comes equally often at the first two places."""
    num_keys, num_samples = orders.shape
    table = np.bincount(
        orders[:, 0] * num_samples + orders[:, 1], minlength=num_samples**2
    ).reshape(num_samples, -1)
    counts = table[~np.eye(num_samples, dtype=bool)]
    return two_sided(chi_square(counts, num_keys / len(counts)), len(counts) - 1)


def places_against_ids(orders: Orders, num_bins: int = 16) -> float:
    """Each sixteenth of an epoch takes from each sixteenth of the ids as much as chance gives."""
    num_keys, num_samples = orders.shape
    bins = np.arange(num_samples) * num_bins // num_samples
    sizes = np.bincount(bins)
    expected = np.outer(sizes, sizes) / num_samples
    total = 0.0
    for ids in orders:
        counts = np.bincount(bins * num_bins + bins[ids], minlength=num_bins**2).reshape(
            num_bins, num_bins
        )
        total += chi_square(counts, expected) * (num_samples - 1) / num_samples
    return two_sided(total, num_keys * (num_bins - 1) ** 2)


def displacements(orders: Orders) -> float:
    """How far samples move.

    |id - place| / N has the distribution function 1 - (1 - x)² (Kolmogorov-Smirnov).
    """
    num_keys, num_samples = orders.shape
    places = np.random.default_rng(1).integers(num_samples, size=(num_keys, 1000))
    moved = np.abs(np.take_along_axis(orders, places, axis=1) - places) / num_samples
    return float(scipy.stats.kstest(moved.ravel(), lambda x: 1 - (1 - x) ** 2).pvalue)


def steps_between_neighbours(orders: Orders, num_bins: int = 256) -> float:
    """From one place to the next, every step (modulo N) is equally likely."""
    _, num_samples = orders.shape
    steps = (orders[:, 1::2] - orders[:, :-1:2]) % num_samples  # disjoint pairs of places
    counts = np.bincount(((steps - 1) * num_bins // (num_samples - 1)).ravel(), minlength=num_bins)
    widths = np.bincount(np.arange(num_samples - 1) * num_bins // (num_samples - 1))
    return two_sided(chi_square(counts, counts.sum() * widths / widths.sum()), num_bins - 1)


def serial_correlation(orders: Orders) -> float:
    """Successive ids are uncorrelated."""
    num_keys, num_samples = orders.shape
    centred = (orders - (num_samples - 1) / 2) / np.sqrt((num_samples**2 - 1) / 12)
    products = (centred[:, 1:] * centred[:, :-1]).sum() / np.sqrt(num_keys * (num_samples - 1))
    return float(2 * scipy.stats.norm.sf(abs(products)))


def batch_mates(orders: Orders, batch_size: int = 64, shard_size: int = 256) -> float:
    """Batches hold as many pairs of one shard as chance gives."""
    num_keys, num_samples = orders.shape
    num_batches, num_shards = num_samples // batch_size, num_samples // shard_size
    shards = orders[:, : num_batches * batch_size].reshape(-1, batch_size) // shard_size
    num_kept = num_shards * shard_size  # ids beyond the last whole shard are in no pair
    counts = np.stack(
        [np.bincount(batch[batch < num_shards], minlength=num_shards) for batch in shards]
    )
    num_pairs = (counts * (counts - 1) // 2).sum()
    places = num_keys * num_batches * batch_size * (batch_size - 1) / 2
    chance = (num_kept / num_samples) * (shard_size - 1) / (num_samples - 1)
    return float(
        2
        * scipy.stats.norm.sf(
            abs(num_pairs - places * chance) / np.sqrt(places * chance * (1 - chance))
        )
    )


def fixed_points(orders: Orders) -> float:
    """The number of samples that stay in their places is Poisson with mean 1."""
    num_keys, num_samples = orders.shape
    counts = np.bincount(np.minimum((orders == np.arange(num_samples)).sum(axis=1), 5), minlength=6)
    shares = np.append(scipy.stats.poisson.pmf(np.arange(5), 1), scipy.stats.poisson.sf(4, 1))
    return two_sided(chi_square(counts, num_keys * shares), 5)


def cycles(orders: Orders) -> float:
    """The number of cycles is a sum of Bernoulli variables of means 1, 1/2, ..., 1/N.

    So its mean is H_N.
    """
    num_keys, num_samples = orders.shape
    smallest, ahead = np.broadcast_to(np.arange(num_samples), orders.shape), orders
    # `ahead` looks 2^k places ahead, `smallest` is the least id on the way
    for _ in range(num_samples.bit_length()):
        smallest = np.minimum(smallest, np.take_along_axis(smallest, ahead, axis=1))
        ahead = np.take_along_axis(ahead, ahead, axis=1)
    observed = (smallest == np.arange(num_samples)).sum(axis=1)
    shares = np.ones(1)
    for length in range(1, num_samples + 1):
        shares = np.convolve(shares, [1 - 1 / length, 1 / length])
    # the others are counted with the nearest of these
    common = np.flatnonzero(shares * num_keys >= 10)
    nearest = np.clip(np.arange(num_samples + 1), common[0], common[-1]) - common[0]
    counts = np.bincount(nearest[observed], minlength=len(common))
    return two_sided(chi_square(counts, num_keys * np.bincount(nearest, shares)), len(common) - 1)


LARGE_TESTS: list[Test] = [
    places_against_ids,
    displacements,
    steps_between_neighbours,
    serial_correlation,
    batch_mates,
]
CASES: list[tuple[Test, int, int]] = [
    *((ids_at_places, MANY_KEYS, size) for size in SMALL_SIZES),
    *((pairs_at_places, MANY_KEYS, size) for size in SMALL_SIZES),
    *((test, FEW_KEYS, size) for test in LARGE_TESTS for size in LARGE_SIZES),
    *((test, MANY_KEYS, SMALL_TABLE) for test in (fixed_points, cycles)),
    *((test, SOME_KEYS, SMALL_NETWORK) for test in (fixed_points, cycles)),
]
ALPHA = FAMILY_ALPHA / len(CASES)


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("test", "num_keys", "num_samples"), CASES, ids=name_of)
def test_the_order_passes(test: Test, num_keys: int, num_samples: int) -> None:
    assert test(orders_of(gyre, num_keys, num_samples)) > ALPHA


FIRST_CASES = list({case[0]: case for case in reversed(CASES)}.values())  # of each test


@pytest.mark.parametrize(("test", "num_keys", "num_samples"), FIRST_CASES, ids=name_of)
def test_a_uniform_order_passes(test: Test, num_keys: int, num_samples: int) -> None:
    """The tests are right about what is uniform."""
    assert test(orders_of(uniform, num_keys, num_samples)) > ALPHA


@pytest.mark.parametrize(
    ("num_observations", "degrees", "bias"),
    [
        (MANY_KEYS * 5, 4**2, 0.03),  # ids_at_places
        (MANY_KEYS * 16, 15**2, 0.025),
        (MANY_KEYS * 64, 63**2, 0.025),
        (MANY_KEYS, 5 * 4 - 1, 0.06),  # pairs_at_places
        (MANY_KEYS, 16 * 15 - 1, 0.1),
        (MANY_KEYS, 64 * 63 - 1, 0.18),
        (FEW_KEYS * 4097, FEW_KEYS * 15**2, 0.09),  # places_against_ids
        (FEW_KEYS * (1 << 15), FEW_KEYS * 15**2, 0.03),
        (FEW_KEYS * 4097 // 2, 255, 0.06),  # steps_between_neighbours
        (FEW_KEYS * (1 << 15) // 2, 255, 0.025),
        (MANY_KEYS, 5, 0.05),  # fixed_points
        (SOME_KEYS, 5, 0.25),
    ],
)
def test_power(num_observations: int, degrees: int, bias: float) -> None:
    """The chi-square tests find cells that are off by `bias` (root mean square) 99 times in 100."""
    rejected_above = scipy.stats.chi2.isf(ALPHA / 2, degrees)
    assert scipy.stats.ncx2.sf(rejected_above, degrees, num_observations * bias**2) > 0.99


@pytest.mark.parametrize(
    ("test", "shuffle", "num_keys", "num_samples"),
    [
        (ids_at_places, mostly_uniform, MANY_KEYS, 16),
        (ids_at_places, mostly_uniform, MANY_KEYS, 64),
        (pairs_at_places, network, 5000, 8),
        (cycles, network_without_exchange, 300, SMALL_NETWORK),
        (fixed_points, two_rounds, SOME_KEYS, SMALL_NETWORK),
        (places_against_ids, two_rounds, FEW_KEYS, 1 << 15),
        (places_against_ids, shuffle_buffer, FEW_KEYS, 20_011),
        (places_against_ids, affine, FEW_KEYS, 20_011),
        (displacements, shuffle_buffer, FEW_KEYS, 20_011),
        (steps_between_neighbours, shuffle_buffer, FEW_KEYS, 20_011),
        (steps_between_neighbours, affine, FEW_KEYS, 20_011),
        (serial_correlation, shuffle_buffer, FEW_KEYS, 20_011),
        (batch_mates, shuffle_buffer, FEW_KEYS, 20_011),
        (batch_mates, affine, FEW_KEYS, 20_011),
    ],
    ids=name_of,
)
def test_a_broken_order_fails(
    test: Test, shuffle: Shuffle, num_keys: int, num_samples: int
) -> None:
    assert test(orders_of(shuffle, num_keys, num_samples)) < ALPHA
