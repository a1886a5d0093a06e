"""The seam between the engine and the clients that carry its requests."""

from collections.abc import Callable
from typing import Protocol

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
