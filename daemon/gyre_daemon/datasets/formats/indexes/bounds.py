"""How many bytes the ragged fields of a batch can have. Pure."""

import functools
from collections.abc import Callable

import numpy as np

from gyre_daemon.datasets.formats.base import SampleIndex, stored_fields
from gyre_daemon.order.shuffle.permutation import Int64Array

# Batch sizes whose bounds are kept: a bound takes a pass over all samples, and an open session asks
# for its own again and again.
_MAX_KEPT_BOUNDS = 256
# Samples whose sizes are found at once, to bound the memory that takes.
_SAMPLES_AT_ONCE = 1 << 20


class RaggedBounds:
    """Bounds by the number of samples; each is found once."""

    def __init__(self, sample_bytes: Callable[[], Int64Array]) -> None:
        """Look at no sample yet.

        Args:
            sample_bytes: returns int64 [N], the bytes of all ragged fields of each sample.
        """
        self._sample_bytes = sample_bytes
        self._kept: dict[int, int] = {}

    def largest(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`.

        A sample occurs at most once in each epoch that the positions touch, so the bound takes the
        largest samples once for each of these epochs.
        """
        if num_samples not in self._kept:
            if len(self._kept) >= _MAX_KEPT_BOUNDS:
                self._kept.clear()
            self._kept[num_samples] = self._find(num_samples)
        return self._kept[num_samples]

    def _find(self, num_samples: int) -> int:
        sample_bytes = self._sample_bytes()
        total = len(sample_bytes)
        num_epochs = num_samples // max(total, 1) + 2
        num_smaller = total - min(-(-num_samples // num_epochs), total)
        return num_epochs * int(np.partition(sample_bytes, num_smaller)[num_smaller:].sum())


def located_bounds(index: SampleIndex) -> RaggedBounds:
    """The bounds of an index, found by locating its samples."""
    return RaggedBounds(functools.partial(_ragged_bytes, index))


def _ragged_bytes(index: SampleIndex) -> Int64Array:
    """Int64 [N], the bytes of all ragged fields of each sample."""
    ragged = [spec.ragged for spec in stored_fields(index.fields)]
    total = np.empty(index.num_samples, np.int64)
    for begin in range(0, len(total), _SAMPLES_AT_ONCE):
        ids = np.arange(begin, min(begin + _SAMPLES_AT_ONCE, len(total)))
        total[ids] = index.locate(ids).tensor_bytes[:, ragged].sum(axis=1)
    return total
