"""Messages between the daemon and a copy worker, over a socket pair that only they have.

A request is a header and a body, and may bring one descriptor. Requests are answered in the order
in which they were sent; `OPEN` and `CLOSE` are not answered.
"""

import socket
import struct
from enum import IntEnum
from typing import NamedTuple

_HEADER = struct.Struct("<3q")  # kind, key, bytes of the body
_REPLY = struct.Struct("<2q")  # is_done, value


class Kind(IntEnum):
    """The kind of a request.

    Attributes:
        MAP: map the arena whose descriptor comes along, for writing.
        UNMAP: unmap an arena.
        OPEN: map the file whose descriptor comes along, for reading.
        CLOSE: unmap a file.
        COPY: copy the ranges in the body into an arena; the reply's value is how often the copy
            waited for a disk.
        FORK: fork a copy worker that has the same arenas and serves the connection whose descriptor
            comes along; the reply's value is its process id.
    """

    MAP = 1
    UNMAP = 2
    OPEN = 3
    CLOSE = 4
    COPY = 5
    FORK = 6


class CopyRequest(NamedTuple):
    """One request.

    Attributes:
        kind: selects the action.
        key: names an arena or a file.
        body: the ranges of `COPY`, as `Ranges.to_bytes` writes them; empty otherwise.
        descriptor: comes along, -1 for none. The sender keeps its own, the receiver owns another.
    """

    kind: Kind
    key: int = 0
    body: bytes | bytearray = b""
    descriptor: int = -1


class Reply(NamedTuple):
    """The answer to a request.

    Attributes:
        is_done: false where the worker could not do it, such as copy from a file that is too short.
        value: see `Kind`; 0 where it says nothing there.
    """

    is_done: bool
    value: int = 0


def send_request(connection: socket.socket, request: CopyRequest) -> None:
    """Send one request.

    Raises:
        OSError: the other side is gone, or took nothing until the connection's deadline.
    """
    header = _HEADER.pack(request.kind, request.key, len(request.body))
    if request.descriptor >= 0:
        socket.send_fds(connection, [header], [request.descriptor])
        header = b""
    connection.sendall(header + request.body)


def receive_request(connection: socket.socket) -> CopyRequest | None:
    """The next request, or None where the other side is gone."""
    header, descriptors, _, _ = socket.recv_fds(connection, _HEADER.size, 1, socket.MSG_WAITALL)
    if len(header) < _HEADER.size:
        return None
    kind, key, num_bytes = _HEADER.unpack(header)
    body = _receive(connection, num_bytes)
    if body is None:
        return None
    return CopyRequest(Kind(kind), key, body, descriptors[0] if descriptors else -1)


def send_reply(connection: socket.socket, reply: Reply) -> None:
    """Answer the oldest request that was not answered yet."""
    connection.sendall(_REPLY.pack(*reply))


def receive_reply(connection: socket.socket) -> Reply:
    """The next reply.

    Raises:
        OSError: the other side is gone, or did not reply until the connection's deadline.
    """
    data = _receive(connection, _REPLY.size)
    if data is None:
        raise ConnectionResetError("it ended")
    is_done, value = _REPLY.unpack(data)
    return Reply(bool(is_done), value)


def _receive(connection: socket.socket, num_bytes: int) -> bytearray | None:
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        num_received = connection.recv_into(rest, 0, socket.MSG_WAITALL)
        if not num_received:
            return None
        rest = rest[num_received:]
    return data
