"""Which sample replaces a corrupt one, and how many were replaced so far. Pure.

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
import numpy.typing as npt

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.buckets import BucketedOrder
from gyre_daemon.order.epochs import EpochOrders
from gyre_daemon.order.shuffle.permutation import KEY_BYTES, Int64Array, Permutation
from gyre_daemon.order.stages import Stages

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
                the job reads them in that epoch, without unread ones.
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
        """How many corrupt samples count in a whole epoch of this many positions.

        All of them count, also those that the tail `drop` leaves out: to know these would take a
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


class JobSubstitutes:
    """Replaces the corrupt samples of a job in all its stages; any thread may ask.

    It is false where there is nothing to replace.
    """

    def __init__(self, corrupt: Int64Array, seed: int, stages: Stages, epochs: EpochOrders) -> None:
        """Compute nothing yet.

        Args:
            corrupt: int64 [C], ids in rising order.
            seed: of the order.
            stages: of the job.
            epochs: the orders of the job's epochs.

        Raises:
            InvalidRequest: more than half of the samples of a stage are corrupt.
        """
        self._seed, self._stages, self._epochs = seed, stages, epochs
        self._by_stage = [self._of_stage(corrupt, stage.num_samples) for stage in stages.all]

    def __bool__(self) -> bool:
        return any(self._by_stage)

    def _of_stage(self, corrupt: Int64Array, num_samples: int) -> Substitutes | None:
        """The substitutes of a stage with this many samples; None if it needs none."""
        corrupt = corrupt[: np.searchsorted(corrupt, num_samples)]
        if not len(corrupt):
            return None
        if 2 * len(corrupt) > num_samples:
            raise InvalidRequest(
                f"{len(corrupt)} of the first {num_samples} samples are corrupt: more than half"
            )
        return Substitutes(corrupt, num_samples, self._seed, self._places_of)

    def replace(
        self, epoch: int, sample_ids: Int64Array, is_substitute: npt.NDArray[np.bool_]
    ) -> None:
        """Put substitutes in the places of corrupt samples of one epoch, and note which they are.

        Args:
            epoch: of the job.
            sample_ids: int64 [n], changed in place.
            is_substitute: bool [n], true afterwards where a sample was replaced.
        """
        substitutes = self._by_stage[self._stages.number(epoch)]
        if substitutes and len(which := substitutes.where(sample_ids)):
            is_substitute[which] = True
            sample_ids[which] = substitutes.of(sample_ids[which], epoch)

    def num_before(self, position: int) -> int:
        """How many corrupt samples the job replaced at positions before this one."""
        if not self:
            return 0
        epoch, place = self._stages.at(position)
        count = 0
        for number, num_epochs, length in self._stages.before(epoch):
            if substitutes := self._by_stage[number]:
                count += num_epochs * substitutes.num_in_epoch(length)
        last = self._by_stage[self._stages.number(epoch)]
        return count + (self._num_in_epoch_before(last, epoch, place) if last else 0)

    def _num_in_epoch_before(self, substitutes: Substitutes, epoch: int, place: int) -> int:
        """See `Substitutes.num_before`, whose places are those before a window was sorted."""
        count, order = substitutes.num_before(epoch, place), self._epochs.of(epoch)
        if isinstance(order, BucketedOrder):
            count += order.more_before(place, substitutes.places(epoch))
        return count

    def _places_of(self, epoch: int, sample_ids: Int64Array) -> Int64Array:
        """Where in an epoch of this job samples are read, without those that the tail drops.

        With buckets, these are places before windows are sorted: else all would have to be.
        """
        length, order = self._stages.length(epoch), self._epochs.of(epoch)
        inner = order.inner if isinstance(order, BucketedOrder) else order
        places = inner.inverse(sample_ids)
        return places[places < length]


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
