"""Buckets: batches whose samples have similar lengths, as an order around another one. Pure.

The first `N // G * G` places of an epoch are cut into windows of `w * G` places. The samples that
the inner order has in a window are sorted by their lengths and cut into batches of G; the batches
come in an order of their own key, and within a batch samples stand as the inner order has them. So
every sample stays in its window. The places behind, which fill no batch, stay as they are: the
samples that the tail `drop` leaves out are of all lengths.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.epochs import EpochOrder
from gyre_daemon.order.shuffle.permutation import KEY_BYTES, Int64Array, Permutation

LengthsOf = Callable[[Int64Array], Int64Array]  # of samples, both int64 [n]

DEFAULT_WINDOW_BATCHES = 64
_MAX_WINDOW_BATCHES = 1 << 16
# Samples of a window: a tenth of a second of a thread, and 8 bytes of memory for each that is kept.
_MAX_WINDOW_SAMPLES = 1 << 20
# Windows that are kept: what is read ahead lies in one, what was read in another.
_MAX_KEPT = 4


@dataclass(frozen=True, slots=True)
class BucketRule:
    """How batches of similar samples are made.

    Attributes:
        field: the ragged field whose lengths count.
        window_batches: w, the global batches whose samples are sorted together.
    """

    field: str
    window_batches: int = DEFAULT_WINDOW_BATCHES

    def check(self, mode: str, tail: str, global_batch_size: int) -> None:
        """Refuse an order that it does not go with.

        Raises:
            InvalidRequest: blocks decide what is read together, batches span epochs, or a window
                has too many samples.
        """
        if mode == "block":
            raise InvalidRequest(
                "`bucket` sorts samples of the whole dataset, and the order `block` reads a few "
                "blocks at a time; use the order `full` or `sequential`"
            )
        if tail == "wrap":
            raise InvalidRequest(
                "with `bucket` every batch belongs to one epoch; use the tail `drop` or `pad`"
            )
        if not 2 <= self.window_batches <= _MAX_WINDOW_BATCHES:
            raise InvalidRequest(
                f"`bucket` has window_batches = {self.window_batches}; it must be 2 to "
                f"{_MAX_WINDOW_BATCHES}, as the batches of a window exchange their samples"
            )
        if (num_samples := self.window_batches * global_batch_size) > _MAX_WINDOW_SAMPLES:
            raise InvalidRequest(
                f"a window of {self.window_batches} batches of {global_batch_size} has "
                f"{num_samples} samples, and `bucket` sorts at most {_MAX_WINDOW_SAMPLES} "
                "together; lower its window_batches"
            )


class BucketedOrder:
    """One epoch, in batches of samples of similar lengths; see `EpochOrder`.

    Any thread may ask.

    Attributes:
        inner: the order whose windows are sorted.
    """

    def __init__(
        self,
        inner: EpochOrder,
        num_samples: int,
        shape: tuple[int, int],
        lengths_of: LengthsOf,
        key: tuple[int, int],
    ) -> None:
        """Sort nothing yet.

        Args:
            inner: of N places.
            num_samples: N.
            shape: w and G, the batches of a window and the samples of a batch.
            lengths_of: takes int64 [n] samples and returns int64 [n].
            key: the order's seed and the epoch, which tell the orders of batches apart.
        """
        self.inner = inner
        self._size = shape[1]
        self._window = shape[0] * shape[1]
        self._num_whole = num_samples // self._size * self._size
        self._lengths_of = lengths_of
        self._key = key
        self._kept: dict[int, Int64Array] = {}

    def __call__(self, places: Int64Array) -> Int64Array:
        """See `EpochOrder`."""
        moved = places.copy()
        for window, which in self._by_window(places):
            begin = window * self._window
            moved[which] = begin + self._sorted(window)[places[which] - begin]
        return self.inner(moved)

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """See `EpochOrder.inverse`; sorts every window that has one of the samples."""
        places = self.inner.inverse(sample_ids).copy()
        for window, which in self._by_window(places):
            begin, found = window * self._window, self._sorted(window)
            places_of = np.empty_like(found)
            places_of[found] = np.arange(len(found))
            places[which] = begin + places_of[places[which] - begin]
        return places

    def begun(self, place: int) -> tuple[Int64Array, Int64Array]:
        """The samples before a place in its window: those of this order, and of the inner one."""
        if place >= self._num_whole:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = np.arange(place // self._window * self._window, place)
        return self(places), self.inner(places)

    def _by_window(self, places: Int64Array) -> list[tuple[int, Int64Array]]:
        """Each window that has some of the places, and which of them."""
        sorted_ones = np.flatnonzero(places < self._num_whole)
        windows = places[sorted_ones] // self._window
        return [(window, sorted_ones[windows == window]) for window in np.unique(windows).tolist()]

    def _sorted(self, window: int) -> Int64Array:
        """Int64 [n], at which place of a window the inner order has each of its samples."""
        found = self._kept.get(window)
        if found is None:
            found = self._sort(window)
            others = list(self._kept.items())[-(_MAX_KEPT - 1) :]
            self._kept = {**dict(others), window: found}  # one assignment: threads may do the same
        return found

    def _sort(self, window: int) -> Int64Array:
        begin = window * self._window
        places = np.arange(begin, min(begin + self._window, self._num_whole))
        lengths = self._lengths_of(self.inner(places))
        batches = np.argsort(lengths, kind="stable").reshape(-1, self._size)
        shuffle = Permutation(_window_key(*self._key, window), len(batches))
        return np.sort(batches[shuffle(np.arange(len(batches)))], axis=1).reshape(-1)


def padding(lengths: Int64Array) -> float:
    """The share of a batch that is padding where its samples are padded to its longest.

    Args:
        lengths: int64 [n], of the samples of the batch.
    """
    longest = int(lengths.max(initial=0))
    return 1 - float(lengths.mean()) / longest if longest else 0.0


def _window_key(seed: int, epoch: int, window: int) -> bytes:
    """The key of the order of a window's batches."""
    return hashlib.blake2b(
        struct.pack("<QQQ", seed, epoch, window), digest_size=KEY_BYTES, person=b"gyre.buckets"
    ).digest()
