"""Other asynchronous fsspec drivers as sources: one coroutine per request."""

import asyncio
from collections.abc import Callable
from typing import Any

from fsspec.asyn import AsyncFileSystem

from gyre_daemon.storage.response import Response, response_from_error
from gyre_daemon.storage.source import OnResponse, SentRequest


class DriverSource:
    """Reads with an asynchronous fsspec file system of this event loop; see `Source`."""

    def __init__(self, filesystem: AsyncFileSystem) -> None:
        self._filesystem = filesystem

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""
        reading = asyncio.ensure_future(self._filesystem._cat_file(path, start=start, end=stop))
        return _DriverRequest(reading, on_response)

    def refresh(self, status: int) -> None:
        """See `Source.refresh`: drivers keep their credentials to themselves."""

    def close(self) -> None:
        """See `Source.close`: a driver's connections go with it."""


class _DriverRequest:
    """A request whose response is seen once it is complete."""

    first_byte_at = None

    def __init__(self, reading: "asyncio.Future[Any]", on_response: OnResponse) -> None:
        self._reading = reading
        self._on_response = on_response
        self._is_cancelled = False
        reading.add_done_callback(self._done)

    def cancel(self) -> None:
        """See `SentRequest.cancel`."""
        self._is_cancelled = True  # a future that is done cannot be cancelled
        self._reading.cancel()

    def when_free(self, free: Callable[[], None]) -> None:
        """See `SentRequest.when_free`."""
        free()

    def _done(self, reading: "asyncio.Future[Any]") -> None:
        if self._is_cancelled or reading.cancelled():
            return
        if error := reading.exception():
            self._on_response(response_from_error(error))
        else:
            self._on_response(Response(206, bytes(reading.result())))
