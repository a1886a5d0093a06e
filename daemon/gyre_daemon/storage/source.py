"""The seam between the engine and the clients that carry its requests."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from gyre_daemon.storage.answer import Answer

Done = Callable[[Answer], None]


class Sent(Protocol):
    """A request that is under way."""

    @property
    def first_byte_at(self) -> float | None:
        """When its answer began: 0 if it has not; None where the client cannot tell.

        By `time.monotonic`: a loop's own clock may stand still while it runs callbacks, which may take long.
        """

    def cancel(self) -> None:
        """Nobody waits for the answer any more; its `done` is not called."""


class Source(Protocol):
    """Where one dataset's objects come from, with its credentials. Used from one event loop.

    A client sends each request once: whether and when it is sent again is the engine's to decide.
    """

    def get(self, path: str, start: int, stop: int, done: Done) -> Sent:
        """Ask for the bytes `[start, stop)` of an object; `done` is called from the event loop, later, and once."""

    def refresh(self, status: int) -> None:
        """Set up anew what an answer of this status doubts: credentials are read again from where they come."""

    def close(self) -> None:
        """Hang up."""


class NotSent:
    """A request that its client refused to send, as something that is under way until that is told; see `Sent`."""

    first_byte_at = None

    def __init__(self, telling: asyncio.Handle) -> None:
        self._telling = telling

    def cancel(self) -> None:
        """See `Sent.cancel`."""
        self._telling.cancel()
