"""Wakes a thread without a lock that an interrupt could leave behind."""

import contextlib
import queue


class Wakeup:
    """Wakes one thread that waits; a call before it waits counts.

    A signal may end any line of Python in the main thread. `threading.Event` and `Condition` are
    written in Python and hold a lock meanwhile, never to be released. A `SimpleQueue` is not.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        """Wakes the thread; from any thread, and any finalizer."""
        if self._calls.empty():
            self._calls.put(None)

    def wait(self, timeout_s: float) -> None:
        """Waits for a call; it may also return early, so the caller looks for itself."""
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=max(0.0, timeout_s))
