"""What the daemon and a copier say to each other, over a pair of sockets that nobody else has.

A request is a header, maybe a descriptor with it, and for `COPY` the columns of its ranges as int64. Each is answered but
`OPEN` and `CLOSE`, in order.
"""

import socket
import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from gyre_daemon.copiers.ranges import NOTHING, Ranges

_HEADER = struct.Struct("<7q")  # kind, key, bytes, and the lengths of four columns
_REPLY = struct.Struct("<qq")


class Kind(IntEnum):
    """What is asked for.

    Attributes:
        MAP: the arena whose descriptor comes with it, writable.
        UNMAP: an arena.
        OPEN: map the file whose descriptor comes with it.
        CLOSE: a file.
        COPY: ranges into an arena.
        FORK: another copier, which has all arenas that this one has, and the connection that comes with it.
    """

    MAP = 1
    UNMAP = 2
    OPEN = 3
    CLOSE = 4
    COPY = 5
    FORK = 6


class Request(NamedTuple):
    """One request as its receiver sees it.

    Attributes:
        kind: what is asked for.
        key: of the arena or file.
        descriptor: that came with it, and is the receiver's now; -1 for none.
        ranges: of `COPY`, otherwise none.
        num_bytes: of `MAP`.
    """

    kind: Kind
    key: int
    descriptor: int
    ranges: Ranges
    num_bytes: int


class Reply(NamedTuple):
    """What came of a request.

    Attributes:
        is_done: false where a file was shorter than it should be.
        value: of `COPY` how often it had to wait for a disk, of `FORK` the process id.
    """

    is_done: bool
    value: int


def send_request(
    connection: socket.socket, kind: Kind, key: int = 0, *, num_bytes: int = 0, descriptor: int = -1, ranges: Ranges = NOTHING
) -> None:
    """See `Request`; a descriptor stays the sender's as well.

    Raises:
        OSError: the other side is gone.
    """
    columns = ranges.file, ranges.start, ranges.size, ranges.target
    header = _HEADER.pack(kind, key, num_bytes, *map(len, columns))
    if descriptor >= 0:
        socket.send_fds(connection, [header], [descriptor])
    else:
        connection.sendall(b"".join((header, *(column.tobytes() for column in columns))))


def receive_request(connection: socket.socket) -> Request | None:
    """The next request, or None where the other side is gone."""
    header, descriptors, _, _ = socket.recv_fds(connection, _HEADER.size, 1, socket.MSG_WAITALL)
    if len(header) < _HEADER.size:
        return None
    kind, key, num_bytes, *lengths = _HEADER.unpack(header)
    body = _receive(connection, 8 * sum(lengths))
    if body is None:
        return None
    columns = np.split(np.frombuffer(body, np.int64), np.cumsum(lengths[:-1]))
    return Request(Kind(kind), key, descriptors[0] if descriptors else -1, Ranges(*columns), num_bytes)


def send_reply(connection: socket.socket, reply: Reply) -> None:
    """Answer the oldest request that is not answered."""
    connection.sendall(_REPLY.pack(*reply))


def receive_reply(connection: socket.socket) -> Reply:
    """The next answer.

    Raises:
        ConnectionError: the other side is gone.
    """
    data = _receive(connection, _REPLY.size)
    if data is None:
        raise ConnectionResetError
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
