"""A scan of a shard as a compute worker does it.

A scan reads files that anybody may have written, in pure Python, for seconds or minutes. In another
process it takes no turn of the daemon's interpreter, all its memory is given back at its end, and
it can be killed at any time.

    request  a pickle of (function, name of the shard, kind), with the file's descriptor
    reply    an encoded file of `sidecars.file`: the key is "", or JSON of an error

The file is one that is open, or a socket: of a stream, or of a shard read by ranges.
Through the latter the process sends `RANGE`, first byte and length, and gets that many bytes.

Requests come from the daemon, so they may be pickles. Replies may come from a process that read
hostile bytes, so they are not.
"""

import io
import json
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import BinaryIO, Literal, cast

from gyre_daemon.datasets import known_formats
from gyre_daemon.datasets.sidecars.file import Arrays, encode
from gyre_daemon.errors import CorruptSample, GyreError
from gyre_daemon.runtime.positioned import PositionedFile
from gyre_daemon.storage.local.listing import file_error

RANGE = struct.Struct("<QQ")
Run = Callable[[str, BinaryIO], Arrays]
# A number is the size of a shard that is read by ranges, and so is the text of one, in windows.
Kind = Literal["file", "stream"] | int | str
# What one process may allocate. The index of a shard of 10 million members takes 1 GiB while it is
# made. More would let one file take the memory of the machine.
MAX_DATA_BYTES = 4 << 30
# The windows of a shard whose scan goes forward. The bytes between two headers are
# read and dropped up to a size that arrives in the time of one more request; twice as much would
# read most of a shard of images in vain, half as much ask for each of them.
_MIN_WINDOW_BYTES, _MAX_WINDOW_BYTES, _MAX_PASSED_BYTES = 64 << 10, 4 << 20, 1 << 20


class ShardScan:
    """See `workers.computing.Computation`."""

    @classmethod
    def preload(cls) -> None:
        """Have the formats imported."""
        assert known_formats.FORMATS

    def answer(self, body: memoryview, descriptors: Sequence[int]) -> bytes:
        """Scan one shard."""
        run, name, kind = pickle.loads(body)
        return reply_of(name, partial(_scan, run, name, descriptors[0], kind))


def reply_of(name: str, scan: Callable[[], Arrays]) -> bytes:
    """The reply for one shard: the scan's result, or why it fails."""
    try:
        return encode("", scan())
    except GyreError as error:
        failure = error
    except OSError as error:
        failure = file_error(name, error)
    except MemoryError:
        reason = f"its index needs more than {MAX_DATA_BYTES >> 30} GiB"
        failure = CorruptSample(f"shard {name}: {reason}", {"shard": name, "reason": reason})
    return failure_reply(failure)


def failure_reply(failure: GyreError) -> bytes:
    """The reply for a shard that was not scanned."""
    facts = {key: str(value)[:1000] for key, value in failure.facts.items()}
    return encode(json.dumps([type(failure).__name__, str(failure)[:10_000], facts]), {})


def _scan(run: Run, name: str, descriptor: int, kind: Kind) -> Arrays:
    with _open(descriptor, kind) as file:
        return run(name, file)


def _open(descriptor: int, kind: Kind) -> BinaryIO:
    if isinstance(kind, int):
        return cast("BinaryIO", _Ranges(descriptor, kind))
    if kind.isdigit():
        windows = cast("io.RawIOBase", _Windows(descriptor, int(kind)))
        return cast("BinaryIO", io.BufferedReader(windows, _MAX_WINDOW_BYTES))
    return cast("BinaryIO", _Stream(descriptor)) if kind == "stream" else open(descriptor, "rb")


class _Stream(io.RawIOBase):
    """A stream as a file to read once."""

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


class _Ranges(PositionedFile):
    """A shard of which the daemon sends the ranges that are asked for."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        super().__init__(num_bytes)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), max(0, self._num_bytes - self._position))
        if not count:
            return 0
        self._ask(self._position, count)
        self._receive(memoryview(buffer).cast("B")[:count])
        self._position += count
        return count

    def _ask(self, start: int, count: int) -> None:
        self._socket.sendall(RANGE.pack(start, count))

    def _receive(self, view: memoryview) -> None:
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionResetError("the daemon sends no more of it")
            view = view[received:]

    def close(self) -> None:
        self._socket.close()
        super().close()


class _Windows(_Ranges):
    """The same, for a scan that goes forward and passes over some of it.

    As long as one window follows the other they grow, and the next is asked for before this one is
    used. Behind a gap they begin small again.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        super().__init__(descriptor, num_bytes)
        self._end = 0  # of the last window
        self._size = _MIN_WINDOW_BYTES
        self._ahead: tuple[int, int] | None = None  # start and length of the range asked for early

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._position >= self._num_bytes:
            return 0
        follows = 0 <= self._position - self._end <= _MAX_PASSED_BYTES
        start = self._end if follows else self._position
        self._size = min(2 * self._size, _MAX_WINDOW_BYTES) if follows else _MIN_WINDOW_BYTES
        passed = self._position - start
        most = passed + len(buffer)
        start, count = self._window(start, min(passed + self._size, most), most)
        self._receive(memoryview(bytearray(min(passed, count))))
        num_bytes = max(0, count - passed)
        self._receive(memoryview(buffer).cast("B")[:num_bytes])
        self._end = start + count
        self._position = max(self._position, self._end)
        if follows and self._end < self._num_bytes:
            self._ahead = self._end, min(self._size, self._num_bytes - self._end)
            self._ask(*self._ahead)
        return num_bytes if num_bytes else self.readinto(buffer)

    def _window(self, start: int, count: int, max_count: int) -> tuple[int, int]:
        """Ask for a window, unless one was asked for that fits; its first byte and length."""
        ahead, self._ahead = self._ahead, None
        if ahead and ahead[0] == start and ahead[1] <= max_count:
            return ahead
        if ahead:
            self._receive(memoryview(bytearray(ahead[1])))
        window = start, min(count, self._num_bytes - start)
        self._ask(*window)
        return window
