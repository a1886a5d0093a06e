"""How full a prefetch window is over time, and whether trainer or storage waits. Pure.

If a window is full on average, the trainer cannot keep up; if it is empty, the storage cannot. A
look now and then shows neither, since the window changes with every batch. So integrals over time
are kept: any two readings give the mean between them, for any number of observers. The caller
brings the clock.
"""

from dataclasses import astuple, dataclass
from operator import add, sub

from gyre_daemon.monitoring.declared import counter

# Weight of the past when a batch group is added, so that about ten groups count. With many more, it
# would show late that a cache has become warm; with fewer, single slow reads would show.
_KEPT = 0.9


@dataclass(frozen=True, slots=True)
class WindowTimes:
    """Integrals over time since a session's start; they never fall.

    Attributes:
        ready_batch_s: of the number of ready batches, in batch-seconds.
        size_batch_s: of the window's size, in batch-seconds; `ready_batch_s / size_batch_s` is the
            mean occupancy, in [0, 1].
        wait_storage_s: seconds with credit and no next batch, since storage had not answered.
        wait_trainer_s: seconds with a next batch that was ready and no credit.
        wait_processor_s: seconds with credit and no next batch, since no processor had copied or
            decoded it.
    """

    ready_batch_s: float = counter(
        "gyre_job_window_ready_batch_seconds",
        "Ready batches in a job's prefetch windows, integrated over time.",
    )
    size_batch_s: float = counter(
        "gyre_job_window_size_batch_seconds",
        "Sizes of a job's prefetch windows, integrated over time.",
    )
    wait_storage_s: float = counter(
        "gyre_job_wait_for_storage_seconds",
        "Time in which a trainer would have taken a batch, and storage had not answered.",
    )
    wait_trainer_s: float = counter(
        "gyre_job_wait_for_trainer_seconds",
        "Time in which a batch was ready, and no trainer took it.",
    )
    wait_processor_s: float = counter(
        "gyre_job_wait_for_processor_seconds",
        "Time in which a trainer would have taken a batch that waited for a processor.",
    )

    def __add__(self, other: "WindowTimes") -> "WindowTimes":
        return WindowTimes(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: "WindowTimes") -> "WindowTimes":
        return WindowTimes(*map(sub, astuple(self), astuple(other)))


class Occupancy:
    """Integrates the state of one session's window."""

    def __init__(self, now: float) -> None:
        """The window is empty and no client waits, until the first `note`.

        Args:
            now: in seconds of a monotonic clock, as everywhere here.
        """
        self._since = now
        self._num_ready = self._size = 0
        self._is_batch_late = self._is_trainer_late = False
        self._storage_share = 1.0
        self._times = WindowTimes()  # up to `_since`

    def note(
        self,
        now: float,
        num_ready: int,
        size: int,
        num_credits: int,
        *,
        is_head_ready: bool,
        storage_share: float = 1.0,
    ) -> None:
        """Set the window's state from `now` on.

        Args:
            now: not before that of the last call.
            num_ready: batches ready but not sent.
            size: of the window, in batches; near the end of a stream, the batches still to be sent
                if they are fewer.
            num_credits: batches that the client would take.
            is_head_ready: whether the next batch to be sent is ready.
            storage_share: how much of the wait for the next batch counts as waiting for storage, in
                [0, 1]; see `StorageShare`.
        """
        self._times = self.at(now)
        self._since, self._num_ready, self._size = now, num_ready, size
        self._storage_share = storage_share
        self._is_batch_late = num_credits > 0 and size > 0 and not is_head_ready
        self._is_trainer_late = num_credits == 0 and is_head_ready

    def at(self, now: float) -> WindowTimes:
        """The integrals up to `now`."""
        times, elapsed_s = self._times, now - self._since
        late_s = elapsed_s if self._is_batch_late else 0.0
        return WindowTimes(
            times.ready_batch_s + self._num_ready * elapsed_s,
            times.size_batch_s + self._size * elapsed_s,
            times.wait_storage_s + late_s * self._storage_share,
            times.wait_trainer_s + (elapsed_s if self._is_trainer_late else 0.0),
            times.wait_processor_s + late_s * (1.0 - self._storage_share),
        )


class StorageShare:
    """The share of storage in the time that the last batches took to become ready.

    The rest is copying, checking and decoding, or waiting for a processor to do it.
    """

    def __init__(self, *, until_known: float) -> None:
        """Nothing was read yet; `until_known` in [0, 1] is the share until something was."""
        self._until_known = until_known
        self._storage_s = self._total_s = 0.0

    def add(self, storage_s: float, total_s: float) -> None:
        """Add a batch group that took `total_s`, with `storage_s` of it in storage."""
        self._storage_s = self._storage_s * _KEPT + min(storage_s, total_s)
        self._total_s = self._total_s * _KEPT + total_s

    @property
    def value(self) -> float:
        """The share, in [0, 1]."""
        return self._storage_s / self._total_s if self._total_s > 0 else self._until_known
