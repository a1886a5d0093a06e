"""A thread that makes the copies of hops while the process computes."""

import select
import threading
import weakref
from collections.abc import Collection, Mapping

from gyre_trainer.comm.shared_memory.link import Link

_END_S = 1.0


class Carrier:
    """As long as it lives, a thread calls `Link.carry` where that is due."""

    def __init__(self, calls: select.epoll, links: Collection[Link]) -> None:
        """``calls`` is what the links were made with."""
        stop = threading.Event()
        by_number = {link.number: link for link in links}
        thread = threading.Thread(target=_carry, args=(calls, by_number, stop), name="gyre hops", daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, stop, calls, next(iter(links)))


def _carry(calls: select.epoll, links: Mapping[int, Link], stop: threading.Event) -> None:
    while not stop.is_set():
        for number, _ in calls.poll():
            links[number].carry()


def _end(thread: threading.Thread, stop: threading.Event, calls: select.epoll, link: Link) -> None:
    """Wake the thread, and see it end: nothing of it is left then. The link is there until that is done.

    In a process that was forked there is no such thread, and that of the other process is called once for nothing.
    """
    stop.set()
    calls.modify(link.number, select.EPOLLOUT | select.EPOLLONESHOT)
    if thread is not threading.current_thread():  # in which garbage may be collected, too
        thread.join(_END_S)
