"""`python -m gyre_daemon.datasets.indexing.scan_server FD` forks processes that scan shards.

Only a daemon starts it: see `scan_processes`. A scan reads files that anybody may have written, in
pure Python, for seconds or minutes. In a process of its own it takes no turn of the daemon's
interpreter, all its memory is given back at its end, and it can be killed at any time.

The server imports what a scan needs once, so that a process more takes some milliseconds. Over its
connection it receives the connections of new processes, one descriptor each. A process first sends
a descriptor of itself, by which the daemon kills it. Then it answers requests, one after the other:

    request  one byte, with two descriptors: the file's, and a memory file that holds a pickle of
             (function, name of the shard, kind)
    reply    length | an encoded file of `sidecars.file`: the key is "", or JSON of an error

The file is one that is open, or a socket: of a stream, or of a shard that is read by ranges.
Through the latter the process sends `RANGE`, first byte and length, and gets that many bytes.

Requests come from the daemon, so they may be pickles. Replies may come from a process that read
hostile bytes, so they are not. All processes end with the daemon, however that ends.
"""

import contextlib
import gc
import io
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, cast

from gyre_daemon.datasets import formats
from gyre_daemon.datasets.sidecars.file import encode
from gyre_daemon.errors import CorruptSample, GyreError
from gyre_daemon.storage.local.listing import file_error

LENGTH = struct.Struct("<Q")
RANGE = struct.Struct("<QQ")
Kind = Literal["file", "stream"] | int  # a number is the size of a shard that is read by ranges
# What one process may allocate. The index of a shard of 10 million members takes 1 GiB while it is
# made. More would let one file take the memory of the machine.
_MAX_DATA_BYTES = 4 << 30
_SIGNALS_FOR_THE_DAEMON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(connection: socket.socket) -> NoReturn:
    """Fork a process for every descriptor that comes; end all when the daemon is gone."""
    os.setsid()  # a group of its own, which is killed at the end
    for number in _SIGNALS_FOR_THE_DAEMON:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a process that ends leaves no zombie
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("gyre-scan")
    gc.collect()
    gc.freeze()
    connection.sendall(b"\0")
    with contextlib.suppress(OSError):
        while descriptors := socket.recv_fds(connection, 1, 1)[1]:
            _fork(connection, descriptors[0])
    os.killpg(0, signal.SIGKILL)
    raise AssertionError


def _fork(connection: socket.socket, descriptor: int) -> None:
    own = socket.socket(fileno=descriptor)
    try:
        pid = os.fork()
    except OSError:
        pid = -1  # the daemon sees that its connection is closed
    if pid:
        own.close()
        return
    connection.close()
    status = 1
    try:
        with contextlib.suppress(ConnectionError):
            _answer(own)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _answer(connection: socket.socket) -> None:
    """Scan what is asked for until the daemon hangs up."""
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_DATA, (_MAX_DATA_BYTES, _MAX_DATA_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    myself = os.pidfd_open(os.getpid())
    socket.send_fds(connection, [b"\0"], [myself])
    os.close(myself)
    while True:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        if len(descriptors) < 2:
            return
        with os.fdopen(descriptors[1], "rb") as body:
            body.seek(0)
            run, name, kind = pickle.load(body)
        reply = _scan(run, name, descriptors[0], kind)
        connection.sendall(LENGTH.pack(len(reply)))
        connection.sendall(reply)


def _scan(run: Any, name: str, descriptor: int, kind: Kind) -> bytes:
    """The reply for one shard."""
    try:
        with _open(descriptor, kind) as file:
            return encode("", run(name, file))
    except GyreError as error:
        failure = error
    except OSError as error:
        failure = file_error(name, error)
    except MemoryError:
        reason = f"its index needs more than {_MAX_DATA_BYTES >> 30} GiB"
        failure = CorruptSample(f"shard {name}: {reason}", {"shard": name, "reason": reason})
    facts = {key: str(value)[:1000] for key, value in failure.facts.items()}
    return encode(json.dumps([type(failure).__name__, str(failure)[:10_000], facts]), {})


def _open(descriptor: int, kind: Kind) -> BinaryIO:
    if isinstance(kind, int):
        return cast("BinaryIO", _Ranges(descriptor, kind))
    return cast("BinaryIO", _Stream(descriptor)) if kind == "stream" else open(descriptor, "rb")


class _Stream(io.RawIOBase):
    """A stream as a file that is read once."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._socket.recv_into(buffer)
        self._position += count
        return count

    def close(self) -> None:
        self._socket.close()
        super().close()


class _Ranges(io.RawIOBase):
    """A shard of which the daemon sends the ranges that are asked for."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._num_bytes, self._position = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), max(0, self._num_bytes - self._position))
        if not count:
            return 0
        self._socket.sendall(RANGE.pack(self._position, count))
        view, done = memoryview(buffer).cast("B"), 0
        while done < count:
            received = self._socket.recv_into(view[done:count])
            if not received:
                raise ConnectionResetError("the daemon sends no more of it")
            done += received
        self._position += count
        return count

    def close(self) -> None:
        self._socket.close()
        super().close()


if __name__ == "__main__":
    assert formats.FORMATS  # imported before the first fork
    serve(socket.socket(fileno=int(sys.argv[1])))
