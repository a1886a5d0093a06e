"""Which sample takes the place of one that is corrupt, and how many were replaced so far. Pure.

The k-th of C corrupt samples has, in each epoch, the k-th sample of a keyed permutation of the good
ones in its place. So the substitute follows from the seed, the epoch and the position alone: every
rank, every daemon and every rerun agrees, no position is left out, and no sample stands in for two
others of one epoch.
"""

import hashlib
import struct
from collections.abc import Callable
from operator import itemgetter

import numpy as np

from gyre_daemon.order.shuffle.permutation import KEY_BYTES, Int64Array, Permutation

# Substitutes and places of some epochs are kept: a batch may span the epoch that ends and the next.
_MAX_KEPT = 3
NO_SAMPLES = np.empty(0, np.int64)


class Substitutes:
    """Replaces the corrupt samples of one dataset in the order of one job; any thread may ask."""

    def __init__(
        self,
        corrupt: Int64Array,
        num_samples: int,
        seed: int,
        places_of: Callable[[int, Int64Array], Int64Array],
    ) -> None:
        """Compute nothing yet.

        Args:
            corrupt: int64 [C], ids in rising order; at most half of all samples.
            num_samples: N.
            seed: of the order.
            places_of: takes an epoch of the job and int64 [C] ids, and returns the places at which
                the job reads them in that epoch, without those that it does not read.
        """
        assert 0 < 2 * len(corrupt) <= num_samples
        self._corrupt = corrupt
        self._num_good = num_samples - len(corrupt)
        self._seed = seed
        self._drawn = _Kept(self._draw)
        self._places = _Kept(lambda epoch: np.sort(places_of(epoch, corrupt)))

    def where(self, sample_ids: Int64Array) -> Int64Array:
        """Which of the samples are corrupt: their numbers in the array."""
        rank = np.searchsorted(self._corrupt, sample_ids)
        found = self._corrupt[np.minimum(rank, len(self._corrupt) - 1)] == sample_ids
        return np.flatnonzero(found)

    def of(self, sample_ids: Int64Array, epoch: int) -> Int64Array:
        """The substitutes of corrupt samples in an epoch; both int64 [n]."""
        return self._drawn.of(epoch)[np.searchsorted(self._corrupt, sample_ids)]

    def num_in_epoch(self, epoch_length: int) -> int:
        """How many corrupt samples a whole epoch counts, which has so many positions.

        All of them count, also those that the tail `drop` leaves out: to know which would take a
        look at every epoch.
        """
        return min(len(self._corrupt), epoch_length)

    def num_before(self, epoch: int, place: int) -> int:
        """How many corrupt samples stand before a place of an epoch, in this epoch.

        Args:
            epoch: of the job, as for `places_of`.
            place: in that epoch, in the order in which the job reads.
        """
        return int(np.searchsorted(self._places.of(epoch), place))

    def places(self, epoch: int) -> Int64Array:
        """The places of corrupt samples in an epoch, as `places_of` says them, in rising order."""
        return self._places.of(epoch)

    def _draw(self, epoch: int) -> Int64Array:
        """Int64 [C], the substitute of each corrupt sample in an epoch."""
        drawn = Permutation(_key(self._seed, epoch), self._num_good)(np.arange(len(self._corrupt)))
        # the g-th good sample has as many corrupt ones before it as have at most g good ones before
        num_good_before = self._corrupt - np.arange(len(self._corrupt))
        return drawn + np.searchsorted(num_good_before, drawn, side="right")


class _Kept:
    """An array for each of the last few epochs; threads may make one at the same time."""

    def __init__(self, make: Callable[[int], Int64Array]) -> None:
        self._make = make
        self._kept: dict[int, Int64Array] = {}

    def of(self, epoch: int) -> Int64Array:
        found = self._kept.get(epoch)
        if found is None:
            found = self._make(epoch)
            others = sorted(self._kept.items(), key=itemgetter(0))[-(_MAX_KEPT - 1) :]
            self._kept = {**dict(others), epoch: found}
        return found


def _key(seed: int, epoch: int) -> bytes:
    """The key of an epoch's substitutes, which shares nothing with the key of its order."""
    return hashlib.blake2b(
        struct.pack("<QQ", seed, epoch), digest_size=KEY_BYTES, person=b"gyre.substitutes"
    ).digest()
