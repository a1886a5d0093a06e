"""A thread that makes the copies of hops while the process computes."""

import select
import threading
import weakref
from collections.abc import Collection, Mapping

from gyre_trainer.comm.shared_memory.link import Link

# How long the end of a process waits for this thread. The thread ends after the copy that it makes
# now, which takes milliseconds; a longer wait would only delay the exit of a process that is stuck.
_JOIN_TIMEOUT_S = 1.0


class CopyThread:
    """As long as it lives, a thread calls `Link.make_copies` for each link whose copies are due."""

    def __init__(self, due_copies: select.epoll, links: Collection[Link]) -> None:
        """``due_copies`` is the epoll that the links were made with."""
        stop = threading.Event()
        by_number = {link.number: link for link in links}
        thread = threading.Thread(
            target=_copy_until, args=(stop, due_copies, by_number), name="gyre hops", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, thread, stop, due_copies, next(iter(links)))


def _copy_until(stop: threading.Event, due_copies: select.epoll, links: Mapping[int, Link]) -> None:
    while not stop.is_set():
        for number, _ in due_copies.poll():
            links[number].make_copies()


def _end(
    thread: threading.Thread, stop: threading.Event, due_copies: select.epoll, link: Link
) -> None:
    """Wake the thread and wait for its end. The argument keeps the link alive until then.

    A forked process has no such thread; there this wakes the parent's thread once, which does no
    harm.
    """
    stop.set()
    due_copies.modify(link.number, select.EPOLLOUT | select.EPOLLONESHOT)
    if thread is not threading.current_thread():  # the collector may run in that thread, too
        thread.join(_JOIN_TIMEOUT_S)
