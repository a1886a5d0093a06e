"""The targets, by name. Each raises if the daemon would fail in a way that is not its own error."""

import asyncio
import hashlib
import io
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from google.protobuf.message import DecodeError
from gyre_daemon.config import load
from gyre_daemon.datasets.formats.npy import parse_npy_header, read_npy_header
from gyre_daemon.datasets.formats.tokens import (
    IDX_HEAD_BYTES,
    megatron_header,
    read_documents,
    read_head,
    read_megatron_head,
)
from gyre_daemon.datasets.formats.values import check_json, check_text, parse_integer
from gyre_daemon.datasets.formats.webdataset import WebdatasetFormat, WebdatasetOptions
from gyre_daemon.datasets.indexing.unpacked import gunzipped
from gyre_daemon.datasets.known_formats import make_format
from gyre_daemon.datasets.sidecars import decode, encode
from gyre_daemon.errors import CorruptSample, CursorRejected, GyreError
from gyre_daemon.order.cursor import decode_cursor
from gyre_daemon.service import requests
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.response import Response
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.sources.plain_http import HttpGet, _Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.fuzz import shards

_TAR = WebdatasetFormat(WebdatasetOptions())
_MAX_UNPACKED_BYTES = 1 << 24


def tar(data: bytes) -> None:
    """A shard: what is found passes its own check."""
    try:
        scan = _TAR.inspection.run("a.tar", io.BytesIO(data))
    except CorruptSample:
        return
    _TAR.inspection.check(scan, len(data))
    _assemble(scan, len(data))


def index(data: bytes) -> None:
    """A stored index, with a checksum that fits, so that all behind it is reached."""
    content = hashlib.blake2b(data, digest_size=32).digest() + data
    try:
        _, arrays = decode(b"GYREIDX\x03" + content)
        _TAR.inspection.check(arrays, 1 << 20)
    except ValueError:
        return
    _assemble(arrays, 1 << 20)


def index_meta(data: bytes) -> None:
    """The meta data and the numbers of an otherwise sound index."""
    meta, _, numbers = data.partition(b"\0")
    values = np.frombuffer(numbers[: len(numbers) // 8 * 8], "<i8")
    first = int(values[0]) if len(values) else 0
    width, dims = first % 5, first // 5 % 5
    rows = (len(values) - 1) // (2 * width + dims) if width + dims else 0
    table = values[1 : 1 + rows * (2 * width + dims)].reshape(rows, 2 * width + dims)
    parts = np.split(table, (width, 2 * width), axis=1)
    arrays: dict[str, Any] = dict(zip(("start", "size", "shape"), parts, strict=True))
    arrays["meta"] = np.frombuffer(meta, np.uint8)
    _, stored = decode(encode("", arrays))
    try:
        _TAR.inspection.check(stored, 1 << 20)
    except ValueError:
        return
    _assemble(stored, 1 << 20)


def _assemble(scan: Mapping[str, Any], num_bytes: int) -> None:
    try:
        made = _TAR.assemble([Shard("a.tar", num_bytes, "")], [scan])
    except GyreError:
        return
    extents = made.locate(np.arange(made.num_samples))
    assert (extents.start >= 0).all()
    assert (extents.start + extents.size <= num_bytes).all()


def npy(data: bytes) -> None:
    """The header of an npy file."""
    try:
        header = parse_npy_header(data)
    except ValueError:
        return
    assert read_npy_header(io.BytesIO(data).read) == header
    assert header.num_bytes <= len(data)


def tokens(data: bytes) -> None:
    """The head of a file of token ids."""
    for size in (len(data), 1 << 30):
        try:
            header = read_head(Shard("a.bin", size, ""), data[:4096])
        except CorruptSample:
            continue
        assert 0 <= header.start <= header.stop <= size


def megatron(data: bytes) -> None:
    """A Megatron index beside a shard."""
    shard = Shard("a.bin", int.from_bytes(data[-4:], "little"), "")
    try:
        found = read_megatron_head(shard, data[:IDX_HEAD_BYTES], len(data))
        length, begin = (data[each.start : each.stop] for each in found.last_entries)
        header = megatron_header(shard, found, length, begin)
        assert header.stop == shard.size_bytes
        places = read_documents(
            shard, found, [data[each.start : each.stop] for each in found.tables]
        )
    except CorruptSample:
        return
    assert places[0] == 0
    assert places[-1] == shard.size_bytes
    assert (places[1:] >= places[:-1]).all()


def gzip(data: bytes) -> None:
    """A compressed shard."""
    num_bytes = 0
    try:
        for piece in gunzipped(io.BytesIO(data)):
            num_bytes += len(piece)
            if num_bytes > _MAX_UNPACKED_BYTES:
                return
    except ValueError:
        return


def values(data: bytes) -> None:
    """A text, a JSON document and a number of a sample."""
    for check in (check_text, check_json):
        try:
            check(memoryview(data))
        except ValueError:
            continue
    try:
        parse_integer(data)
    except ValueError:
        return


def cursor(data: bytes) -> None:
    """A cursor whose checksum fits, so that all behind it is reached."""
    for whole in (data, struct.pack("<4sI", b"GYRE", zlib.crc32(data)) + data):
        try:
            found = decode_cursor(whole)
        except CursorRejected:
            continue
        assert found.position >= 0


def location(data: bytes) -> None:
    """A dataset's URI."""
    try:
        parse_location(data.decode(errors="replace").replace("\0", ""))
    except GyreError:
        return


def configuration(data: bytes) -> None:
    """A configuration file and the environment; its first line is `KEY=VALUE`."""
    first, _, text = data.partition(b"\n")
    key, _, value = first.decode(errors="replace").partition("=")
    environment = {f"GYRE_{key.upper()}": value}
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        Path(file.name).write_bytes(text)
        try:
            config = load(Path(file.name), environment, {}).config
            for name, dataset in config.datasets.items():
                make_format(name, dataset)
        except GyreError:
            return


def request(data: bytes) -> None:
    """Requests of a client."""
    try:
        message = pb.OpenSessionRequest.FromString(data)
    except DecodeError:
        return
    for convert in (
        lambda: requests.to_order(message.order),
        lambda: requests.to_reader(message.reader),
        lambda: make_format("ad hoc", requests.to_ad_hoc(message.dataset.ad_hoc)),
    ):
        try:
            assert convert() is not None
        except GyreError:
            continue


class _Transport:
    """Takes what a connection sends."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, _: bytes) -> None:
        return

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class _Owner:
    """The pool of a connection."""

    def opened(self, _: object) -> None:
        return

    def freed(self, _: object) -> None:
        return

    def closed(self, _: object) -> None:
        return


def http(data: bytes) -> None:
    """The response of a web server, whole and in two pieces; a request gets one answer at most."""
    cut = data[0] if data else 0
    answers = []
    for pieces in ([data], [data[:cut], data[cut:]]):
        responses: list[Response] = []
        connection = _connected()
        connection.begin(HttpGet(b"", 1000, responses.append))
        for piece in pieces:
            if piece and not connection._transport.is_closing():
                connection.data_received(piece)
        assert len(responses) <= 1
        answers.append([(each.status, each.data, each.told.etag) for each in responses])
    assert answers[0] == answers[1] or connection._transport.is_closing()


def _connected() -> _Connection:
    connection = _Connection.__new__(_Connection)
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)

        async def make() -> None:
            connection.__init__(_Owner())  # type: ignore[misc]
            connection.connection_made(cast("asyncio.BaseTransport", _Transport()))

        loop.run_until_complete(make())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return connection


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (
        tar,
        index,
        index_meta,
        npy,
        tokens,
        megatron,
        gzip,
        values,
        cursor,
        location,
        configuration,
        request,
        http,
    )
} | shards.TARGETS
