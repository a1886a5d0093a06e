"""What a compute worker does with shards: scans them, checks their samples, and decodes chunks.

It reads files that anybody may have written, in pure Python, for seconds or minutes. In another
process that takes no turn of the daemon's interpreter, all memory is given back at its end, and it
can be killed at any time.

    request  a pickle of (function, name of the shard, kind, size), with the file's descriptor
    reply    an encoded file of `sidecars`: the key is "", or JSON of an error

The file is one that is open, or a socket: of a stream, or of a shard read by ranges. Through the
latter the process sends `RANGE`, first byte and length, and gets that many bytes.

Requests come from the daemon, so they may be pickles. Replies may come from a process that read
hostile bytes, so they are not.
"""

import io
import json
import mmap
import pickle
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import BinaryIO, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets import known_formats
from gyre_daemon.datasets.codecs import check_field, has_checks
from gyre_daemon.datasets.formats.base import FieldSpec, array_of, json_of
from gyre_daemon.datasets.formats.chunk_index import (
    DamagedPart,
    Decode,
    Expected,
    StoredChunk,
)
from gyre_daemon.datasets.sidecars import Arrays, encode
from gyre_daemon.errors import CorruptSample, GyreError
from gyre_daemon.storage.beneath import file_error
from gyre_daemon.storage.shard import PositionedFile

RANGE = struct.Struct("<QQ")
Run = Callable[[str, BinaryIO], Arrays]
# What the descriptor is: an open file, or a socket. Windows are ranges of a scan that goes forward.
Kind = Literal["file", "stream", "ranges", "windows"]
# What one process may allocate. The index of a shard of 10 million members takes 1 GiB while it is
# made. More would let one file take the memory of the machine.
MAX_DATA_BYTES = 4 << 30
# The windows of a shard whose scan goes forward. The bytes between two headers are
# read and dropped up to a size that arrives in the time of one more request; twice as much would
# read most of a shard of images in vain, half as much ask for each of them.
_MIN_WINDOW_BYTES, _MAX_WINDOW_BYTES, _MAX_PASSED_BYTES = 64 << 10, 4 << 20, 1 << 20
CheckMedia = Callable[[str, memoryview], str]  # see `transforms.recipes.check_media`
_MEDIA = ("image", "audio", "video")
_MAX_KINDS = 20  # of reasons why media were not decoded
_Integers = npt.NDArray[np.int64]
# Reasons kept of one shard: as JSON, at most 3.6 MB. Beyond it, only the numbers of damaged samples
# are.
_MAX_REASONS, _MAX_REASON_CHARS = 1000, 300
_REASONS = msgspec.json.Decoder(list[str])
_COUNTS = msgspec.json.Decoder(list[tuple[str, int]])
# Bytes read at once where samples are smaller. More would read the bytes between fields
# that are far apart; less costs a call for every few small samples.
_CHECKED_AT_ONCE_BYTES = 64 << 10


class ShardScan:
    """See `workers.compute_workers.Computation`."""

    @classmethod
    def preload(cls) -> None:
        """Have the formats imported."""
        assert all(known_formats.FORMATS.values())

    def answer(self, body: memoryview, descriptors: Sequence[int]) -> bytes:
        """Scan one shard; the reply tells why it fails."""
        run, name, kind, num_bytes = pickle.loads(body)
        failure: GyreError
        try:
            with _open(descriptors[0], kind, num_bytes) as file:
                return encode("", run(name, file))
        except GyreError as error:
            failure = error
        except OSError as error:
            failure = file_error(name, error)
        except MemoryError:
            reason = f"its index needs more than {MAX_DATA_BYTES >> 30} GiB"
            failure = CorruptSample(f"shard {name}: {reason}", {"shard": name, "reason": reason})
        facts = {key: str(value)[:1000] for key, value in failure.facts.items()}
        return encode(json.dumps([type(failure).__name__, str(failure)[:10_000], facts]), {})


def _open(descriptor: int, kind: Kind, num_bytes: int) -> BinaryIO:
    """The file; of a shard that is read by ranges, `num_bytes` is the size."""
    if kind == "file":
        return open(descriptor, "rb")
    if kind == "stream":
        return cast("BinaryIO", _Stream(descriptor))
    if kind == "ranges":
        return cast("BinaryIO", _Ranges(descriptor, num_bytes))
    windows = cast("io.RawIOBase", _Windows(descriptor, num_bytes))
    return cast("BinaryIO", io.BufferedReader(windows, _MAX_WINDOW_BYTES))


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


class Damage(Struct, frozen=True):
    """One damaged sample.

    Attributes:
        sample: its number in the shard, or its id in the dataset.
        offset: the byte of the shard at which it, or its damaged field, begins.
        reason: the problem.
    """

    sample: int
    offset: int
    reason: str


def to_arrays(damages: Sequence[Damage]) -> Arrays:
    """The damages as they are stored and sent between processes."""
    reasons = [each.reason[:_MAX_REASON_CHARS] for each in damages[:_MAX_REASONS]]
    return {
        "sample": np.array([each.sample for each in damages], np.int64),
        "offset": np.array([each.offset for each in damages], np.int64),
        "reasons": np.frombuffer(json.dumps(reasons).encode(), np.uint8),
    }


def from_arrays(arrays: Arrays, num_samples: int) -> list[Damage]:
    """The damages in a shard of `num_samples`, from arrays that may be forged.

    Raises:
        ValueError: they are no damages of such a shard.
    """
    samples, offsets = (array_of(arrays, name, np.int64) for name in ("sample", "offset"))
    if len(samples) != len(offsets) or (offsets < 0).any():
        raise ValueError("its list of damaged samples points outside the shard")
    if len(samples) and not (
        samples[0] >= 0 and samples[-1] < num_samples and (np.diff(samples) > 0).all()
    ):
        raise ValueError("its damaged samples are not those of the shard")
    reasons = json_of(arrays, "reasons", _REASONS, "its reasons cannot be read")
    reasons += ["damaged, as others of this shard"] * (len(samples) - len(reasons))
    return [
        Damage(*each) for each in zip(samples.tolist(), offsets.tolist(), reasons, strict=False)
    ]


class ShardFields(Struct, frozen=True):
    """The fields of n samples of one shard that can be checked.

    Attributes:
        specs: F fields.
        start: int64 [n, F], the first byte of each in the shard.
        size: int64 [n, F], stored bytes.
        reserved: int64 [n, F], the bytes that each takes in its tensor.
        skipped: bool [n, F], which are not there, or are known to be damaged.
        check_media: decodes images and sounds; None where their bytes are not looked at.
    """

    specs: tuple[FieldSpec, ...]
    start: _Integers
    size: _Integers
    reserved: _Integers
    skipped: npt.NDArray[np.bool_]
    check_media: CheckMedia | None = None

    def run(self, shard: str, file: BinaryIO) -> Arrays:
        """Check every field of every sample; returns arrays as `to_arrays`, with media.

        Raises:
            CorruptSample: the shard ends before its last sample.
        """
        reader = _ForwardReader(shard, file)
        found: dict[int, Damage] = {}
        media: Counter[str] = Counter()  # by why they were not decoded; empty for those that were
        order = np.argsort(self.start, axis=None, kind="stable")
        order = order[~self.skipped.ravel()[order]]
        columns = [each.ravel()[order].tolist() for each in (self.start, self.size, self.reserved)]
        for place, start, size, room in zip(order.tolist(), *columns, strict=True):
            sample, number = divmod(place, len(self.specs))
            spec = self.specs[number]
            if spec.media_type.startswith("video/"):
                media["video is not decoded here"] += 1
                continue
            try:
                if self.check_media and is_media(spec):
                    media[self.check_media(spec.media_type, reader.read(start, size))] += 1
                    continue
                check_field(spec, reader.read(start, size), room)
            except ValueError as error:
                found.setdefault(sample, Damage(sample, start, f"field {spec.name}: {error}"))
        arrays = to_arrays([found[sample] for sample in sorted(found)])
        kinds = media.most_common(_MAX_KINDS)
        return {**arrays, "media": np.frombuffer(json.dumps(kinds).encode(), np.uint8)}


def media_of(arrays: Arrays) -> dict[str, int]:
    """How many images and sounds were decoded, under "", and how many not, by the reason.

    Raises:
        ValueError: the arrays are not those of a check.
    """
    counts = json_of(arrays, "media", _COUNTS, "its counts of media cannot be read")
    return dict(counts)


class _ForwardReader:
    """Reads ranges of a file whose starts rise; the file may be a stream."""

    def __init__(self, shard: str, file: BinaryIO) -> None:
        self._shard = shard
        self._file = file
        self._can_seek = file.seekable()
        self._base = 0  # where the kept bytes begin
        self._kept = bytearray()

    def read(self, start: int, size: int) -> memoryview:
        """The bytes `[start, start + size)`; no earlier byte can be read after this.

        Raises:
            CorruptSample: the file ends before.
        """
        end = self._base + len(self._kept)
        if start > end and self._can_seek:
            self._file.seek(start)
            self._base, self._kept = start, bytearray()
        while (end := self._base + len(self._kept)) < start + size:
            if end <= start:
                self._base, self._kept = end, bytearray()
            piece = self._file.read(max(_CHECKED_AT_ONCE_BYTES, min(start + size - end, 16 << 20)))
            if not piece:
                raise CorruptSample(
                    f"shard {self._shard} ends at byte {end}, before the end of a sample",
                    {"shard": self._shard, "offset": end, "reason": "it ends inside a sample"},
                )
            self._kept += piece
        first = start - self._base
        data = memoryview(bytes(self._kept[first : first + size]))
        if first > _CHECKED_AT_ONCE_BYTES:
            del self._kept[:first]
            self._base = start
        return data


def is_media(spec: FieldSpec) -> bool:
    """Whether a field has encoded images, sounds or videos."""
    return spec.codec == "bytes" and spec.media_type.partition("/")[0] in _MEDIA


def checkable(specs: Sequence[FieldSpec], *, with_media: bool) -> list[int]:
    """The numbers of the stored fields whose bytes can be wrong."""
    return [
        number
        for number, spec in enumerate(specs)
        if has_checks(spec) or (with_media and is_media(spec))
    ]


class DecodeRequest(Struct, frozen=True):
    """One chunk to be decoded; called with the shard's name and the memory file, as a `Scan.run`.

    Attributes:
        decode: the format's.
        noun: the format's name for a chunk.
        number: of the chunk in its shard.
        shard_bytes: the size of the shard.
        parameters: numbers of its scan that the decoder needs.
        pieces: bytes `[start, stop)` of the shard, back to back at the beginning of the file.
        expected: the size and checksums of each field.
        target: where the decoded chunk goes in the file.
        file_bytes: the size of the file.
    """

    decode: Decode
    noun: str
    number: int
    shard_bytes: int
    parameters: tuple[int, ...]
    pieces: Sequence[tuple[int, int]]
    expected: Sequence[Expected]
    target: int
    file_bytes: int

    def __call__(self, shard: str, file: BinaryIO) -> Arrays:
        """Write the decoded chunk.

        Raises:
            CorruptSample: it cannot be decoded, or has changed since it was indexed.
        """
        memory = memoryview(mmap.mmap(file.fileno(), self.file_bytes))
        pieces, begin = [], 0
        for start, stop in self.pieces:
            end = begin + stop - start
            pieces.append((start, memory[begin:end].toreadonly()))
            begin = end
        try:
            columns = self.decode(
                StoredChunk(shard, self.number, self.shard_bytes, pieces, self.parameters)
            )
        except CorruptSample:
            raise
        except DamagedPart as error:
            raise self._corrupt(shard, str(error), error.offset) from error
        except MemoryError as error:
            raise self._corrupt(shard, "it needs too much memory") from error
        except Exception as error:
            raise self._corrupt(shard, f"it cannot be decoded: {error!s:.500}") from error
        if [Expected.of(column) for column in columns] != list(self.expected):
            raise self._corrupt(shard, "its rows are not those that were indexed")
        begin = self.target
        for column in columns:
            end = begin + column.data.nbytes
            np.frombuffer(memory[begin:end], np.uint8)[:] = column.data
            begin = end
        return {}

    def _corrupt(self, shard: str, reason: str, offset: int | None = None) -> CorruptSample:
        offset = self.pieces[-1][0] if offset is None else offset
        return CorruptSample(
            f"{self.noun} {self.number} of shard {shard} (at byte {offset}): {reason}",
            {"shard": shard, "chunk": self.number, "offset": offset, "reason": reason},
        )
