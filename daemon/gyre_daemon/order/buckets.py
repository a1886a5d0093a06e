"""Buckets: batches whose samples have similar lengths, as an order around another one. Pure.

The first `N // G * G` places of an epoch are cut into windows of `w * G` places. The samples that
the inner order has in a window are sorted by their lengths and cut into batches of G; the batches
come in the order of their key, and within a batch samples stand as the inner order has them. So
every sample stays in its window. The places behind, which fill no batch, stay as they are: the
samples that the tail `drop` leaves out are of all lengths.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.permutation import KEY_BYTES, Int64Array, Permutation
from gyre_daemon.order.steps import EpochOrder

LengthsOf = Callable[[Int64Array], Int64Array]  # of samples, both int64 [n]

DEFAULT_WINDOW_BATCHES = 64
_MAX_WINDOW_BATCHES = 1 << 16
# Samples of a window: a tenth of a second of a thread, and 16 bytes of memory for each.
_MAX_WINDOW_SAMPLES = 1 << 20
# Sorted windows in memory: prefetched batches use one, batches already read another.
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
            InvalidRequest: blocks decide which samples are read together, batches span epochs, or a
                window has too many samples.
        """
        if mode == "block":
            raise InvalidRequest(
                "`bucket` sorts samples of the whole dataset, and the order `block` reads a few "
                "blocks at a time. Use the order `full` or `sequential`."
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
                "together. Lower its window_batches."
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
        self._sorted = lru_cache(_MAX_KEPT)(self._sort)

    def __call__(self, places: Int64Array) -> Int64Array:
        """See `EpochOrder`."""
        return self.inner(self._mapped(places, 0))

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """See `EpochOrder.inverse`; sorts every window with one of the samples."""
        return self._mapped(self.inner.inverse(sample_ids), 1)

    def more_before(self, place: int, inner_places: Int64Array) -> int:
        """How many more of some samples stand before a place here than in the inner order.

        Args:
            place: in `[0, N]`.
            inner_places: int64 [n], where the inner order has these samples.
        """
        if place >= self._num_whole:
            return 0
        begin = place // self._window * self._window
        end = min(begin + self._window, self._num_whole)
        its = inner_places[(inner_places >= begin) & (inner_places < end)]
        return int((self._mapped(its, 1) < place).sum() - (its < place).sum())

    def _mapped(self, places: Int64Array, direction: int) -> Int64Array:
        """From own places to those of the inner order (0), or from there (1); both int64 [n]."""
        found = places.copy()
        for window, which in self._by_window(places):
            begin = window * self._window
            found[which] = begin + self._sorted(window)[direction][places[which] - begin]
        return found

    def _by_window(self, places: Int64Array) -> list[tuple[int, Int64Array]]:
        """Each window with some of the places, and which of them."""
        sorted_ones = np.flatnonzero(places < self._num_whole)
        windows = places[sorted_ones] // self._window
        return [(window, sorted_ones[windows == window]) for window in np.unique(windows).tolist()]

    def _sort(self, window: int) -> tuple[Int64Array, Int64Array]:
        """At which place of a window the inner order has each of its samples; and the inverse."""
        begin = window * self._window
        places = np.arange(begin, min(begin + self._window, self._num_whole))
        lengths = self._lengths_of(self.inner(places))
        batches = np.argsort(lengths, kind="stable").reshape(-1, self._size)
        shuffle = Permutation(_window_key(*self._key, window), len(batches))
        there = np.sort(batches[shuffle(np.arange(len(batches)))], axis=1).reshape(-1)
        back = np.empty_like(there)
        back[there] = np.arange(len(there))
        return there, back


def padding(lengths: Int64Array) -> float:
    """The fraction of padding in a batch whose samples are padded to its longest.

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
