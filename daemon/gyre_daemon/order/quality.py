"""How well an order shuffles, between the order by sample id (0.0) and a uniform shuffle (1.0).

Pure arithmetic on sample ids. There are three numbers, since each sees a fault that the others do
not:

* *displacement*: how far samples are from their places in the dataset, on average. A shuffle
  buffer moves them by its size.
* *mixing*: how far apart in the dataset two samples of one batch are, on average. Reading whole
  shards leaves neighbours together.
* *spread*: from how many different neighbourhoods a batch comes, relative to its number of samples.
  Reading a run of samples from each of a few random places displaces and mixes well, but its
  batches know few places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.order.planner import BatchPlanner
from gyre_daemon.order.shuffle.permutation import Int64Array

# How much is looked at. These bound the time to some milliseconds; with a quarter of it the numbers
# would vary by several percent from one look to the next.
_MAX_BATCH_SAMPLES = 1024  # of a batch
_NUM_BATCHES = 64  # of an order


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """1.0 is a uniform shuffle, 0.0 the order by sample id; each number is at most 1."""

    displacement: float
    spread: float
    mixing: float

    @property
    def worst(self) -> float:
        """The least of the three, by which an order is judged."""
        return min(self.displacement, self.spread, self.mixing)


def batch_quality(sample_ids: Int64Array, places: Int64Array, num_samples: int) -> ShuffleQuality:
    """The quality of one batch, not yet cut off at 1; only averages over batches are meaningful.

    Args:
        sample_ids: int64 [n], n and num_samples at least 2.
        places: int64 [n], where in their epoch the samples come.
        num_samples: N.
    """
    n = len(sample_ids)
    uniform_distance = num_samples / 3  # of two random samples, on average
    displacement = float(np.abs(sample_ids - places).mean()) / uniform_distance
    ranked = np.sort(sample_ids).astype(np.float64)
    distances = float(((2 * np.arange(n) - n + 1) * ranked).sum())  # of all pairs
    mixing = distances / (n * (n - 1) / 2) / uniform_distance
    num_cells = min(n, num_samples)
    cells = (sample_ids.astype(np.float64) * (num_cells / num_samples)).astype(np.int64)
    uniform_cells = num_cells * (1 - (1 - 1 / num_cells) ** n)
    spread = (len(np.unique(cells)) - 1) / (uniform_cells - 1)
    return ShuffleQuality(displacement, spread, mixing)


def expected_quality(planner: BatchPlanner) -> ShuffleQuality:
    """The quality of an order, from batches spread evenly over its first epoch.

    A batch of one sample has nothing to shuffle, so at least two successive positions are taken. A
    dataset of one sample has the quality 1.
    """
    num_samples = planner.num_samples
    size = max(planner.order.global_batch_size, 2)
    num_taken = min(size, _MAX_BATCH_SAMPLES, num_samples)
    if num_taken < 2:
        return ShuffleQuality(1.0, 1.0, 1.0)
    last = max(0, num_samples - size)
    firsts = np.unique(np.linspace(0, last, _NUM_BATCHES).astype(np.int64))
    taken = np.linspace(0, min(size, num_samples) - 1, num_taken).astype(np.int64)
    places = firsts[:, None] + taken
    ids = planner.sample_ids_at(places.reshape(-1)).reshape(places.shape)
    return average([batch_quality(*batch, num_samples) for batch in zip(ids, places, strict=True)])


def average(qualities: Sequence[ShuffleQuality]) -> ShuffleQuality:
    """The average over batches, or over the ranks of a job; there is at least one."""
    values = np.array([(each.displacement, each.spread, each.mixing) for each in qualities])
    displacement, spread, mixing = np.clip(values.mean(axis=0), 0.0, 1.0).tolist()
    return ShuffleQuality(displacement, spread, mixing)
