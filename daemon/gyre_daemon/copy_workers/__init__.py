"""Processes that copy samples from mapped files into arenas, and that may die while they do it.

If a mapped file shrinks, or its disk fails, the kernel kills a process that reads the mapping, with
SIGBUS. Copies by system call (`storage/local/gather.py`) survive that, but they look up every page
and so take more CPU time. Therefore the daemon has a few processes that map the served files and
the arenas, and copy with plain loads and stores. A worker that dies is replaced.

In: ranges of files, and their places in one arena. Out: whether the ranges were copied. If they
were not, the caller has the kernel copy them. `memory`, `storage`, `service` and `server` import
this package.
"""

from gyre_daemon.copy_workers.pool import NO_COPY_WORKERS, CopyWorkers, new_key
from gyre_daemon.copy_workers.ranges import Ranges

__all__ = ["NO_COPY_WORKERS", "CopyWorkers", "Ranges", "new_key"]
