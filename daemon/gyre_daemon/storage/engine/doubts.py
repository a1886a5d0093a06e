"""Sources whose credentials are in doubt: a few requests find out whether new ones are accepted, and all others wait for that.

Otherwise every request of every job would be refused twice, and again from every job that comes back. A request that is refused
with new credentials has failed; the others wait for the next round of probes, the pauses between which grow.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre_daemon.storage.engine.request import Request, Try
from gyre_daemon.storage.source import Source

_MAX_PROBES = 4  # in a round: one may be lost, and an object may be forbidden by itself
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0


@dataclass(slots=True, eq=False)
class _Doubt:
    """What is known of one source since it was first refused.

    Attributes:
        status: of that answer.
        since: when credentials were read again first.
        refreshed_at: when its credentials were read again last.
        num_probes: that may still be sent in this round.
        pause_s: until the next round.
        waiting: for a round, or for trust.
    """

    status: int
    since: float
    refreshed_at: float
    num_probes: int = _MAX_PROBES
    pause_s: float = _FIRST_PAUSE_S
    waiting: deque[Request] = field(default_factory=deque)


class Doubts:
    """Which requests must wait. It sends nothing itself."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Source, _Doubt] = weakref.WeakKeyDictionary()
        self._refreshed_at: weakref.WeakKeyDictionary[Source, float] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        """Some source is in doubt."""
        return bool(self._of)

    def refused(self, request: Request, sent_at: float, status: int, now: float) -> None:
        """A request was refused for its credentials: they are read again, but for what was sent with older ones."""
        source = request.source
        request.refreshed_at = now
        if self._refreshed_at.get(source, 0.0) > sent_at:
            return
        doubt = self._of[source] = self._of.get(source) or _Doubt(status, now, now)
        self._refresh(source, doubt, now)

    def holds(self, request: Request, now: float) -> bool:
        """Whether a request must wait; if so, it comes back from `released` or `ready`, unless it is over by then."""
        doubt = self._of.get(request.source)
        if doubt is None:
            return False
        if not doubt.num_probes and now >= doubt.refreshed_at + doubt.pause_s:
            self._begin_round(request.source, doubt, now)
        if doubt.num_probes:
            doubt.num_probes -= 1
            request.refreshed_at = now
            return False
        doubt.waiting.append(request)
        return True

    def released(self, try_: Try) -> Iterable[Request]:
        """A source gave an answer that only who is trusted gets; those who need wait no longer."""
        source = try_.request.source
        doubt = self._of.get(source)
        if doubt is None or try_.sent_at < doubt.since:
            return ()
        del self._of[source]
        return doubt.waiting

    def ready(self, now: float) -> list[Request]:
        """Those who waited until it was time for another round: who comes first is a probe, see `holds`."""
        ready: list[Request] = []
        for doubt in list(self._of.values()):
            if doubt.waiting and now >= doubt.refreshed_at + doubt.pause_s:
                ready += doubt.waiting
                doubt.waiting.clear()
        return [each for each in ready if not each.is_over]

    def forget_waiting(self) -> None:
        """Nobody waits any more."""
        for doubt in self._of.values():
            doubt.waiting.clear()

    def _begin_round(self, source: Source, doubt: _Doubt, now: float) -> None:
        doubt.pause_s = min(_MAX_PAUSE_S, 2 * doubt.pause_s)
        doubt.num_probes = _MAX_PROBES
        self._refresh(source, doubt, now)

    def _refresh(self, source: Source, doubt: _Doubt, now: float) -> None:
        self._refreshed_at[source] = doubt.refreshed_at = now
        source.refresh(doubt.status)
