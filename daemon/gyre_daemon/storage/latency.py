"""Whether the reads of a mount are slow: guessed by its file system until they have been measured.

A slow mount is read by many threads, a request each; a fast one is mapped, and copied in large
jobs. The estimate decides only that. Order and bytes are the same either way.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal

# File systems whose reads may have to wait for a server or another process. Others are disks or
# memory of this machine, or are not known; these are fast until they are measured.
_REMOTE = frozenset(
    ("9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "cvmfs", "dvs", "glusterfs", "gpfs",
     "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs",
     "wekafs")
)  # fmt: skip
# A page that is read from a disk of flash takes 0.1 to 1 ms, a request over a network that is worth
# hiding more than that. Between the two bounds a mount stays what it was, so that few change often.
SLOW_S, FAST_S = 2e-3, 0.5e-3
# The median of the last reads decides: one in a hundred that takes a second does not. With fewer
# reads chance decides, with more a job begins later to read many at once.
_NUM_RECENT, _MIN_KNOWN = 16, 8


class MountIsSlow(Exception):
    """These samples are better read by a thread for each read; it has copied nothing."""


Speed = Literal["fast", "slow"]


class Latency:
    """How long reads of one mount wait for it. Safe for several threads.

    Attributes:
        guess: by the type of the file system.
        maps: whether its files can be mapped, as far as is known; if not, it counts as slow.
        num_cold_jobs: jobs whose samples come from the mount's disk.
    """

    def __init__(self, file_system: str) -> None:
        """Nothing is measured yet.

        Args:
            file_system: as in `/proc/self/mountinfo`.
        """
        kind = file_system.partition(".")[0]
        self.guess: Speed = "slow" if kind in (*_REMOTE, "fuse", "fuseblk") else "fast"
        self.maps = True
        self._is_slow = self.guess == "slow"
        self.num_cold_jobs = 0
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._lock = threading.Lock()

    @property
    def is_slow(self) -> bool:
        """Whether the mount counts as slow now."""
        return self._is_slow or not self.maps

    @property
    def median_s(self) -> float | None:
        """Of the last reads, in seconds; None while too few are measured."""
        with self._lock:
            return self._median_s()

    def add_since(self, began_s: float) -> bool:
        """Count a read that began at this time of `time.perf_counter` and has just ended.

        Returns:
            Whether it took long, so that the next read should be measured, too.
        """
        took_s = time.perf_counter() - began_s
        if took_s > FAST_S and not self._is_slow:
            # A thread that returns from a system call waits for the interpreter. How long that
            # takes now is seen by a call that does nothing. It is not subtracted where a mount may
            # become fast by it: both times vary.
            began_s = time.perf_counter()
            time.sleep(0)
            took_s -= time.perf_counter() - began_s
        with self._lock:
            self._recent_s.append(took_s)
            bound_s = FAST_S if self._is_slow else SLOW_S
            if (took_s > bound_s) != self._is_slow:  # the others change nothing
                median_s = self._median_s()
                if median_s is not None and (median_s > bound_s) != self._is_slow:
                    self._is_slow = not self._is_slow
                    self._recent_s.clear()
        return took_s > SLOW_S

    @contextlib.contextmanager
    def cold_job(self) -> Iterator[None]:
        """Count a cold job inside the context."""
        with self._lock:
            self.num_cold_jobs += 1
        try:
            yield
        finally:
            with self._lock:
                self.num_cold_jobs -= 1

    def _median_s(self) -> float | None:
        if len(self._recent_s) < _MIN_KNOWN:
            return None
        return sorted(self._recent_s)[len(self._recent_s) // 2]
