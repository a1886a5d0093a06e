"""Single-flight refresh of a source's credentials.

The first refused request refreshes the credentials and is sent again as a probe. All other requests
of the source wait until the probe is answered. If its new credentials are accepted, all of them are
sent. If they are refused, that request has failed, and the next probe refreshes again after a
pause. So refused credentials cost one request and one refresh per pause, however many jobs need
them and however often they come back, and one forbidden object delays others for one pause.
"""

from collections import deque
from typing import TYPE_CHECKING

from gyre_daemon.storage.source import Source

if TYPE_CHECKING:
    from gyre_daemon.storage.engine.request import RangeRequest

# Between two probes; each pause is twice the one before. Shorter ones ask a storage that refuses
# more often; longer ones notice later that new credentials are there.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0


class CredentialRefresh:
    """The credentials of one source. It sends nothing itself.

    Attributes:
        source: whose credentials these are.
        is_under_way: they were refused, and no response has accepted new ones yet.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.is_under_way = False
        self._status = 0
        self._since = 0.0  # when they were first refreshed
        self._refreshed_at = 0.0
        self._pause_s = 0.0
        self._probe: RangeRequest | None = None
        self._waiting: deque[RangeRequest] = deque()

    def refused(self, request: "RangeRequest", sent_at: float, status: int, now: float) -> None:
        """A request was refused for its credentials; refresh them unless they were old ones."""
        request.refreshed_at = now
        if self.is_under_way or sent_at < self._refreshed_at:
            return
        self.is_under_way = True
        self._status, self._since, self._pause_s = status, now, _FIRST_PAUSE_S / 2
        self._start_probe(request, now)

    def holds(self, request: "RangeRequest", now: float) -> bool:
        """Whether a request must wait; `accepted` or `next_probe` returns it unless it is over."""
        if not self.is_under_way or request is self._probe:
            return False
        if self._may_probe(now):
            self._start_probe(request, now)
            return False
        self._waiting.append(request)
        return True

    def accepted(self, sent_at: float) -> list["RangeRequest"]:
        """A response accepted the credentials of a request sent at `sent_at`.

        Returns:
            The requests that need not wait any longer.
        """
        if not self.is_under_way or sent_at < self._since:
            return []
        self.is_under_way, self._probe = False, None
        released = [request for request in self._waiting if not request.is_over]
        self._waiting.clear()
        return released

    def next_probe(self, now: float) -> "RangeRequest | None":
        """A waiting request that should be sent now to probe the credentials."""
        while self._waiting and self._may_probe(now):
            request = self._waiting.popleft()
            if not request.is_over:
                self._start_probe(request, now)
                return request
        return None

    def forget_waiting(self) -> None:
        """All waiting requests are over."""
        self._probe = None
        self._waiting.clear()

    def _may_probe(self, now: float) -> bool:
        is_probed = self._probe is not None and not self._probe.is_over
        return not is_probed and now >= self._refreshed_at + self._pause_s

    def _start_probe(self, request: "RangeRequest", now: float) -> None:
        self._probe = request
        self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s)
        self._refreshed_at = request.refreshed_at = now
        self.source.refresh(self._status)
