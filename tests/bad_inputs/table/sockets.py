"""Bytes on the daemon's sockets.

`sent` is a list of byte strings, each sent with one call. The daemon answers nothing of use and
ends the connection, or waits for more and is left.
"""

import random
import struct

from tests.bad_inputs.row import Row

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NOTHING = ("", "", "")


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """Returns an HTTP/2 frame; `length` overrides the true one."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


SETTINGS = frame(4, 0, 0, b"")
_noise = random.Random(16)
GRPC: dict[str, list[bytes]] = {
    "one zero": [b"\0"],
    "a line feed": [b"\n"],
    "HTTP/1 request": [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    "HTTP/1 post": [b"POST /gyre_protos.v1.Loader/GetStatus HTTP/1.1\r\nContent-Length: 9\r\n\r\n"],
    "TLS client hello": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)],
    "SSH banner": [b"SSH-2.0-OpenSSH_9.2\r\n"],
    "half a preface": [PREFACE[:10]],
    "a wrong preface": [PREFACE[:-1] + b"x"],
    "preface alone": [PREFACE],
    "preface and noise": [PREFACE, _noise.randbytes(4096)],
    "settings of odd length": [PREFACE, frame(4, 0, 0, b"abc")],
    "settings on a stream": [PREFACE, frame(4, 0, 1, b"")],
    "huge frame length": [PREFACE, SETTINGS, frame(0, 0, 1, b"", length=0xFFFFFF)],
    "data before headers": [PREFACE, SETTINGS, frame(0, 1, 1, b"hello")],
    "headers on stream 0": [PREFACE, SETTINGS, frame(1, 4, 0, b"\x82")],
    "headers on an even stream": [PREFACE, SETTINGS, frame(1, 4, 2, b"\x82")],
    "broken header compression": [PREFACE, SETTINGS, frame(1, 5, 1, b"\xff" * 200)],
    "continuation without headers": [PREFACE, SETTINGS, frame(9, 4, 1, b"\x82")],
    "10,000 empty continuations": [
        PREFACE,
        SETTINGS,
        frame(1, 0, 1, b"\x82"),
        frame(9, 0, 1, b"") * 10_000,
    ],
    "window update of zero": [PREFACE, SETTINGS, frame(8, 0, 0, bytes(4))],
    "window overflow": [PREFACE, SETTINGS, frame(8, 0, 0, b"\x7f\xff\xff\xff") * 3],
    "10,000 settings": [PREFACE, SETTINGS * 10_000],
    "10,000 pings": [PREFACE, SETTINGS, frame(6, 0, 0, bytes(8)) * 10_000],
    "10,000 resets": [PREFACE, SETTINGS, frame(3, 0, 1, bytes(4)) * 10_000],
    "push promise": [PREFACE, SETTINGS, frame(5, 4, 1, bytes(5))],
    "priority on itself": [PREFACE, SETTINGS, frame(2, 0, 1, struct.pack(">IB", 1, 0))],
    "goodbye first": [PREFACE, SETTINGS, frame(7, 0, 0, bytes(8))],
    "unknown frame type": [PREFACE, SETTINGS, frame(200, 255, 0, bytes(64))],
    "1 MiB of noise": [_noise.randbytes(1 << 20)],
    "1 MiB of zeros": [bytes(1 << 20)],
}
SIDE: dict[str, list[bytes]] = {
    "nothing": [],
    "one byte": [b"x"],
    "a token": [b"a" * 32],
    "HTTP/2 preface": [PREFACE],
    "1,000 messages": [b"x"] * 1000,
    "60 kB": [bytes(60_000)],
    "escape sequences": [b"\x1b[2J" * 10],
}
GRPC_ROWS = [Row(f"socket {words}", sent, *NOTHING) for words, sent in GRPC.items()]
SIDE_ROWS = [Row(f"side channel {words}", sent, *NOTHING) for words, sent in SIDE.items()]

# Serialized requests that no protobuf parser accepts. `sent` is the method and the bytes.
BYTES = {
    "a tag without a value": b"\x0a",
    "a field of 2^60 bytes": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x0f",
    "wire type 7": b"\x0f",
    "field number 0": b"\x02\x00",
    "an endless varint": b"\x20" + b"\xff" * 11,
    "a group without end": b"\x0b",
    "a name that is not UTF-8": b"\x0a\x04\x0a\x02\xff\xfe",
    "noise": _noise.randbytes(500),
}
UNARY = ("DescribeDataset", "PlanStep", "PlanCost", "OpenSession", "ExplainStep")
STREAMING = ("IndexDataset", "Stream")
MALFORMED_ROWS = [
    Row(
        f"malformed {words}, {method}",
        (method, data),
        "INVALID_ARGUMENT",
        "InvalidRequest",
        "(?i)request|message|protobuf",
    )
    for method in (*UNARY, *STREAMING)
    for words, data in BYTES.items()
]
