"""How often one node asks the Hugging Face Hub, which limits the requests of an address or a user.

All datasets and jobs of a daemon share one budget. When the hub says that it was asked too often
(status 429), all of them wait as long as it says. All but `in_thread` is of the event loop.
"""

import asyncio
import re
import time
from collections.abc import Callable
from typing import TypeVar

from gyre_daemon.runtime.threads import DaemonThreads

# The hub counts requests in windows of five minutes, so a minute's worth may be asked at once.
_BURST_S = 60.0
# Where the hub does not say how long to wait.
_USUAL_HOLD_S = 10.0
# A request that would wait longer fails, with the hub's message.
_MAX_WAIT_S = 30.0
_NUM_THREADS = 8

Result = TypeVar("Result")


class HubError(OSError):
    """An answer of the hub without success.

    Attributes:
        status: of the response; 0 if there was none.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class HubUnreachable(HubError):
    """There is no way to the hub."""


class HubBudget:
    """A token bucket, and a time before which nothing is sent."""

    def __init__(self, requests_per_s: float) -> None:
        """Full at first.

        Args:
            requests_per_s: in the long run.
        """
        self._per_s = requests_per_s
        self._threads = DaemonThreads(_NUM_THREADS, "gyre-hub")
        self._next = 0.0  # when the last request that was let in should be sent, if all are paced
        self._held_until = 0.0

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def held_s(self) -> float:
        """How long nothing may be sent from now on."""
        return max(0.0, self._held_until - time.monotonic())

    def reserve(self) -> float:
        """Take a token for a request, to be sent after this time in seconds."""
        now = time.monotonic()
        self._next = max(self._next, now - _BURST_S, self._held_until) + 1 / self._per_s
        return max(0.0, self._next - now)

    def hold(self, retry_after: str | float) -> None:
        """The hub refused a request; send nothing for the time in its `Retry-After`."""
        text = str(retry_after).strip()
        seconds = float(text) if re.fullmatch(r"\d{1,6}(\.\d+)?", text) else 0.0
        until = time.monotonic() + (seconds or _USUAL_HOLD_S)
        self._held_until = max(self._held_until, until)

    async def turn(self) -> None:
        """Take a token, and wait until the request may be sent.

        Raises:
            HubError: it would take too long.
        """
        wait_s = self.reserve()
        while wait_s:
            if wait_s > _MAX_WAIT_S:
                text = f"the hub was asked too often; it can be asked in {wait_s:.0f} s"
                raise HubError(429, text)
            await asyncio.sleep(wait_s)
            wait_s = self.held_s()  # others may have been refused

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """The result of one request, which waits for the hub's answer."""
        return await self._threads.run(work)
