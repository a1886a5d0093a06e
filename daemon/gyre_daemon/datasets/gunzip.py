"""Reading gzip strictly: what is truncated, damaged, or larger than data can be is an error."""

import zlib
from collections.abc import Generator, Iterator
from typing import BinaryIO

_READ_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
_GZIP = 31  # zlib's number for a gzip header and 32 KiB of window
# Text shrinks to a tenth, long runs of one value to a thousandth, which is the most that gzip can do. What is beyond
# these two is taken for a bomb: a smaller factor would refuse archives of masks, a larger one would refuse nothing.
_MAX_FACTOR = 500
_ALWAYS_ALLOWED_BYTES = 256 << 20


def gunzipped(source: BinaryIO) -> Iterator[bytes]:
    """The content of a gzip file, in pieces of 4 MiB at most; of one that has several members, theirs one after another.

    Raises:
        ValueError: it is no gzip file, damaged, truncated, or a bomb; says which.
    """
    counts = _Counts()
    pending = source.read(_READ_BYTES)
    if not pending:
        raise ValueError("it is empty")
    while pending:
        pending = yield from _member(source, pending, counts)
        pending = (pending or source.read(_READ_BYTES)).lstrip(b"\0")  # tapes and some tools fill up with zeros


class _Counts:
    """How much went in and came out."""

    def __init__(self) -> None:
        self._read = self._made = 0

    def read(self, num_bytes: int) -> None:
        self._read += num_bytes

    def made(self, num_bytes: int) -> None:
        self._made += num_bytes
        if self._made > max(_ALWAYS_ALLOWED_BYTES, _MAX_FACTOR * self._read):
            raise ValueError(f"it unpacks to more than {_MAX_FACTOR} times its size: that is no archive of samples")


def _member(source: BinaryIO, pending: bytes, counts: _Counts) -> Generator[bytes, None, bytes]:
    """One member; gives the bytes behind it."""
    decoder = zlib.decompressobj(_GZIP)
    is_more_at_hand = False
    while not decoder.eof:
        if not pending and not is_more_at_hand and not (pending := source.read(_READ_BYTES)):
            raise ValueError("it is truncated")
        try:
            piece = decoder.decompress(pending, _PIECE_BYTES)
        except zlib.error as error:
            raise ValueError(f"it is no sound gzip file: {error}") from error
        rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
        counts.read(len(pending) - len(rest))
        pending = rest
        counts.made(len(piece))
        is_more_at_hand = len(piece) == _PIECE_BYTES
        if piece:
            yield piece
    return pending
