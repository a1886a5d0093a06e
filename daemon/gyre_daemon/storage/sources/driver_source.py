"""Other asynchronous fsspec drivers as sources: one coroutine per request."""

import asyncio
from collections.abc import Awaitable, Callable

from fsspec.asyn import AsyncFileSystem

from gyre_daemon.storage.response import Response, response_from_error
from gyre_daemon.storage.source import OnResponse, SentRequest


class DriverSource:
    """Reads with an asynchronous fsspec file system of this event loop; see `Source`."""

    def __init__(self, filesystem: AsyncFileSystem) -> None:
        self._filesystem = filesystem

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""
        return AwaitedRequest(self._response(path, start, stop), on_response)

    def refresh(self, status: int) -> None:
        """See `Source.refresh`: drivers keep their credentials to themselves."""

    def close(self) -> None:
        """See `Source.close`: a driver's connections go with it."""

    async def _response(self, path: str, start: int, stop: int) -> Response:
        try:
            return Response(
                206, bytes(await self._filesystem._cat_file(path, start=start, end=stop))
            )
        except Exception as error:
            return response_from_error(error)


class AwaitedRequest:
    """A request whose response is seen once it is complete; see `SentRequest`."""

    first_byte_at = None

    def __init__(self, response: Awaitable[Response], on_response: OnResponse) -> None:
        """Begin to wait.

        Args:
            response: raises nothing.
            on_response: see `Source.get`.
        """
        self._response = asyncio.ensure_future(response)
        self._on_response = on_response
        self._is_cancelled = False
        self._response.add_done_callback(self._done)

    def cancel(self) -> None:
        """See `SentRequest.cancel`."""
        self._is_cancelled = True  # a future that is done cannot be cancelled
        self._response.cancel()

    def when_free(self, free: Callable[[], None]) -> None:
        """See `SentRequest.when_free`: at once."""
        free()

    def _done(self, response: "asyncio.Future[Response]") -> None:
        if not self._is_cancelled and not response.cancelled():
            self._on_response(response.result())
