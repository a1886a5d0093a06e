"""Checks whether the order that arrives looks shuffled, in memory that does not grow."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A uniform shuffle exceeds this in less than one of a million runs. A smaller bound would accuse
# good orders; a larger one would miss orders that are shuffled within a wide window.
_MAX_Z = 5.0


@dataclass(frozen=True, slots=True)
class ShuffleCheck:
    """What was seen of an order.

    Attributes:
        num_samples: samples consumed while this process ran.
        num_repeats: ids that came twice within one epoch.
        neighbour_correlation: Pearson's r of each id with the one before it: 1 for files read in
            order, about 0 for a global shuffle. A shuffle within a small window of a sequential
            stream stays near 1, too.
        z: the correlation in standard deviations of a uniform shuffle.
        passed: no repeat, and |z| below 5.
    """

    num_samples: int
    num_repeats: int
    neighbour_correlation: float
    z: float
    passed: bool


class ShuffleMonitor:
    """Takes the sample ids of one global batch after the other."""

    def __init__(self, num_samples: int) -> None:
        self._seen = np.zeros((num_samples + 7) // 8, dtype=np.uint8)  # one bit per sample of the epoch
        self._num_samples_of_epoch = num_samples
        self._epoch = -1
        self._num_samples = 0
        self._num_repeats = 0
        self._last = math.nan
        self._num_pairs = 0
        self._sum_products = 0.0

    def add(self, sample_ids: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]) -> None:
        """Take the ids of consecutive positions, and the epoch of each position."""
        for epoch in np.unique(epochs):
            self._mark(sample_ids[epochs == epoch], int(epoch))
        centred = (sample_ids + 0.5) / self._num_samples_of_epoch - 0.5  # uniform: mean 0, variance 1/12
        with_last = centred if math.isnan(self._last) else np.concatenate([[self._last], centred])
        self._sum_products += float(np.sum(with_last[1:] * with_last[:-1]))
        self._num_pairs += len(with_last) - 1
        self._last = float(centred[-1])
        self._num_samples += len(sample_ids)

    def check(self) -> ShuffleCheck:
        """The result for all ids that were added."""
        correlation = 12 * self._sum_products / max(1, self._num_pairs)
        expected = -1 / self._num_samples_of_epoch  # an id is not drawn again in its epoch
        z = (correlation - expected) * math.sqrt(self._num_pairs)
        passed = self._num_repeats == 0 and abs(z) < _MAX_Z
        return ShuffleCheck(self._num_samples, self._num_repeats, correlation, z, passed)

    def _mark(self, sample_ids: npt.NDArray[np.int64], epoch: int) -> None:
        if epoch != self._epoch:
            self._seen[:] = 0
            self._epoch = epoch
        distinct = np.unique(sample_ids)
        bits = (1 << (distinct % 8)).astype(np.uint8)
        already = int(np.count_nonzero(self._seen[distinct // 8] & bits))
        self._num_repeats += already + len(sample_ids) - len(distinct)
        np.bitwise_or.at(self._seen, distinct // 8, bits)
