"""Tells a second thread of its mistake, without a lock that an interrupt could leave behind."""

import sys
import threading
from threading import get_ident

from gyre_client.errors import ConcurrentUse

_PACKAGE = __name__.rpartition(".")[0]


class OneThread:
    """Knows the last thread that used an object, and lets it continue at no cost.

    Another thread may take over unless the last one is in a method of the object at that moment.
    Nothing is held meanwhile, so there is nothing to leave: an exception may end a method anywhere.
    """

    __slots__ = ("_last", "_owner_id", "_what")

    def __init__(self, owner: object, what: str) -> None:
        """Takes the first thread that comes.

        Args:
            owner: The object, which keeps this one.
            what: the name of the object in the error message.
        """
        self._owner_id = id(owner)
        self._what = what
        self._last = 0  # the identifier of the thread

    def check(self) -> None:
        """Lets the calling thread use the object.

        Raises:
            ConcurrentUse: Another thread uses it now.
        """
        if self._last != get_ident():
            if self._is_inside():
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                raise ConcurrentUse(
                    f"thread {threading.current_thread().name!r} uses {self._what} while thread "
                    f"{names.get(self._last, 'that has just ended')!r} does. "
                    "Use it in one thread at a time, or give each thread its own."
                )
            self._last = get_ident()

    def _is_inside(self) -> bool:
        frame = sys._current_frames().get(self._last)
        while frame is not None:
            # Only frames of this package are asked for their variables: to ask copies them.
            if (
                frame.f_globals.get("__package__") == _PACKAGE
                and id(frame.f_locals.get("self")) == self._owner_id
            ):
                return True
            frame = frame.f_back
        return False
