"""The page's server: who gets an answer, and which answer.

[Note: Who may see the page]

The server speaks to one browser, with the rights of the user that started it, so it must know that
browser from anything else that reaches 127.0.0.1: other users of the machine, and pages of other
servers. The printed address has a token, which works once and becomes a cookie. The cookie's path
has a random part: a browser sends cookies of 127.0.0.1 to every port, where another user's server
may listen, but only below their path. `Host` must name this machine, which ends DNS rebinding.
Requests that another site's page causes are refused by `Sec-Fetch-Site` and `Origin`. The policy
allows scripts from files of this package alone, and everything else of the daemon is text.
No request changes anything: there are only GET and HEAD.
"""

import asyncio
import hmac
import html
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from gyre_protos.text import printable
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gyre_client.display import Decode
from gyre_client.errors import (
    DaemonUnavailable,
    GyreError,
    InvalidRequest,
    NotAllowed,
    Overloaded,
    UnknownDataset,
)
from gyre_client.page.views import cost_request, costs, order_map, step_samples
from gyre_client.page.watch import Watch
from gyre_client.transport.arguments import MAX_STEP

HOST = "127.0.0.1"
COOKIE = "gyre_page"
_STATIC = Path(__file__).with_name("static")
_HOSTS = frozenset(("127.0.0.1", "localhost", "[::1]"))
# Calls of the daemon at a time, and requests that wait for them: a page that asks for more shows
# what it has. One browser needs two, for a slow call and a fast one.
_MAX_CALLS, _MAX_WAITING = 2, 8
_MAX_LISTENERS = 16
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; media-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_STATUS_OF = {
    InvalidRequest: 400,
    NotAllowed: 403,
    UnknownDataset: 404,
    Overloaded: 429,
    DaemonUnavailable: 503,
}
_REFUSED = "Open the address that `gyre page` printed: its link works once, in one browser."


class Door:
    """Decides which requests get an answer; see [Note: Who may see the page].

    Attributes:
        path: Of everything but the entrance; it ends with a slash.
        token: In the printed address, until it was used.
    """

    def __init__(self, app: ASGIApp | None = None) -> None:
        self.path = f"/{secrets.token_urlsafe(12)}/"
        self.token: str | None = secrets.token_urlsafe(32)
        self.app = app
        self._cookie = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or lets the application answer it."""
        if scope["type"] != "http":
            assert self.app
            return await self.app(scope, receive, send)
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        refusal = self._refusal(request)
        if refusal is None:
            assert self.app
            return await self.app(scope, receive, send_with_headers)
        return await refusal(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Returns the answer to a request that does not reach the application; None for others."""
        headers = request.headers
        if not _names_this_machine(headers):
            return _page("This name is not of this machine.", "Open 127.0.0.1 or localhost.", 403)
        if request.url.path == "/favicon.ico":  # a browser asks for it before it has the cookie
            return Response(status_code=204)
        if request.url.path == "/":
            return self._enter(request)
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _page("Another page asked for this one.", _REFUSED, 403)
        if not _is_same(request.cookies.get(COOKIE, ""), self._cookie):
            return _page("This browser has no access.", _REFUSED, 403)
        return None

    def _enter(self, request: Request) -> Response:
        """Turns the token into the cookie, once."""
        given = request.query_params.get("token", "")
        if self.token is None or not _is_same(given, self.token):
            title = "This link was used already." if given else "This address needs a token."
            more = "If that was not you, end `gyre page`: somebody else read the link."
            return _page(title, f"{_REFUSED} {more if given else ''}", 403)
        self.token = None
        # No redirect: where another site led here, a browser keeps SameSite=Strict cookies back
        # until a page of this site asks.
        link = f'<meta http-equiv="refresh" content="0; url={self.path}">'
        answer = HTMLResponse(f"<!DOCTYPE html><title>Gyre</title>{link}")
        answer.set_cookie(COOKIE, self._cookie, path=self.path, httponly=True, samesite="strict")
        return answer


def _names_this_machine(headers: Headers) -> bool:
    """Whether `Host` and `Origin` are of this machine; a tunnel may have another port."""
    host, origin = headers.get("host", ""), headers.get("origin")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name in _HOSTS and (origin is None or urlsplit(origin).netloc == host)


def _is_same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


def _page(title: str, text: str, status: int) -> Response:
    body = f"<!DOCTYPE html><title>Gyre</title><h1>{html.escape(title)}</h1>"
    return HTMLResponse(f"{body}<p>{html.escape(text)}</p>", status)


class _Calls:
    """Calls of daemons, a few at a time."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_MAX_CALLS)
        self._num_waiting = 0

    async def answer(self, work: Callable[[], Any]) -> Response:
        """Returns the result as JSON, or the error in words."""
        if self._num_waiting >= _MAX_WAITING:
            return JSONResponse({"error": "the page asks for too much at once; wait"}, 429)
        self._num_waiting += 1
        try:
            async with self._turns:
                found = await asyncio.to_thread(work)
        except GyreError as error:
            status = next(
                (code for kind, code in _STATUS_OF.items() if isinstance(error, kind)), 502
            )
            return JSONResponse({"error": printable(" ".join(str(error).split()))}, status)
        finally:
            self._num_waiting -= 1
        return Response(json.dumps(found), media_type="application/json")


class _Answers:
    """The answers to the page's questions."""

    def __init__(self, watch: Watch, decode: Decode | None) -> None:
        self._watch, self._decode = watch, decode
        self._calls = _Calls()
        self._num_listeners = 0

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return HTMLResponse((_STATIC / "index.html").read_bytes())

    async def events(self, request: Request) -> Response:
        """Everything that changes, once a second."""
        if self._num_listeners >= _MAX_LISTENERS:
            return JSONResponse({"error": "too many windows show this page; close some"}, 429)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        self._num_listeners += 1
        try:
            async for text in self._watch.texts():
                yield f"data: {text}\n\n"
        finally:
            self._num_listeners -= 1

    async def reads(self, request: Request) -> Response:
        """How long the last reads of a job took."""
        job = request.query_params.get("job", "")
        return await self._calls.answer(lambda: self._watch.daemon_of(job).reads_of(job))

    async def why(self, request: Request) -> Response:
        """How the time of a step was spent."""
        job = request.query_params.get("job", "")
        return await self._calls.answer(
            lambda: self._watch.daemon_of(job).why(job, _number(request, "step"))
        )

    async def samples(self, request: Request) -> Response:
        """Samples of a step, of a job or of a run."""
        return await self._calls.answer(lambda: self._samples(request))

    def _samples(self, request: Request) -> Any:
        asked, step = request.query_params, _number(request, "step")
        if "run" in asked:
            located = self._watch.run_of(asked["run"]).request(step)
            daemon = self._watch.serving(located.dataset)
        else:
            daemon = self._watch.daemon_of(asked.get("job", ""))
            located = daemon.step_request(asked.get("job", ""), step)
        first, num = _number(request, "first"), _number(request, "num")
        is_as_served = asked.get("as") == "served"
        return step_samples(
            daemon.connection, located, first, num, self._decode, is_as_served=is_as_served
        )

    async def order(self, request: Request) -> Response:
        """The places of the next steps of a job."""
        job = request.query_params.get("job", "")
        return await self._calls.answer(lambda: self._order(job))

    def _order(self, job: str) -> Any:
        daemon = self._watch.daemon_of(job)
        session = daemon.session_of(job)
        ref = daemon.dataset_of(session)
        return order_map(daemon.connection, ref, session.cursor, session.resume_step)

    async def datasets(self, request: Request) -> Response:
        """The datasets of a daemon."""
        number = request.query_params.get("daemon", "")
        return await self._calls.answer(
            lambda: [
                {
                    "name": printable(each.name),
                    "uri": printable(each.uri),
                    "format": each.format,
                    "open": each.open,
                }
                for each in self._watch.daemon(number).datasets
            ]
        )

    async def cost(self, request: Request) -> Response:
        """The cost of each order."""
        asked = request.query_params
        return await self._calls.answer(
            lambda: costs(
                self._watch.daemon(asked.get("daemon", "")).connection,
                cost_request(asked.get("dataset", ""), asked),
            )
        )

    async def run(self, request: Request) -> Response:
        """The losses of a run."""
        number = request.query_params.get("run", "")
        return await self._calls.answer(lambda: self._watch.run_of(number).curve())


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not text.isdecimal() or len(text) > 20 or int(text) > MAX_STEP:
        raise InvalidRequest(f"{name} is {text[:20]!r}; it must be a whole number")
    return int(text)


def page_app(watch: Watch, decode: Decode | None) -> Door:
    """Returns the application: the door, and everything behind it."""
    answers, door = _Answers(watch, decode), Door()
    routes: Sequence[Route | Mount] = (
        Route("/", answers.index),
        Route("/events", answers.events),
        Route("/api/reads", answers.reads),
        Route("/api/why", answers.why),
        Route("/api/samples", answers.samples),
        Route("/api/order", answers.order),
        Route("/api/datasets", answers.datasets),
        Route("/api/cost", answers.cost),
        Route("/api/run", answers.run),
        Mount("/static", StaticFiles(directory=_STATIC)),
    )

    @asynccontextmanager
    async def watching(app: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(watch.run())
        yield
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking

    mounted = Mount(door.path.rstrip("/"), routes=routes)
    door.app = Starlette(routes=[mounted], lifespan=watching)
    return door


class _Server(uvicorn.Server):
    """A server that ends the streams of events before it waits for the connections to end."""

    def __init__(self, config: uvicorn.Config, watch: Watch) -> None:
        super().__init__(config)
        self._watch = watch

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `uvicorn.Server`."""
        self._watch.is_over = True
        super().handle_exit(sig, frame)


def serve_page(watch: Watch, decode: Decode | None, port: int, say: Callable[[str], None]) -> None:
    """Serves the page until the user ends it.

    Args:
        watch: The daemons and runs.
        decode: Turns token ids into text.
        port: On 127.0.0.1; 0 for any that is free.
        say: Gets the address, with the token.

    Raises:
        InvalidRequest: The port is taken.
    """
    app = page_app(watch, decode)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen()  # who opens the address at once waits
        except OSError as error:
            raise InvalidRequest(
                f"--port {port}: {error.strerror}. Give another one, or none for any free one."
            ) from error
        say(f"http://{HOST}:{listener.getsockname()[1]}/?token={app.token}")
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # it would have the token
            server_header=False,
            timeout_graceful_shutdown=10,
        )
        _Server(config, watch).run(sockets=[listener])
