"""Which of the tries that are under way are late."""

from collections import OrderedDict
from collections.abc import Mapping

from gyre_daemon.runtime.fair import Flow
from gyre_daemon.storage.engine.hedges import Hedges, most_needed_first
from gyre_daemon.storage.engine.request import Request, Try

_MAX_HEDGES = 2  # of one request: where one in a hundred takes seconds, both of two do so in every fortieth batch of 256
_LEAST_TWIN_S = 0.1  # before a third: what took milliseconds is late by chance
_MORE_PATIENT = 1.5  # with what is not needed first: most of it comes before anybody waits for it


class Watch:
    """Tries of reads, the newest of each request."""

    def __init__(self) -> None:
        self._hedges = Hedges()
        self._under_way: dict[int, OrderedDict[Try, None]] = {}  # by size class, the oldest first

    def begin(self, try_: Try) -> None:
        """A try was sent."""
        request = try_.request
        if request.kind != "read" or request.num_hedges >= _MAX_HEDGES:
            return
        if not request.num_hedges:
            self._hedges.earn()
            try_.is_early = self._hedges.begin(try_.size)
        tries = self._under_way.get(try_.size)
        if tries is None:
            tries = self._under_way[try_.size] = OrderedDict()
        tries[try_] = None

    def end(self, try_: Try) -> None:
        """A try is over, however it ended."""
        if tries := self._under_way.get(try_.size):
            tries.pop(try_, None)
        if try_.is_early:
            self._hedges.end_early(try_.size)

    def note(self, try_: Try, now: float) -> None:
        """A first try was answered, or was waited for up to now and its twin came."""
        if not try_.is_hedge:
            self._hedges.note(try_.request.num_bytes, now - try_.sent_at)

    def take_late(self, now: float, needed_first: Mapping[Flow, int]) -> list[Request]:
        """What is to be sent once more now, the most needed first; it counts as sent.

        Args:
            now: the time.
            needed_first: of each job the lowest urgency of what it reads.
        """
        return [request for size in self._under_way for request in self._take_late(size, now, needed_first)]

    def _take_late(self, size: int, now: float, needed_first: Mapping[Flow, int]) -> list[Request]:
        late_s = self._hedges.late_after_s(size)
        if late_s is None or not self._hedges.may_take:
            return []
        late = self._late(size, now, late_s, needed_first)
        taken = []
        for request in most_needed_first(late):
            if self._hedges.take(is_needed_first=_is_first(request, needed_first)):
                del self._under_way[size][late[request]]
                request.num_hedges += 1
                taken.append(request)
        return taken

    def _late(self, size: int, now: float, late_s: float, needed_first: Mapping[Flow, int]) -> dict[Request, Try]:
        late = {}
        for try_ in self._under_way[size]:
            waited_s = now - try_.sent_at
            if waited_s < late_s:
                break
            if try_.is_hedge and waited_s < _LEAST_TWIN_S:
                continue
            if waited_s >= late_s * _MORE_PATIENT or _is_first(try_.request, needed_first):
                late[try_.request] = try_
        return late


def _is_first(request: Request, needed_first: Mapping[Flow, int]) -> bool:
    return request.urgency <= needed_first.get(request.flow, request.urgency)
