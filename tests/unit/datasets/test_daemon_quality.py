"""Shuffle quality, on orders of which everybody knows how well they shuffle."""

import random

import numpy as np
import numpy.typing as npt
import pytest
from gyre_daemon.order.permutation import (
    blocks_of_equal_samples,
    blocks_of_unequal_samples,
    default_io_block_bytes,
    default_window_blocks,
)
from gyre_daemon.order.planner import (
    BatchPlanner,
    Order,
    OrderMode,
    ShuffleQuality,
    average,
    batch_quality,
    expected_quality,
)

N, G = 200_000, 256


def measured(ids: npt.NDArray[np.int64]) -> ShuffleQuality:
    """Of a whole epoch in this order."""
    places = np.arange(len(ids) // G * G).reshape(-1, G)
    return average([batch_quality(ids[its], its, len(ids)) for its in places])


def buffered(num_samples: int, size: int) -> npt.NDArray[np.int64]:
    """A sequential stream through a shuffle buffer."""
    generator, buffer, ids = random.Random(1), [], []
    for sample_id in range(num_samples):
        buffer.append(sample_id)
        if len(buffer) > size:
            place = generator.randrange(len(buffer))
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            ids.append(buffer.pop())
    generator.shuffle(buffer)
    return np.array(ids + buffer)


def test_the_order_by_sample_id_has_quality_zero() -> None:
    quality = measured(np.arange(N))
    assert quality.displacement == 0
    assert max(quality.spread, quality.mixing) < 0.01


def test_a_uniform_order_has_quality_one() -> None:
    quality = measured(np.random.default_rng(0).permutation(N))
    assert quality.worst > 0.97
    assert max(quality.displacement, quality.spread, quality.mixing) <= 1


@pytest.mark.parametrize("size", [1000, 8000])
def test_a_shuffle_buffer_is_as_good_as_it_is_long(size: int) -> None:
    quality = measured(buffered(N, size))
    assert quality.displacement < 4 * size / N
    assert quality.mixing < 4 * size / N
    assert quality.spread < 10 * size / N


def test_whole_shards_in_random_order_are_displaced_and_yet_not_mixed() -> None:
    shards = np.arange(N).reshape(50, 4000)[np.random.default_rng(0).permutation(50)]
    quality = measured(shards.reshape(-1))
    assert quality.displacement > 0.8
    assert quality.mixing < 0.05
    assert quality.spread < 0.1


def test_a_few_long_runs_are_mixed_and_yet_not_spread() -> None:
    """Eight streams from random places, in turn.

    Samples of a batch lie far apart, but in eight neighbourhoods.
    """
    lanes = np.arange(N).reshape(8, N // 8)[np.random.default_rng(0).permutation(8)]
    quality = measured(lanes.T.reshape(-1))
    assert quality.mixing > 0.8
    assert quality.spread < 0.1


@pytest.mark.parametrize(
    ("mode", "least", "most"), [("full", 0.97, 1.0), ("sequential", 0.0, 0.01)]
)
def test_what_is_expected_is_what_is_measured(mode: OrderMode, least: float, most: float) -> None:
    plan = BatchPlanner(Order(mode, "wrap", 3, G), N)
    assert least <= expected_quality(plan).worst <= most
    assert least <= measured(plan.sample_ids_at(np.arange(N))).worst <= most


@pytest.mark.parametrize("batch", [32, 256, 1024])
@pytest.mark.parametrize(
    ("num_samples", "sample_bytes"), [(200_000, 2048), (10**6, 100 << 10), (10**9, 2048)]
)
def test_blocks_shuffle_well_at_their_defaults(
    batch: int, num_samples: int, sample_bytes: int
) -> None:
    window = default_window_blocks(batch)
    shard_samples = min((64 << 20) // sample_bytes + 11, num_samples)
    num_shards, rest = divmod(num_samples, shard_samples)
    counts = np.array([shard_samples] * num_shards + [rest])
    table = blocks_of_equal_samples(counts, sample_bytes, default_io_block_bytes(window))
    order = Order("block", "wrap", 3, batch, default_io_block_bytes(window), window)
    assert expected_quality(BatchPlanner(order, num_samples, table)).worst >= 0.95


def test_blocks_of_samples_of_all_sizes_shuffle_well() -> None:
    sizes = np.random.default_rng(0).lognormal(10, 1.5, N).astype(np.int64)
    stop = np.cumsum(sizes)
    table = blocks_of_unequal_samples(np.zeros(N, np.int64), stop - sizes, stop, 1 << 20)
    plan = BatchPlanner(Order("block", "wrap", 3, G, 1 << 20, 1024), N, table)
    assert expected_quality(plan).worst >= 0.95
    assert measured(plan.sample_ids_at(np.arange(N))).worst >= 0.95


def test_a_narrow_window_has_a_low_quality() -> None:
    table = blocks_of_equal_samples(np.array([10**7]), 2048, 1 << 20)
    quality = expected_quality(BatchPlanner(Order("block", "wrap", 3, G, 1 << 20, 8), 10**7, table))
    assert quality.displacement > 0.9
    assert quality.spread < 0.1


def test_nothing_to_shuffle() -> None:
    assert expected_quality(BatchPlanner(Order("full", "wrap", 0, 1), 1)).worst == 1.0


@pytest.mark.parametrize(
    ("num_samples", "batch"), [(2, 1), (2, 2), (3, 7), (100, 1), (5000, 5000), (5000, 20_000)]
)
def test_any_size_has_a_quality(num_samples: int, batch: int) -> None:
    quality = expected_quality(BatchPlanner(Order("full", "wrap", 1, batch), num_samples))
    assert 0 <= quality.worst <= max(quality.displacement, quality.spread, quality.mixing) <= 1
