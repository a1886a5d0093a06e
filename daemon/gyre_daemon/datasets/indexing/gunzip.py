"""Reads gzip strictly: data that is truncated, damaged or too large is an error."""

import zlib
from collections.abc import Generator, Iterator
from typing import BinaryIO

_READ_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
_GZIP = 31  # zlib's number for a gzip header and a window of 32 KiB
# What unpacks to more than both of these is refused as a bomb. Text shrinks to a tenth, and gzip
# can do a thousandth at most. A smaller factor would refuse archives of masks; at 1000 nothing
# would be refused.
_MAX_FACTOR = 500
_ALWAYS_ALLOWED_BYTES = 256 << 20


def gunzipped(source: BinaryIO) -> Iterator[bytes]:
    """The content of a gzip file, in pieces of at most 4 MiB; its members one after the other.

    Raises:
        ValueError: it is no gzip file, or damaged, truncated or a bomb; says which.
    """
    counts = _Counts()
    pending = source.read(_READ_BYTES)
    if not pending:
        raise ValueError("it is empty")
    while pending:
        pending = yield from _member(source, pending, counts)
        # Tapes and some tools pad the file with zeros.
        pending = (pending or source.read(_READ_BYTES)).lstrip(b"\0")


class _Counts:
    """The bytes that were read and that came out."""

    def __init__(self) -> None:
        self._num_read = self._num_unpacked = 0

    def add(self, num_read: int, num_unpacked: int) -> None:
        self._num_read += num_read
        self._num_unpacked += num_unpacked
        if self._num_unpacked > max(_ALWAYS_ALLOWED_BYTES, _MAX_FACTOR * self._num_read):
            raise ValueError(
                f"it unpacks to more than {_MAX_FACTOR} times its size: it is no archive of samples"
            )


def _member(source: BinaryIO, pending: bytes, counts: _Counts) -> Generator[bytes, None, bytes]:
    """Yield the content of one member; return the bytes behind it that were read already."""
    decoder = zlib.decompressobj(_GZIP)
    has_more = False  # the decoder may hold more output
    while not decoder.eof:
        if not pending and not has_more and not (pending := source.read(_READ_BYTES)):
            raise ValueError("it is truncated")
        try:
            piece = decoder.decompress(pending, _PIECE_BYTES)
        except zlib.error as error:
            raise ValueError(f"it is no sound gzip file: {error}") from error
        rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
        counts.add(len(pending) - len(rest), len(piece))
        pending = rest
        has_more = len(piece) == _PIECE_BYTES
        if piece:
            yield piece
    return pending
