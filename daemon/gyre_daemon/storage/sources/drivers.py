"""Every other fsspec driver as a source: a coroutine per request."""

import asyncio
from typing import Any

from fsspec.asyn import AsyncFileSystem

from gyre_daemon.storage.answer import Answer, failure
from gyre_daemon.storage.source import Done, Sent


class DriverSource:
    """Reads with an asynchronous fsspec file system that was made on this event loop; see `Source`."""

    def __init__(self, filesystem: AsyncFileSystem) -> None:
        self._filesystem = filesystem

    def get(self, path: str, start: int, stop: int, done: Done) -> Sent:
        """See `Source.get`."""
        return _Get(asyncio.ensure_future(self._filesystem._cat_file(path, start=start, end=stop)), done)

    def refresh(self, status: int) -> None:
        """See `Source.refresh`: what a driver keeps is its own."""

    def close(self) -> None:
        """See `Source.close`: what a driver keeps open goes with it."""


class _Get:
    """One request, whose answer is seen when it is whole."""

    first_byte_at = None

    def __init__(self, reading: "asyncio.Future[Any]", done: Done) -> None:
        self._reading = reading
        self._done = done
        self._is_cancelled = False
        reading.add_done_callback(self._whole)

    def cancel(self) -> None:
        """See `Sent.cancel`."""
        self._is_cancelled = True  # what has arrived by now can be cancelled no more
        self._reading.cancel()

    def _whole(self, reading: "asyncio.Future[Any]") -> None:
        if self._is_cancelled or reading.cancelled():
            return
        error = reading.exception()
        self._done(failure(error) if error else Answer(206, bytes(reading.result())))
