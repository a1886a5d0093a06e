"""The page's server: who gets an answer, and which answer.

Among the answers are a job's samples, where its next steps lie, and the cost of each order.

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
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvicorn
from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gyre_client.display import (
    LOSS_MASK,
    Decode,
    MediaBudget,
    Sample,
    Value,
    contributions,
    media_type,
    plain,
    rows_of_step,
    size,
    text_of,
    token_ids,
    words_of,
)
from gyre_client.errors import (
    DaemonUnavailable,
    GyreError,
    InvalidRequest,
    NotAllowed,
    Overloaded,
    UnknownDataset,
)
from gyre_client.page.watch import OWN_JOBS, Watch, WatchedDaemon
from gyre_client.transport.arguments import MAX_STEP, ORDERS, order
from gyre_client.transport.connection import Connection

HOST = "127.0.0.1"
COOKIE = "gyre_page"
_STATIC = Path(__file__).with_name("static")
_HOSTS = frozenset(("127.0.0.1", "localhost", "[::1]"))
# Calls of the daemon at a time, and requests that wait for them: a page that asks for more shows
# what it has. One browser needs two, for a slow call and a fast one.
_MAX_CALLS, _MAX_WAITING = 2, 8
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


MAX_ROWS = 16  # of one request; the page asks for more where someone wants them
_MAX_TEXT_CHARS = 20_000
_MAX_MEDIA_BYTES = 48 << 20  # of one answer
_MAX_PIXELS = 1 << 21  # of an image encoded here
_MAX_SOURCES, _MAX_PLACES = 24, 64


def step_samples(
    connection: Connection,
    request: pb.LocateStepRequest,
    first: int,
    num_rows: int,
    decode: Decode | None,
    *,
    is_as_served: bool,
) -> dict[str, Any]:
    """Returns some rows of a step, the step's sources, and where its samples are stored.

    They are at most `num_rows` from `first` on; fewer where they do not divide the global batch.
    Without `decode`, token ids are shown. Fields are as stored, unless `is_as_served`.

    Raises:
        GyreError: The daemon refuses it.
    """
    located = connection.locate_step(request)
    num = len(located.rows)
    answer: dict[str, Any] = {
        "step": located.step,
        "batch": located.batch,
        "epoch": located.epoch,
        "skipped": located.skipped,
        "num_rows": num,
        "sources": _sources(located),
        "places": [*_places(located)],
        "rows": [],
    }
    if located.skipped or not num:
        return answer
    count = next(
        each for each in range(min(max(num_rows, 1), MAX_ROWS, num), 0, -1) if not num % each
    )
    first = min(max(first, 0), num - 1) // count * count
    job = f"{OWN_JOBS}{first}"
    samples = rows_of_step(
        connection, located, request, first, count, job=job, is_as_served=is_as_served
    )
    media = MediaBudget(_MAX_MEDIA_BYTES)
    answer["first"], answer["count"] = first, count
    answer["rows"] = [
        {
            "row": row,
            "sample_id": sample.sample_id,
            "padding": located.rows[row].padding,
            "fields": [*_fields(sample, decode, media)],
        }
        for row, sample in enumerate(samples, first)
    ]
    return answer


def _sources(located: pb.LocateStepResponse) -> list[dict[str, Any]]:
    """Returns how many samples each source contributed, or each shard where there is one source."""
    counts = contributions(located).most_common()
    most = [{"name": printable(name), "count": num} for name, num in counts[:_MAX_SOURCES]]
    rest = sum(num for _, num in counts[_MAX_SOURCES:])
    return most + ([{"name": "others", "count": rest}] if rest else [])


def _places(located: pb.LocateStepResponse) -> Iterator[dict[str, Any]]:
    """Yields where the first samples of the step are stored."""
    for number, row in enumerate(located.rows[:_MAX_PLACES]):
        for sample in row.samples[:_MAX_PLACES]:
            source = located.sources[sample.source] if located.sources else ""
            yield {
                "row": number,
                "source": printable(source),
                "sample_id": sample.sample_id,
                "shard": printable(located.shards[sample.shard]),
                "shard_row": sample.row,
                "offset": sample.offset if sample.HasField("offset") else None,
                "size": size(sample.num_bytes),
                "tokens": [sample.first_token, sample.first_token + sample.num_tokens]
                if sample.num_tokens
                else None,
            }


def _fields(sample: Sample, decode: Decode | None, media: MediaBudget) -> Iterator[dict[str, Any]]:
    mask = sample.values.get(LOSS_MASK)
    if mask and len(mask.shape) != 1:
        mask = None
    is_marked = mask is not None and any(
        token_ids(name, value) and len(value.data) <= len(mask.data)
        for name, value in sample.values.items()
    )
    for name, value in sample.values.items():
        if name == LOSS_MASK and is_marked:
            continue  # the tokens are marked by it
        shape = ", ".join(map(str, value.shape))
        field = {"name": printable(name), "type": f"{value.dtype} [{shape}]"}
        yield field | _shown(name, value, mask, decode, media)


def _shown(
    name: str, value: Value, mask: Value | None, decode: Decode | None, media: MediaBudget
) -> dict[str, Any]:
    if isinstance(value.data, bytes) and (kind := media_type(value.data)):
        source = media.source(kind, value.data)
        words = f"{kind}, {size(len(value.data))}"
        if source is None:
            return {"kind": "words", "text": f"{words}, too large for this page"}
        return {"kind": kind.partition("/")[0], "source": source, "text": words}
    if (text := text_of(value)) is not None and not (mask and name != LOSS_MASK and not decode):
        more = " ..." if len(text) > _MAX_TEXT_CHARS else ""
        return {"kind": "text", "text": printable(text[:_MAX_TEXT_CHARS], kept="\n\t") + more}
    if ids := token_ids(name, value):
        return _tokens(ids, mask, decode)
    if picture := _picture(value):
        source = media.source("image/png", picture)
        if source:
            return {"kind": "image", "source": source, "text": words_of(value)}
    return {"kind": "words", "text": words_of(value)}


def _tokens(ids: Sequence[int], mask: Value | None, decode: Decode | None) -> dict[str, Any]:
    """Returns runs of tokens that count for the loss, and of those that do not."""
    counts = list(mask.data[: len(ids)]) if mask and len(mask.data) >= len(ids) else None
    runs = groupby(range(len(ids)), key=lambda each: bool(counts[each]) if counts else None)
    spans = []
    for counted, places in runs:
        run = [ids[place] for place in places]
        text = decode(run) if decode else " ".join(map(str, run))
        spans.append({"text": printable(text, kept="\n\t"), "counted": counted})
    num = None if counts is None else sum(map(bool, counts))
    return {"kind": "tokens", "spans": spans, "num": len(ids), "num_counted": num}


def _picture(value: Value) -> bytes | None:
    """Returns a tensor that looks like an image as PNG: [H, W, C] or [C, H, W], C of 1 or 3.

    So is a spectrum over time, float [H, W]. Numbers other than bytes are stretched from their
    least to their greatest.
    """
    pixels = value.data
    if isinstance(pixels, bytes):
        return None
    if pixels.ndim == 2 and "float" in value.dtype:
        pixels = pixels[None]
    if pixels.ndim != 3 or not {pixels.shape[0], pixels.shape[2]} & {1, 3}:
        return None
    if pixels.shape[2] not in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    height, width, num = pixels.shape
    if min(height, width) < 8 or height * width > _MAX_PIXELS:
        return None
    if value.dtype != "uint8":
        is_known = np.isfinite(pixels)
        known = pixels[is_known].astype(np.float64)
        least, greatest = known.min(initial=np.inf), known.max(initial=-np.inf)
        pixels = np.zeros(pixels.shape)
        if greatest > least:
            with np.errstate(all="ignore"):
                stretched = np.rint((known - least) * (255 / (greatest - least)))
            pixels[is_known] = np.nan_to_num(stretched).clip(0, 255)
    return _png(width, height, num, [row.tobytes() for row in pixels.astype(np.uint8)])


def _png(width: int, height: int, num_channels: int, rows: Sequence[bytes]) -> bytes:
    def part(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    colours = 2 if num_channels == 3 else 0
    head = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 1)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", data) + part(b"IEND", b"")


NUM_STEPS = 1000
# The map: steps are looked at, evenly spaced, so that few samples are located; each is some 10 µs
# of the daemon's and 20 µs of this process's time.
_MAX_COLUMNS, _MIN_COLUMNS, _MAX_LOCATED = 60, 6, 48_000
_NUM_BANDS = 40


def order_map(
    connection: Connection, ref: pb.DatasetRef, cursor: bytes, step: int
) -> dict[str, Any]:
    """Returns the places of the next thousand steps of a job in its dataset.

    Some of these steps are located. The dataset, shard after shard, is cut into bands; each column
    of `cells` counts the samples of one step in each band.

    `cursor` is any one of the job, and `step` the first of the steps.

    Raises:
        GyreError: The daemon refuses it.
    """
    description = connection.describe(ref)
    request = pb.LocateStepRequest(dataset=ref, cursor=cursor, step=step)
    first = connection.locate_step(request)
    begin = request.batch = first.batch
    if first.skipped:
        first = connection.locate_step(request)
    num_rows = max(1, len(first.rows))
    num_columns = min(_MAX_COLUMNS, max(_MIN_COLUMNS, _MAX_LOCATED // num_rows))
    num_samples, num_bands = description.num_samples, min(_NUM_BANDS, description.num_samples)
    steps, cells = [], []
    shards: dict[int, list[str]] = {}
    seen: set[str] = set()
    for column in range(num_columns):
        request.batch = begin + column * NUM_STEPS // num_columns
        located = first if not column else connection.locate_step(request)
        counts = [0] * num_bands
        for row in located.rows:
            band = min(num_bands - 1, row.sample_id * num_bands // num_samples)
            counts[band] += 1
            for sample in row.samples[:1]:
                _note(shards.setdefault(band, []), located.shards[sample.shard])
        seen.update(located.shards)
        steps.append(located.step)
        cells.append(counts)
    return {
        "steps": steps,
        "cells": cells,
        "bands": [[printable(name) for name in shards.get(band, [])] for band in range(num_bands)],
        "num_samples": num_samples,
        "num_shards": description.num_shards,
        "num_shards_seen": len(seen),
        "evenness": evenness(cells),
        "order": _order(first.order),
        "resume": _resume(first),
    }


def _note(names: list[str], name: str) -> None:
    """Keeps the least and the greatest name of a band's shards."""
    if name not in names:
        names.append(name)
        names.sort()
        del names[1:-1]


def evenness(cells: Sequence[Sequence[int]]) -> float | None:
    """Returns how evenly steps draw from all bands, in [0, 1]; None where one draw says nothing.

    It compares the variance of the counts with that of a uniform draw: 1 is as even as chance, or
    more so, and 0 is a step from one band alone.
    """
    num_drawn = sum(cells[0]) if cells else 0
    num_bands = len(cells[0]) if cells else 0
    if num_drawn < 2 or num_bands < 2:
        return None
    mean = num_drawn / num_bands
    squares = [sum((count - mean) ** 2 for count in column) / mean for column in cells]
    found = sum(squares) / len(squares)  # chi-squared: num_bands - 1 by chance
    by_chance, most = num_bands - 1, num_drawn * (num_bands - 1)
    return min(1.0, max(0.0, 1 - (found - by_chance) / (most - by_chance)))


def _order(spec: pb.OrderSpec) -> dict[str, Any]:
    return {
        "mode": next((name for name, mode in ORDERS.items() if mode == spec.mode), "full"),
        "seed": str(spec.seed),  # a number of JavaScript is not that large
        "batch_size": spec.global_batch_size,
        "io_block_bytes": spec.io_block_bytes,
        "window_blocks": spec.window_blocks,
    }


def _resume(located: pb.LocateStepResponse) -> dict[str, Any]:
    """Returns the step, and the places of its first samples."""
    places = [
        {
            "sample_id": row.sample_id,
            "shard": printable(located.shards[sample.shard]),
            "shard_row": sample.row,
        }
        for row in located.rows[:3]
        for sample in row.samples[:1]
    ]
    return {
        "step": located.step,
        "epoch": located.epoch,
        "num_samples_before": located.batch * located.order.global_batch_size,
        "places": places,
    }


_COST_BOUNDS = {
    "batch_size": (1, 1 << 20),
    "epochs": (1, 1000),
    "io_block": (0, 1 << 30),
    "window": (0, 1 << 16),
    "cache": (0, 1 << 50),
}


def cost_request(dataset: str, values: Mapping[str, str]) -> pb.PlanCostRequest:
    """Returns the request for the cost of each order, from the settings of the sliders.

    Raises:
        InvalidRequest: One is missing, no whole number, or out of its bounds.
    """
    numbers = {name: _number(values, name, *bounds) for name, bounds in _COST_BOUNDS.items()}
    spec = order(
        numbers["batch_size"], 1, 0, "wrap", "block", numbers["io_block"], numbers["window"]
    )
    return pb.PlanCostRequest(
        dataset=pb.DatasetRef(name=dataset),
        order=spec,
        num_epochs=numbers["epochs"],
        cache_bytes=numbers["cache"],
    )


def _number(values: Mapping[str, str], name: str, least: int = 0, most: int = MAX_STEP) -> int:
    text = values.get(name, "")
    if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
        raise InvalidRequest(f"{name} is {text[:20]!r}; it must be {least} to {most}")
    return int(text)


class _Answers:
    """The answers to the page's questions: `index` and `events`, and the results of calls."""

    def __init__(self, watch: Watch, decode: Decode | None) -> None:
        self._watch, self._decode = watch, decode
        self._turns = asyncio.Semaphore(_MAX_CALLS)
        self._num_waiting = 0

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return HTMLResponse((_STATIC / "index.html").read_bytes())

    async def events(self, request: Request) -> Response:
        """Everything that changes, once a second."""
        events = (f"data: {text}\n\n" async for text in self._watch.texts())
        return StreamingResponse(events, media_type="text/event-stream")

    def result_of(self, work: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        """Returns an endpoint with the result as JSON, or the error in words; a few at a time."""

        async def answer(request: Request) -> Response:
            if self._num_waiting >= _MAX_WAITING:
                return JSONResponse({"error": "the page asks for too much at once; wait"}, 429)
            self._num_waiting += 1
            try:
                async with self._turns:
                    found = await asyncio.to_thread(work, request)
            except GyreError as error:
                status = next(
                    (code for kind, code in _STATUS_OF.items() if isinstance(error, kind)), 502
                )
                return JSONResponse({"error": printable(" ".join(str(error).split()))}, status)
            finally:
                self._num_waiting -= 1
            return Response(json.dumps(found), media_type="application/json")

        return answer

    def reads(self, request: Request) -> Any:
        """How long the last reads of a job took."""
        job = request.query_params.get("job", "")
        return self._watch.daemon_of(job).reads_of(job)

    def why(self, request: Request) -> Any:
        """How the time of a step was spent."""
        job = request.query_params.get("job", "")
        return self._watch.daemon_of(job).why(job, _number(request.query_params, "step"))

    def samples(self, request: Request) -> Any:
        """Samples of a step, of a job or of a run."""
        asked = request.query_params
        step = _number(asked, "step")
        if "run" in asked:
            located = self._watch.run_of(asked["run"]).request(step)
            daemon = self._watch.serving(located.dataset)
        else:
            daemon = self._watch.daemon_of(asked.get("job", ""))
            located = daemon.step_request(asked.get("job", ""), step)
        first, num = _number(asked, "first"), _number(asked, "num")
        is_as_served = asked.get("as") == "served"
        return step_samples(
            daemon.connection, located, first, num, self._decode, is_as_served=is_as_served
        )

    def order(self, request: Request) -> Any:
        """The places of the next steps of a job."""
        job = request.query_params.get("job", "")
        daemon = self._watch.daemon_of(job)
        session = daemon.session_of(job)
        ref = pb.DatasetRef(session=session.handle)
        return order_map(daemon.connection, ref, session.cursor, session.resume_step)

    def datasets(self, request: Request) -> Any:
        """The datasets of a daemon."""
        return [
            {
                "name": printable(each.name),
                "uri": printable(each.uri),
                "format": each.format,
                "open": each.open,
            }
            for each in self._daemon(request).datasets
        ]

    def cost(self, request: Request) -> Any:
        """The cost of each order."""
        asked = request.query_params
        response = self._daemon(request).connection.plan_cost(
            cost_request(asked.get("dataset", ""), asked)
        )
        return {**plain(response), "recommendation": printable(response.recommendation)}

    def run(self, request: Request) -> Any:
        """The losses of a run."""
        return self._watch.run_of(request.query_params.get("run", "")).curve()

    def _daemon(self, request: Request) -> WatchedDaemon:
        return self._watch.daemon(request.query_params.get("daemon", ""))


def page_app(watch: Watch, decode: Decode | None) -> Door:
    """Returns the application: the door, and everything behind it."""
    answers, door = _Answers(watch, decode), Door()
    routes: Sequence[Route | Mount] = (
        Route("/", answers.index),
        Route("/events", answers.events),
        *(
            Route(f"/api/{work.__name__}", answers.result_of(work))
            for work in (
                answers.reads,
                answers.why,
                answers.samples,
                answers.order,
                answers.datasets,
                answers.cost,
                answers.run,
            )
        ),
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

    Port 0 is any free one of 127.0.0.1. `say` gets the address, with the token.

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
