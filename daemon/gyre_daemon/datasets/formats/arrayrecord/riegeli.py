"""The frame of ArrayRecord files: Riegeli's blocks, chunks and hashes. Pure.

By Riegeli's `doc/riegeli_records_file_format.md` and ArrayRecord's `cpp/layout.proto`. A file is
chunks one after the other, and a block header interrupts them at every 64 KiB. An ArrayRecord file
ends with a chunk that has the offsets of all others (its footer), and a block with the offset of
the footer. All numbers are little-endian.
"""

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 1 << 16
SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9"
    "0000000000000000e19f13c0e9b1c37273000000000000000000000000000000"
)
# A file that Gyre makes names at most this many chunks, so that its footer fits into one block.
MAX_CHUNKS = 2000
_BLOCK_HEADER, _CHUNK_HEADER = struct.Struct("<QQ"), struct.Struct("<QQQQ")
_HASH = struct.Struct("<Q")
_BLOCK_HEADER_BYTES = _HASH.size + _BLOCK_HEADER.size
_CHUNK_HEADER_BYTES = _HASH.size + _CHUNK_HEADER.size
_USABLE_BYTES = BLOCK_BYTES - _BLOCK_HEADER_BYTES
# The most that a chunk header may take: a block header interrupts it once.
_HEAD_BYTES = _CHUNK_HEADER_BYTES + _BLOCK_HEADER_BYTES
_RECORDS, _NO_COMPRESSION = ord("r"), b"\0"
VERSION, MAGIC = 1, 0x71930E704FDAE05E

_KEY = np.frombuffer(b"Riegeli/records\nRiegeli/records\n", "<u8")
_MUL0 = np.array(
    [0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3], np.uint64
)
_MUL1 = np.array(
    [0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377], np.uint64
)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
# How HighwayHash mixes the bytes of two lanes; then the same for the other two.
_ZIPPER = np.array([3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7])
_ZIPPER = np.concatenate((_ZIPPER, _ZIPPER + 16))
_PACKET_BYTES = 32

_Lanes = npt.NDArray[np.uint64]


class Chunk(NamedTuple):
    """A chunk of a file.

    Attributes:
        start: its first byte.
        stop: its end.
        num_records: in it.
        decoded_bytes: of all its records.
    """

    start: int
    stop: int
    num_records: int
    decoded_bytes: int


# Most hashes are of the few headers that small files can have.
@functools.lru_cache(maxsize=1024)
def hash_of(data: bytes) -> int:
    """HighwayHash of 64 bits with Riegeli's key; takes 20 µs for every 32 bytes."""
    state = _Hash()
    whole = len(data) // _PACKET_BYTES * _PACKET_BYTES
    for begin in range(0, whole, _PACKET_BYTES):
        state.update(np.frombuffer(data, "<u8", 4, begin))
    if whole < len(data):
        state.update_rest(data[whole:])
    return state.finish()


class _Hash:
    """The state of HighwayHash: four vectors of four lanes."""

    def __init__(self) -> None:
        self._mul0, self._mul1 = _MUL0.copy(), _MUL1.copy()
        self._v0, self._v1 = _MUL0 ^ _KEY, _MUL1 ^ _swapped(_KEY)

    def update(self, lanes: _Lanes) -> None:
        self._v1 += self._mul0 + lanes
        self._mul0 ^= (self._v1 & _LOW) * (self._v0 >> _HALF)
        self._v0 += self._mul1
        self._mul1 ^= (self._v0 & _LOW) * (self._v1 >> _HALF)
        self._v0 += self._v1.view(np.uint8)[_ZIPPER].view(np.uint64)
        self._v1 += self._v0.view(np.uint8)[_ZIPPER].view(np.uint64)

    def update_rest(self, rest: bytes) -> None:
        """Take the last 1 to 31 bytes."""
        count = len(rest)
        self._v0 += np.uint64((count << 32) + count)
        halves = self._v1.view(np.uint32)
        halves[:] = halves << np.uint32(count) | halves >> np.uint32(32 - count)
        packet, quads = bytearray(_PACKET_BYTES), count & ~3
        packet[:quads], tail = rest[:quads], rest[quads:]
        if count & 16:
            packet[28:] = rest[-4:]
        elif tail:
            packet[16:19] = bytes((tail[0], tail[len(tail) >> 1], tail[-1]))
        self.update(np.frombuffer(packet, "<u8"))

    def finish(self) -> int:
        for _ in range(4):
            self.update(_swapped(self._v0[[2, 3, 0, 1]]))
        lanes = (each[:1] for each in (self._v0, self._v1, self._mul0, self._mul1))
        return int(np.concatenate(list(lanes)).sum())


def _swapped(lanes: _Lanes) -> _Lanes:
    return lanes << _HALF | lanes >> _HALF


def chunks_of(data: memoryview, start: int) -> Iterator[Chunk]:
    """All chunks with records of a part of a file, by their headers, whose hashes are not compared.

    Args:
        data: whole chunks.
        start: where they begin in the file.

    Raises:
        ValueError: a chunk does not end within the data; says at which byte it begins.
    """
    position, end = start, start + len(data)
    while position < end:
        head = _without_block_headers(
            bytes(data[position - start : position - start + _HEAD_BYTES]), position
        )
        if len(head) < _CHUNK_HEADER_BYTES:
            raise ValueError(f"the chunk at byte {position} is cut off")
        chunk = _chunk_of(head, position)
        if chunk.stop > end:
            raise ValueError(f"the chunk at byte {position} does not end where it should")
        if chunk.num_records:
            yield chunk
        position = chunk.stop


def _chunk_of(head: bytes, start: int) -> Chunk:
    data_bytes, _, kind, decoded_bytes = _CHUNK_HEADER.unpack_from(head, _HASH.size)
    num_records = kind >> 8
    stop = _with_block_headers(start, _CHUNK_HEADER_BYTES + data_bytes)
    # each record has a distinct position, and a chunk ends neither in a block header nor after it
    least = start + num_records
    stop = max(stop, least + max(-least % BLOCK_BYTES - _USABLE_BYTES + 1, 0))
    return Chunk(start, stop, num_records, decoded_bytes)


def _with_block_headers(start: int, num_bytes: int) -> int:
    """The end of this many bytes, block headers between them included."""
    headers = (num_bytes + (start + _USABLE_BYTES - 1) % BLOCK_BYTES) // _USABLE_BYTES
    return start + num_bytes + headers * _BLOCK_HEADER_BYTES


def _without_block_headers(data: bytes, start: int) -> bytes:
    """The bytes of a chunk without block headers; `data` has at most one."""
    border = -start % BLOCK_BYTES
    return data[:border] + data[border + _BLOCK_HEADER_BYTES :]


def footer_and_postscript(chunks: Sequence[Chunk], stop: int) -> tuple[int, bytes, bytes]:
    """The end that makes an ArrayRecord file of a part of one.

    Args:
        chunks: at most `MAX_CHUNKS` of them, at their places in the new file.
        stop: the end of the last one.

    Returns:
        Where the footer begins; the footer; and the last block of the file, which begins
        `BLOCK_BYTES` behind the footer.
    """
    begin = stop + -stop % BLOCK_BYTES
    total = sum(chunk.num_records for chunk in chunks)
    counts = _message((1, VERSION), (2, len(chunks)), (3, total))
    entries = [
        _message((1, chunk.start), (2, chunk.decoded_bytes), (3, chunk.num_records))
        for chunk in chunks
    ]
    footer = _block([b"\x0a" + _varint(len(counts)) + counts, *entries])
    place = _message((1, begin), (2, MAGIC))
    return begin, footer, _block([place]).ljust(BLOCK_BYTES, b"\0")


def _block(records: Sequence[bytes]) -> bytes:
    """A chunk with records, not compressed, at the beginning of a block that it does not leave."""
    sizes = b"".join(_varint(len(record)) for record in records)
    values = b"".join(records)
    data = _NO_COMPRESSION + _varint(len(sizes)) + sizes + values
    kind = _RECORDS | len(records) << 8
    header = _CHUNK_HEADER.pack(len(data), hash_of(data), kind, len(values))
    chunk = _HASH.pack(hash_of(header)) + header + data
    its_end = max(_BLOCK_HEADER_BYTES + len(chunk), len(records))
    around = _BLOCK_HEADER.pack(0, its_end)
    return _HASH.pack(hash_of(around)) + around + chunk


def _message(*fields: tuple[int, int]) -> bytes:
    """A message of protocol buffers with numbers."""
    return b"".join(_varint(number << 3) + _varint(value) for number, value in fields)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    data.append(value)
    return bytes(data)


def numbers_of(message: bytes) -> dict[int, int]:
    """The numbers of a message of protocol buffers, by their tags; other fields are left out.

    Raises:
        ValueError: it is no such message.
    """
    numbers, position = {}, 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        value, position = _read_varint(message, position)
        if tag & 7 == 0:
            numbers[tag >> 3] = value
        elif tag & 7 == 2:
            position += value
        else:
            raise ValueError("it is no message of an ArrayRecord file")
    return numbers


def inner_message(message: bytes) -> bytes:
    """The first field of a message if it is a message, too; else empty.

    Raises:
        ValueError: it is no such message.
    """
    if message[:1] != b"\x0a":
        return b""
    size, position = _read_varint(message, 1)
    return message[position : position + size]


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(message) or shift > 63:
            raise ValueError("it is no message of an ArrayRecord file")
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
