"""The seam between the engine and the clients that carry its requests, some of them by threads."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gyre_daemon.runtime.threads import DaemonThreads
from gyre_daemon.storage.response import Response

OnResponse = Callable[[Response], None]


class SentRequest(Protocol):
    """A request whose response has not arrived yet."""

    @property
    def first_byte_at(self) -> float | None:
        """When the response began, by `time.monotonic`.

        0 if it has not begun; None if the client cannot tell. An event loop's own clock would not
        do: it stands still while callbacks run.
        """

    def cancel(self) -> None:
        """Drop the request; its `on_response` is not called."""

    def when_free(self, free: Callable[[], None]) -> None:
        """Have `free` called once nothing works for the request any more, answered or cancelled.

        That is at once, unless a thread reads: it cannot be stopped.
        """


class Source(Protocol):
    """Carries requests for one dataset's objects, with its credentials. Used from one event loop.

    A source sends each request once: the engine decides whether and when it is sent again.
    """

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """Request the bytes `[start, stop)` of an object.

        `on_response` is called once, later, from the event loop. Failures arrive there too: this
        method raises nothing.
        """

    def refresh(self, status: int) -> None:
        """Read credentials again from where they come, after a response with this status."""

    def close(self) -> None:
        """Close all connections."""


class LoopThreads:
    """Threads that read for an event loop, which takes all responses that there are at a time.

    A future, a task and a wake-up of the loop for each read would cost a third more processor time.
    """

    def __init__(self, threads: DaemonThreads, *, counts_cancelled: bool = False) -> None:
        """Read nothing yet.

        Args:
            threads: that read.
            counts_cancelled: whether a cancelled read keeps its turn until its thread returns.
        """
        self._threads = threads
        self._counts_cancelled = counts_cancelled
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[_ThreadRequest, Response | None]] = deque()
        self._is_told = False

    def send(self, read: Callable[[], Response], on_response: OnResponse) -> SentRequest:
        """Have a thread call `read`, which raises nothing; see `Source.get`."""
        request = _ThreadRequest(on_response, counts_cancelled=self._counts_cancelled)

        def run() -> Callable[[], None]:
            self._arrived.append((request, None if request.is_cancelled else read()))
            return self._tell

        self._threads.start(run)
        return request

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_told = False  # before the last look: what arrives from now on tells again
        while self._arrived:
            request, response = self._arrived.popleft()
            request.end(response)


class _ThreadRequest:
    """A read in a thread; see `SentRequest`. A thread cannot be stopped once it has begun."""

    first_byte_at = None

    def __init__(self, on_response: OnResponse, *, counts_cancelled: bool) -> None:
        self._on_response: OnResponse | None = on_response
        self._keeps_turn = counts_cancelled  # until its thread has returned
        self._free: Callable[[], None] | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether nothing waits for it any more."""
        return self._on_response is None

    def cancel(self) -> None:
        """See `SentRequest.cancel`."""
        self._on_response = None

    def when_free(self, free: Callable[[], None]) -> None:
        """See `SentRequest.when_free`."""
        if self._keeps_turn:
            self._free = free
        else:
            free()

    def end(self, response: Response | None) -> None:
        """The thread has returned."""
        self._keeps_turn = False
        if self._free:
            self._free()
        on_response, self._on_response = self._on_response, None  # it refers to this: a cycle
        if on_response and response:
            on_response(response)
