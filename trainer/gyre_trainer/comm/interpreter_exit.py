"""Gloo's threads come to rest before the interpreter ends.

[Note: The end of a rank]

A thread that waits for the interpreter's lock when the interpreter ends is ended by it, in the
midst of a call (Python before 3.14). In torch's C++ that aborts the process: "terminate called
without an active exception". Two kinds of threads could come to that:

* Gyre's own. Each is told to stop, and joined, when its ring ends or the process does.
* Gloo's. One of them runs a collective, wakes the thread that waits for it, and lets go of the
  tensors after that. Those are Python's, too, so it takes the lock for it. On a busy machine the
  process may have come to its end by then. Joining them is left to the group's destructor, which
  `destroy_process_group` does not call while a mesh has the group, and each DTensor has its mesh.

So a rank lets go of the lock before its end, until all of gloo's threads sleep.
"""

import atexit
import sys
import time
from functools import cache
from pathlib import Path

_TASKS = Path("/proc/self/task")
_GLOO = "pt_gloo_runloop"  # the name that torch gives to the threads that run collectives
# Where a collective waits for a rank that never comes, its thread sleeps too, so this is for a
# thread that finds no processor. Each further second may delay the exit of a process on such a
# machine.
_TIMEOUT_S = 5.0


@cache
def rest_at_exit() -> None:
    """From now on, the end of this process waits until gloo's threads sleep, for 5 s at most."""
    atexit.register(_rest)


def _rest() -> None:
    """Return when gloo's threads have slept for some milliseconds in which the lock was free.

    A thread that waits for the lock would have woken up: by the lock, or by its own interval.
    """
    interval_s = 2 * min(sys.getswitchinterval(), 0.005)
    before, deadline_s = dict[str, tuple[str, str]](), time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        threads = _gloo_threads()
        if threads == before and all(state == "S" for state, _ in threads.values()):
            return
        before = threads
        time.sleep(interval_s)


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Of each of gloo's threads the state, and how often it has gone to sleep, by its number."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            lines = (task / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # it has ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status.get("Name") == _GLOO:
            found[task.name] = status["State"][:1], status.get("voluntary_ctxt_switches", "")
    return found
