"""Messages between the daemon and the processes that work for it.

Each process has a socket pair that only it and the daemon have. A message is HEADER | body, and may
bring descriptors. A new process sends `DONE` with its process id and a descriptor of itself; if it
cannot be forked, its server sends `FAILED` in its place. From then on the daemon sends requests,
and the process answers them in their order: `OPEN`, `CLOSE` and `FORK` with nothing, each other one
with `DONE` or `FAILED`.

Requests come from the daemon. Replies may come from a process that foreign bytes took over, so
their reader says how long they may be, and trusts nothing in them.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("<3q")  # kind, number, bytes of the body
_MAX_DESCRIPTORS = 2
# A reply is read in pieces of this size; most replies are shorter than one.
_PIECE_BYTES = 1 << 16


class Kind(IntEnum):
    """The kind of a message.

    Attributes:
        DONE: the request is done. The number of the first message of a process is its id; to
            `COPY`, the number tells how often it waited for a disk.
        FAILED: it is not done. The number of the first message is the `errno` of `fork`.
        FORK: fork a process that serves the connection whose descriptor comes along. The number is
            the limit of its memory, 0 for none.
        MAP: map the arena whose descriptor comes along, for writing. Its number names it.
        UNMAP: unmap an arena.
        OPEN: map the file whose descriptor comes along, for reading. Its number names it.
        CLOSE: unmap a file.
        COPY: copy the ranges in the body into an arena.
        COMPUTE: compute the reply's body.
    """

    DONE = 0
    FAILED = 1
    FORK = 2
    MAP = 3
    UNMAP = 4
    OPEN = 5
    CLOSE = 6
    COPY = 7
    COMPUTE = 8


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: selects the action, or tells the outcome.
        number: see `Kind`.
        body: bytes for the action, or its result.
        descriptors: at most two. The sender keeps its own, the receiver owns others.
    """

    kind: Kind
    number: int = 0
    body: bytes | bytearray = b""
    descriptors: Sequence[int] = ()


def send(connection: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: the other side is gone, or took nothing until the connection's deadline.
    """
    rest = _send_some(connection, message)
    if rest:
        connection.sendall(rest)


def receive(connection: socket.socket) -> Message | None:
    """The next message, of a sender that is trusted; None where the other side is gone.

    Raises:
        OSError: none came until the connection's deadline.
    """
    header, descriptors, _, _ = socket.recv_fds(
        connection, HEADER.size, _MAX_DESCRIPTORS, socket.MSG_WAITALL
    )
    if len(header) < HEADER.size:
        return None
    kind, number, num_bytes = HEADER.unpack(header)
    body = bytearray(num_bytes)
    rest = memoryview(body)
    while rest:
        num_received = connection.recv_into(rest, 0, socket.MSG_WAITALL)
        if not num_received:
            return None
        rest = rest[num_received:]
    return Message(Kind(kind), number, body, descriptors)


async def ask(connection: socket.socket, request: Message, max_bytes: int) -> bytes:
    """The body of the reply to a request, over a connection that does not block.

    Args:
        connection: nothing else is under way on it.
        request: to send.
        max_bytes: of the reply's body.

    Raises:
        ConnectionError: the other side is gone, or sent no such reply.
    """
    loop = asyncio.get_running_loop()
    rest = _send_some(connection, request)
    if rest:
        await loop.sock_sendall(connection, rest)
    data, num_bytes = bytearray(), HEADER.size
    while len(data) < num_bytes:
        piece = await loop.sock_recv(connection, _PIECE_BYTES)
        if not piece:
            raise ConnectionResetError("it ended")
        data += piece
        if num_bytes == HEADER.size <= len(data):
            kind, _, length = HEADER.unpack_from(data)
            if kind != Kind.DONE or not 0 <= length <= max_bytes:
                raise ConnectionResetError("it sent no reply")
            num_bytes += length
    if len(data) > num_bytes:
        raise ConnectionResetError("it sent more than a reply")
    return bytes(memoryview(data)[HEADER.size :])


async def read(reader: asyncio.StreamReader) -> Message:
    """The next message, where several are under way.

    Raises:
        IncompleteReadError, ConnectionError: the other side is gone.
    """
    kind, number, num_bytes = HEADER.unpack(await reader.readexactly(HEADER.size))
    return Message(Kind(kind), number, await reader.readexactly(num_bytes))


def introduce(connection: socket.socket) -> None:
    """Send the first message of this process."""
    myself = os.pidfd_open(os.getpid())
    send(connection, Message(Kind.DONE, os.getpid(), descriptors=[myself]))
    os.close(myself)


def introduced(connection: socket.socket) -> tuple[int, int]:
    """The id and the descriptor of a new process, from its first message.

    Raises:
        OSError: it was not forked, or ended at once.
    """
    message = receive(connection)
    if message is None:
        raise ConnectionResetError("it ended at once")
    if message.kind == Kind.FAILED:
        raise OSError(message.number, os.strerror(message.number))
    (descriptor,) = message.descriptors
    return message.number, descriptor


def _send_some(connection: socket.socket, message: Message) -> memoryview | bytes:
    """Send the descriptors and a part of the bytes; the bytes that are left."""
    header = HEADER.pack(message.kind, message.number, len(message.body))
    parts = [header, message.body]
    if message.descriptors:
        num_sent = socket.send_fds(connection, parts, list(message.descriptors))
    else:
        num_sent = connection.sendmsg(parts)
    if num_sent < HEADER.size:
        return header[num_sent:] + message.body
    return memoryview(message.body)[num_sent - HEADER.size :]
