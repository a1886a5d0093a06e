"""How full a prefetch window is over time, and who waits for whom. Pure: the caller brings the clock.

A window that is full on average has a trainer that cannot keep up; one that is empty, a storage that cannot. A look at the
window now and then says neither, since it swings with every batch. So what is kept are integrals over time, from which any two
readings give the mean of the time between them, for any number of observers.
"""

from dataclasses import astuple, dataclass

_KEPT = 0.9  # of what is known, with each strip: some ten count. Far more, and a cache that has become warm is told late


@dataclass(frozen=True, slots=True)
class WindowTimes:
    """Integrals since a session's start; they never fall.

    Attributes:
        ready_batch_s: ready batches, times the seconds that they were.
        size_batch_s: the window's size, likewise; the quotient of the two is the mean occupancy, in [0, 1].
        wait_storage_s: credit was there, and the next batch was not ready, since storage had not answered.
        wait_trainer_s: the next batch was ready, and no credit was there.
        wait_processor_s: credit was there, and the next batch was not ready for want of a processor: to copy or decode.
    """

    ready_batch_s: float = 0.0
    size_batch_s: float = 0.0
    wait_storage_s: float = 0.0
    wait_trainer_s: float = 0.0
    wait_processor_s: float = 0.0

    def __add__(self, other: "WindowTimes") -> "WindowTimes":
        return WindowTimes(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class Occupancy:
    """One session's window, seen from its beginning on."""

    def __init__(self, now: float) -> None:
        """Until the first note nothing counts.

        Args:
            now: of a monotonic clock, in seconds, as every other `now` here.
        """
        self._since = now
        self._num_ready = self._size = 0
        self._is_batch_late = self._is_trainer_late = False
        self._storage_share = 1.0
        self._ready_s = self._size_s = self._storage_s = self._trainer_s = self._processor_s = 0.0

    def note(
        self, now: float, num_ready: int, size: int, num_credits: int, *, is_head_ready: bool, storage_share: float = 1.0
    ) -> None:
        """From now on the window is like this.

        Args:
            now: not before the last note.
            num_ready: batches that are ready and not sent.
            size: of the window, in batches; at the end of a stream, those that are still to be sent if they are fewer.
            num_credits: batches that the client would take.
            is_head_ready: whether the next batch to be sent is ready.
            storage_share: of the wait for a batch that is not, how much is for storage; see `StorageShare`.
        """
        elapsed_s = now - self._since
        self._ready_s += self._num_ready * elapsed_s
        self._size_s += self._size * elapsed_s
        if self._is_batch_late:
            self._storage_s += elapsed_s * self._storage_share
            self._processor_s += elapsed_s * (1.0 - self._storage_share)
        elif self._is_trainer_late:
            self._trainer_s += elapsed_s
        self._since, self._num_ready, self._size = now, num_ready, size
        self._storage_share = storage_share
        self._is_batch_late = num_credits > 0 and size > 0 and not is_head_ready
        self._is_trainer_late = num_credits == 0 and is_head_ready

    def at(self, now: float) -> WindowTimes:
        """The integrals up to now, what is under way included."""
        elapsed_s = now - self._since
        late_s = elapsed_s if self._is_batch_late else 0.0
        return WindowTimes(
            self._ready_s + self._num_ready * elapsed_s,
            self._size_s + self._size * elapsed_s,
            self._storage_s + late_s * self._storage_share,
            self._trainer_s + (elapsed_s if self._is_trainer_late else 0.0),
            self._processor_s + late_s * (1.0 - self._storage_share),
        )


class StorageShare:
    """Of the time that batches lately took to become whole, how much was waiting for storage.

    The rest went to processors, or to waiting for one: copying, checking, decoding.
    """

    def __init__(self, *, until_known: float) -> None:
        """Nothing was read yet: `until_known` in [0, 1] is what is thought of the storage."""
        self._until_known = until_known
        self._storage_s = self._total_s = 0.0

    def add(self, storage_s: float, total_s: float) -> None:
        """Batches that were read together are whole: of `total_s` they waited `storage_s` for storage."""
        self._storage_s = self._storage_s * _KEPT + min(storage_s, total_s)
        self._total_s = self._total_s * _KEPT + total_s

    @property
    def value(self) -> float:
        """In [0, 1]."""
        return self._storage_s / self._total_s if self._total_s > 0 else self._until_known
