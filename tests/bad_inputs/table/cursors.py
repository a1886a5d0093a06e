"""Cursors. `sent` makes the bytes from a good cursor and from one of another dataset."""

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.bad_inputs.row import Row

REJECTED = ("FAILED_PRECONDITION", "CursorRejected")
DAMAGED = "damaged|is none of this loader's|cannot be read|lacks fields|is no beginning"


@dataclass(frozen=True)
class Good:
    """Cursors that a daemon gave.

    Attributes:
        cursor: Of the dataset `tokens`, after one step.
        other: Of the dataset `tars`, in the same order.
    """

    cursor: bytes
    other: bytes


Make = Callable[[Good], bytes]


def truncated(part: float) -> Make:
    return lambda good: good.cursor[: int(len(good.cursor) * part)]


def flipped(place: float, bit: int) -> Make:
    """One bit of the byte at a place in [0, 1)."""

    def make(good: Good) -> bytes:
        data = bytearray(good.cursor)
        data[int(len(data) * place)] ^= 1 << bit
        return bytes(data)

    return make


def rewritten(change: Callable[[Any], Any]) -> Make:
    """Other contents under a right checksum: what somebody makes who knows the format."""

    def make(good: Good) -> bytes:
        body = json.dumps(change(json.loads(good.cursor[8:]))).encode()
        return sealed(body)

    return make


def sealed(body: bytes) -> bytes:
    return struct.pack("<4sI", b"GYRE", zlib.crc32(body)) + body


def with_value(key: str, value: object) -> Make:
    return rewritten(lambda parts: [parts[0], {**parts[1], key: value}])


def with_stages(*stages: object, num_shards: object = 1) -> Make:
    """A cursor of a dataset that grows."""
    return rewritten(
        lambda parts: [2, {**parts[1], "stages": stages, "num_shards": num_shards}],
    )


def with_order(key: str, value: object) -> Make:
    return rewritten(
        lambda parts: [parts[0], {**parts[1], "order": {**parts[1]["order"], key: value}}]
    )


def with_orders(**values: object) -> Make:
    """A cursor of another order; the method LocateStep takes the order from there."""
    return rewritten(
        lambda parts: [parts[0], {**parts[1], "order": {**parts[1]["order"], **values}}]
    )


BY_HAND: list[tuple[str, Make, str]] = [
    ("one byte", lambda good: b"G", DAMAGED),
    ("magic alone", lambda good: b"GYRE", DAMAGED),
    ("head alone", lambda good: good.cursor[:8], DAMAGED),
    ("5000 zeros", lambda good: b"GYRE" + bytes(5000), DAMAGED),
    ("60 kB", lambda good: good.cursor + bytes(60_000), DAMAGED),
    ("a pickle", lambda good: b"\x80\x04cposix\nsystem\nX\x02\x00\x00\x00id\x85R.", DAMAGED),
    ("twice", lambda good: good.cursor * 2, DAMAGED),
    ("one byte more", lambda good: good.cursor + b"\0", DAMAGED),
    ("reversed", lambda good: good.cursor[::-1], DAMAGED),
    ("no JSON", lambda good: sealed(b"{" * 100), DAMAGED),
    ("deep JSON", lambda good: sealed(b"[" * 4000), DAMAGED),
    ("JSON of a number", lambda good: sealed(b"7"), DAMAGED),
    ("JSON null", lambda good: sealed(b"null"), DAMAGED),
    ("no UTF-8", lambda good: sealed(b"\xff\xfe" * 20), DAMAGED),
    ("4000 digits", lambda good: sealed(b"[1," + b"9" * 4000 + b"]"), DAMAGED),
    ("future version", rewritten(lambda parts: [6, parts[1]]), "version 6, but this daemon reads"),
    ("version as text", rewritten(lambda parts: ["1", parts[1]]), "version"),
    ("no fields", rewritten(lambda parts: [1, {}]), DAMAGED),
    ("fields as a list", rewritten(lambda parts: [1, []]), DAMAGED),
    ("three parts", rewritten(lambda parts: [1, parts[1], 0]), DAMAGED),
    ("an unknown field", with_value("extra", 1), DAMAGED),
    ("other dataset", lambda good: good.other, "belongs to other data"),
    ("a fingerprint of nothing", with_value("fingerprint", ""), "other data"),
    ("fingerprint as a number", with_value("fingerprint", 7), "other data|damaged|is no"),
    ("position past the end", with_value("position", 1 << 63), DAMAGED),
    ("negative position", with_value("position", -8), DAMAGED),
    ("position between batches", with_value("position", 9), DAMAGED),
    ("position as text", with_value("position", "8"), DAMAGED),
    ("position as a float", with_value("position", 8.0), DAMAGED),
    ("position true", with_value("position", True), DAMAGED),
    ("position of a list", with_value("position", [8]), DAMAGED),
    ("more substitutes than samples", with_value("num_substitutes", 1 << 40), DAMAGED),
    ("negative substitutes", with_value("num_substitutes", -1), DAMAGED),
    ("future algorithm", with_value("algorithm", 99), "order algorithm's version is 99"),
    ("stages in version 1", with_value("stages", [[0, 8]]), DAMAGED),
    ("no buckets in version 5", rewritten(lambda parts: [5, parts[1]]), DAMAGED),
    ("no stages in version 2", rewritten(lambda parts: [2, parts[1]]), DAMAGED),
    ("stages as a number", with_stages(7), DAMAGED),
    ("a stage as text", with_stages("08"), DAMAGED),
    ("stages that shrink", with_stages([0, 8], [1, 4]), DAMAGED),
    ("stages in a circle", with_stages([0, 8], [0, 9]), DAMAGED),
    ("no first stage", with_stages([1, 8]), DAMAGED),
    ("a stage of nothing", with_stages([0, 0]), DAMAGED),
    ("a stage of too much", with_stages([0, 1 << 63]), DAMAGED),
    ("a stage never", with_stages([0, 8], [1 << 63, 9]), DAMAGED),
    ("300 stages", with_stages(*([each, each + 1] for each in range(300))), DAMAGED),
    ("stages of no shard", with_stages([0, 8], num_shards=0), DAMAGED),
    ("shards as text", with_stages([0, 8], num_shards="1"), DAMAGED),
    ("stages of other samples", with_stages([0, 8]), "its data has 8 samples, but it has"),
    ("other seed", with_order("seed", 2), "the seed is 2 there and 1 here"),
    ("other mode", with_order("mode", "sequential"), "the order mode is sequential there"),
    ("unknown mode", with_order("mode", "chaos"), DAMAGED),
    ("other tail", with_order("tail", "drop"), "the tail is drop there and wrap here"),
    ("batch size 4", with_order("global_batch_size", 4), "batch size is 4 there and 8 here"),
    ("batch size 0", with_order("global_batch_size", 0), DAMAGED),
    ("a job that joined", with_order("start_position", 8), 'join="rotate"'),
    ("blocks without block", with_order("window_blocks", 7), "the window in blocks is 7 there"),
]
ROWS = [
    *(Row(f"cursor {words}", make, *REJECTED, text) for words, make, text in BY_HAND),
    *(
        Row(f"cursor cut at {part} of 16", truncated(part / 16), *REJECTED, DAMAGED)
        for part in range(1, 16)
    ),
    *(
        Row(f"cursor bit {n % 8} at {n} of 32", flipped(n / 32, n % 8), *REJECTED, DAMAGED)
        for n in range(32)
    ),
]

_Values = dict[str, object]
_BLOCKS: _Values = {"mode": "block", "io_block_bytes": 4096, "window_blocks": 4}
_NO_BLOCKS = ("INVALID_ARGUMENT", "InvalidRequest", "io_block is .* bytes")
# Sent to LocateStep, which plans in the cursor's own order.
_ORDERS: list[tuple[str, _Values, tuple[str, str, str]]] = [
    ("mode list", {"mode": ["x"]}, (*REJECTED, DAMAGED)),
    ("mode unknown", {"mode": "none"}, (*REJECTED, DAMAGED)),
    ("tail table", {"tail": {"a": 1}}, (*REJECTED, DAMAGED)),
    ("tail unknown", {"tail": "none"}, (*REJECTED, DAMAGED)),
    ("seed below 0", {"seed": -1}, (*REJECTED, DAMAGED)),
    ("seed 2^64", {"seed": 1 << 64}, (*REJECTED, DAMAGED)),
    ("window below 0", {**_BLOCKS, "window_blocks": -5}, (*REJECTED, DAMAGED)),
    ("block below 0", {"io_block_bytes": -1}, (*REJECTED, DAMAGED)),
    ("block 0", {**_BLOCKS, "io_block_bytes": 0}, _NO_BLOCKS),
    ("block 1", {**_BLOCKS, "io_block_bytes": 1}, _NO_BLOCKS),
    (
        "window 2^60",
        {**_BLOCKS, "window_blocks": 1 << 60},
        ("INVALID_ARGUMENT", "InvalidRequest", "too wide"),
    ),
    (
        "batch 2^40",
        {"global_batch_size": 1 << 40},
        ("INVALID_ARGUMENT", "InvalidRequest", "global batch size must be"),
    ),
]
LOCATED = [
    Row(f"LocateStep {words}", with_orders(**values), *told) for words, values, told in _ORDERS
]
