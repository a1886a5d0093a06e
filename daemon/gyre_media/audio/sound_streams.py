"""Whether a sound file is whole, and where the streams in it begin.

libsndfile believes a header about how much sound follows. A header can be wrong: a recorder that
was stopped leaves 0 in it, a pipe the largest number, and MP3 has only an estimate. A file can also
be cut, or be several files joined by `cat`. Then libsndfile decodes less than there is and raises
nothing, so the structure of the common containers is read here first. Pure.
"""

import bisect
import functools
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

Bytes = bytes | bytearray | memoryview

_ID3, _ID3_HEAD = b"ID3", 10
# Sizes from here to the largest number stand for "until the end" in headers that programs write to
# pipes: ffmpeg writes 0xFFFFFFFF, and SoX 0x7FFFF000.
_UNKNOWN_32 = 0x7FFF_F000
_W64_DATA = b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a"
_CHUNK_NAME = re.compile(rb"[A-Za-z0-9 _()]{4}")
_FLAC = re.compile(rb"fLaC[\0\x80]\0\0\x22")  # the marker, and the header of STREAMINFO
# Where STREAMINFO has the number of samples, in the last 36 bits; 0 if it is not known.
_FLAC_LENGTH, _FLAC_LARGEST = range(21, 26), (1 << 36) - 1
_OGG_FIRST, _OGG_LAST = 2, 4  # flags of a page: the first one of a stream, the last one
_MPEG_KBITS = {  # by version 1 or not, and layer; index 0 is no fixed rate, and 15 is invalid
    (True, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MPEG_HZ = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8000)}
_MPEG_TAG = re.compile(rb"Xing|Info|VBRI")
_MPEG_SYNC_OR_ID3 = re.compile(rb"\xff[\xe2-\xff]|ID3")
# Some encoders count the frame with the tag, and some do not count the last one. A decoder may
# leave out frames at the beginning whose sound depends on absent frames.
_MPEG_SLACK = 2


@dataclass(frozen=True, slots=True)
class Stream:
    """A part of a file that libsndfile decodes whole.

    Attributes:
        data: its bytes.
        least: the samples that it has at least, and
        most: at most, where libsndfile does not know their number; 0 where it does, or none is.
    """

    data: Bytes
    least: int = 0
    most: int = 0


def streams_of(data: Bytes) -> list[Stream]:
    """Cut a file into streams; nearly always there is one.

    Files of unknown kinds are returned as they are. A header that does not say how
    much sound follows is mended in a copy.

    Raises:
        ValueError: the file is cut, or has more in it than its header says.
    """
    begin = 0
    while bytes(data[begin : begin + 3]) == _ID3 and begin + _ID3_HEAD < len(data):
        begin = _id3_end(data, begin)  # before sound of any kind
    data = memoryview(data)[begin:] if begin else data
    magic = bytes(data[:4])
    if magic in _CHUNKED:
        return [Stream(_chunked(data, _CHUNKED[magic]))]
    if magic in _STREAMED:
        return _STREAMED[magic](data)
    return _mpeg(data) if begin or magic[:1] == b"\xff" else [Stream(data)]


@dataclass(frozen=True)
class _Chunked:
    """A container of chunks, each with a name and a size.

    Attributes:
        first: where the first chunk begins.
        name_bytes: of the name of a chunk.
        size: of a chunk, as `struct` reads it.
        counts_header: whether the size includes name and size.
        align: chunks begin at multiples of this, counted from the beginning of the file.
        sound: the name of the chunk with the sound.
    """

    first: int
    name_bytes: int
    size: struct.Struct
    counts_header: bool
    align: int
    sound: bytes

    @property
    def unknown(self) -> int:
        """Sizes from here on mean an unknown size; see `_UNKNOWN_32`."""
        return _UNKNOWN_32 if self.size.size == 4 else 1 << 62


_CHUNKED: Mapping[bytes, _Chunked] = {
    b"RIFF": _Chunked(12, 4, struct.Struct("<I"), False, 2, b"data"),
    b"RIFX": _Chunked(12, 4, struct.Struct(">I"), False, 2, b"data"),
    b"RF64": _Chunked(12, 4, struct.Struct("<I"), False, 2, b"data"),
    b"FORM": _Chunked(12, 4, struct.Struct(">I"), False, 2, b"SSND"),
    b"riff": _Chunked(40, 16, struct.Struct("<Q"), True, 8, _W64_DATA),
    b"caff": _Chunked(8, 4, struct.Struct(">Q"), False, 1, b"data"),
}


def _chunked(data: Bytes, kind: _Chunked) -> Bytes:
    """The file, with a size in its header that reaches its end where it had none."""
    at, sound_at, in_ds64 = kind.first, -1, 0
    for name, name_at, begin, size in _chunks(data, kind):
        at = _next_chunk(data, begin + size, kind)
        if name == b"ds64" and size >= 16:
            (in_ds64,) = struct.unpack_from("<Q", data, begin + 8)
        if name != kind.sound:
            continue
        if sound_at >= 0:
            raise ValueError("it has several chunks of sound; write them as one, with ffmpeg say")
        sound_at = name_at
        if in_ds64 and size >= kind.unknown:
            size = in_ds64  # noqa: PLW2901
        if size >= kind.unknown or (size == 0 and not _is_rest(data, begin, kind)):
            return _until_end(data, name_at + kind.name_bytes, kind, begin)
        if begin + size > len(data):
            raise ValueError(
                f"it is cut: its header says {size} bytes of sound, and {len(data) - begin} are "
                "there"
            )
        at = _next_chunk(data, begin + size, kind)
    if sound_at >= 0 and bytes(data[at:]).strip(b"\0"):
        raise ValueError(
            f"after its sound, at byte {at}, are {len(data) - at} bytes that are no part of it; if "
            "they are more sound, write one file of it, with ffmpeg say"
        )
    return data


def _chunks(data: Bytes, kind: _Chunked) -> Iterator[tuple[bytes, int, int, int]]:
    """The name of each chunk, where it and its contents begin, and the size of these."""
    at, head = kind.first, kind.name_bytes + kind.size.size
    while at + head <= len(data):
        name = bytes(data[at : at + kind.name_bytes])
        (size,) = kind.size.unpack_from(data, at + kind.name_bytes)
        size -= head if kind.counts_header else 0
        if size < 0 or not _CHUNK_NAME.match(name) or name[:4] in _CHUNKED:
            return
        yield name, at, at + head, size
        at = _next_chunk(data, at + head + size, kind)


def _is_rest(data: Bytes, at: int, kind: _Chunked) -> bool:
    """Whether nothing but whole chunks follows."""
    for _, _, begin, size in _chunks(data, replace(kind, first=at)):
        at = _next_chunk(data, begin + size, kind)
    return at >= len(data)


def _next_chunk(data: Bytes, end: int, kind: _Chunked) -> int:
    """Where the chunk after one begins: some programs leave the padding out."""
    padded = end + -end % kind.align
    return end if bytes(data[end:padded]).strip(b"\0") else padded


def _until_end(data: Bytes, size_at: int, kind: _Chunked, begin: int) -> bytearray:
    """A copy whose chunk of sound reaches the end of the file."""
    mended = bytearray(data)
    size = len(data) - begin + (begin - size_at + kind.name_bytes if kind.counts_header else 0)
    kind.size.pack_into(mended, size_at, size)
    if mended[:4] == b"RF64":  # whose ds64 would be believed
        mended[:4] = b"RIFF"
    return mended


def _au(data: Bytes) -> list[Stream]:
    if len(data) >= 12:
        begin, size = struct.unpack_from(">II", data, 4)
        if size < _UNKNOWN_32 and begin + size != len(data):
            raise ValueError(
                f"its header says {size} bytes of sound, and {max(0, len(data) - begin)} are there"
            )
    return [Stream(data)]


def _flac(data: Bytes) -> list[Stream]:
    """Streams without the length in their headers: libsndfile reads no more than that."""
    begins = [0, *(each.start() for each in _FLAC.finditer(data, 4))]
    return [_without_length(stream.data) for stream in _cut(data, begins)]


def _without_length(data: Bytes) -> Stream:
    """The stream of FLAC, and its length as the least that it has."""
    if not _FLAC.match(data) or len(data) < _FLAC_LENGTH.stop:
        return Stream(data)
    mended = bytearray(data)
    length = int.from_bytes(mended[_FLAC_LENGTH.start : _FLAC_LENGTH.stop], "big") & _FLAC_LARGEST
    mended[_FLAC_LENGTH.start] &= 0xF0
    mended[_FLAC_LENGTH.start + 1 : _FLAC_LENGTH.stop] = bytes(4)
    return Stream(mended, length)


def _ogg(data: Bytes) -> list[Stream]:
    """The links of a chain; each begins at a stream's first page, unless another precedes it."""
    at, begins, was_first, last = 0, list[int](), False, 0
    while at < len(data):
        if bytes(data[at : at + 4]) != b"OggS":
            if bytes(data[at:]).strip(b"\0"):
                raise ValueError(f"it has no page at byte {at}, where one should begin")
            break
        if at + 27 > len(data) or at + 27 + data[at + 26] > len(data):
            raise ValueError(f"it is cut: its last page, at byte {at}, is not whole")
        last = data[at + 5]
        is_first = bool(last & _OGG_FIRST)
        if is_first and not was_first:
            begins.append(at)
        was_first = is_first
        num_segments = data[at + 26]
        at += 27 + num_segments + sum(data[at + 27 : at + 27 + num_segments])
    if at > len(data):
        raise ValueError("it is cut: its last page is not whole")
    if not last & _OGG_LAST:
        raise ValueError("it is cut: it ends before the last page of its stream")
    return _cut(data, begins)


def _cut(data: Bytes, begins: list[int]) -> list[Stream]:
    view = memoryview(data)
    return [Stream(view[at:end]) for at, end in zip(begins, [*begins[1:], len(data)], strict=True)]


@dataclass
class _Mpeg:
    """Frames of MPEG audio that follow each other.

    Attributes:
        at: where the first of them begins.
        second: where the second one begins.
        num_frames: how many there are, without one for a tag alone.
        tagged: how many a tag says; -1 if it does not say; None without one.
        end: the byte after the last.
    """

    at: int
    second: int
    num_frames: int
    tagged: int | None
    end: int


def _mpeg(data: Bytes) -> list[Stream]:
    """A tag begins a stream, and the frames before the first tag are one."""
    found: list[_Mpeg] = []
    tags = [each.start() for each in _MPEG_TAG.finditer(data)]
    for frames in _mpeg_runs(data):
        first = 0
        for tag_at in tags:
            number = bisect.bisect(frames, tag_at) - 1
            if 0 <= number < len(frames) - 1:
                tagged = _tagged(data, frames[number], tag_at)
                if tagged is not None:
                    _add(found, frames[first : number + 1])
                    second = frames[number + 1]
                    found.append(_Mpeg(frames[number], second, 0, tagged, second))
                    first = number + 1
        _add(found, frames[first:])
    return [_mpeg_stream(memoryview(data), each) for each in found] or [Stream(data)]


def _add(found: list[_Mpeg], frames: Sequence[int]) -> None:
    """Add frames to the last stream; `frames` are where they begin, and where the last one ends."""
    if len(frames) < 2:
        return
    if not found:
        found.append(_Mpeg(frames[0], frames[1], 0, None, 0))
    found[-1].num_frames += len(frames) - 1
    found[-1].end = frames[-1]


def _mpeg_stream(data: memoryview, frames: _Mpeg) -> Stream:
    """The frames, with their tag if that says how many there are.

    libsndfile reads as many as the tag says. Without one it estimates from the first frame and the
    size of the file, and reads no more than that: silent frames at the end let it read all.
    """
    begin, tagged = frames.at, frames.tagged
    if tagged is not None:
        num_missing = tagged - frames.num_frames if tagged >= 0 else -_MPEG_SLACK
        is_cut = num_missing > 0 and bool(_frame_bytes(data, frames.end))
        if is_cut or num_missing > _MPEG_SLACK:
            raise ValueError(
                f"it is cut: its header says {tagged} frames, and {frames.num_frames} are there"
            )
        if num_missing in (0, -1):
            return Stream(data[begin : frames.end])
        begin = frames.second
    stream: Bytes = data[begin : frames.end]
    num_bytes, num_samples = _frame_bytes(stream, 0), _frame_samples(stream)
    num_silent = frames.num_frames + 2 - len(stream) // max(1, num_bytes)
    if num_bytes and num_silent > 2:
        silent = bytes((stream[0], stream[1] | 1, *stream[2:4])) + bytes(num_bytes - 4)
        stream = bytes(stream) + num_silent * silent
    least = max(1, (frames.num_frames - _MPEG_SLACK) * num_samples)
    return Stream(stream, least, frames.num_frames * num_samples)


def _mpeg_runs(data: Bytes) -> Iterator[list[int]]:
    """Frames that follow each other: where each begins, and where the last one ends.

    Tags between runs, such as ID3 and APE, are passed over.
    """
    at, end, bytes_of = 0, len(data), _bytes_by_header
    while at + 4 <= end:
        if _goes_on(data, at):
            frames = [at]
            while at + 4 <= end and data[at] == 0xFF:
                num_bytes = bytes_of(data[at + 1], data[at + 2])
                if not num_bytes or at + num_bytes > end:
                    break
                at += num_bytes
                frames.append(at)
            yield frames
        if bytes(data[at : at + 3]) == _ID3 and at + _ID3_HEAD <= end:
            at = _id3_end(data, at)
            continue
        sync = _MPEG_SYNC_OR_ID3.search(data, at + 1)
        if not sync:
            return
        at = sync.start()


def _goes_on(data: Bytes, at: int) -> bool:
    """Whether two more frames follow one, or the end: its header may be found by chance."""
    for _ in range(3):
        num_bytes = _frame_bytes(data, at)
        if not num_bytes:
            return False
        at += num_bytes
        if at >= len(data):
            return True
    return True


def _id3_end(data: Bytes, at: int) -> int:
    """The byte after a tag in the form ID3v2; its size has seven bits in each byte."""
    high, third, second, low = data[at + 6 : at + _ID3_HEAD]
    return at + _ID3_HEAD + (high << 21) + (third << 14) + (second << 7) + low


def _frame_bytes(data: Bytes, at: int) -> int:
    """How long a frame is; 0 if none begins here."""
    if at + 4 > len(data) or data[at] != 0xFF:
        return 0
    return _bytes_by_header(data[at + 1], data[at + 2])


@functools.cache  # there are 65,536
def _bytes_by_header(second: int, third: int) -> int:
    version, layer = second >> 3 & 3, 4 - (second >> 1 & 3)
    rate, speed = third >> 2 & 3, third >> 4
    if second < 0xE0 or version == 1 or layer == 4 or rate == 3 or not 0 < speed < 15:
        return 0
    bits = 1000 * _MPEG_KBITS[version == 3, layer][speed]
    hertz, padding = _MPEG_HZ[version][rate], third >> 1 & 1
    if layer == 1:
        return (12 * bits // hertz + padding) * 4
    return (72 if layer == 3 and version != 3 else 144) * bits // hertz + padding


def _frame_samples(frame: Bytes) -> int:
    """How many samples a frame has; 0 for other bytes."""
    if len(frame) < 4:
        return 0
    is_first, layer = frame[1] >> 3 & 3 == 3, 4 - (frame[1] >> 1 & 3)
    return 384 if layer == 1 else 576 if layer == 3 and not is_first else 1152


def _tagged(data: Bytes, at: int, tag_at: int) -> int | None:
    """The number of frames in a frame's tag, -1 for a tag without it; None for other bytes.

    Args:
        data: the file.
        at: where the frame begins.
        tag_at: where the name of the tag is.
    """
    tag = bytes(data[tag_at : tag_at + 18])
    if len(tag) < 18:
        return None
    if tag[:4] == b"VBRI":
        return int.from_bytes(tag[14:18], "big") if tag_at == at + 36 else None
    # after the side information of a silent frame
    is_mono, checksum_bytes = data[at + 3] >> 6 == 3, 0 if data[at + 1] & 1 else 2
    places = (21, 36) if data[at + 1] >> 3 & 3 == 3 else (13, 21)
    if tag_at != at + places[not is_mono] + checksum_bytes:
        return None
    return int.from_bytes(tag[8:12], "big") if tag[7] & 1 else -1


_STREAMED: Mapping[bytes, Callable[[Bytes], list[Stream]]] = {
    b".snd": _au,
    b"fLaC": _flac,
    b"OggS": _ogg,
}
