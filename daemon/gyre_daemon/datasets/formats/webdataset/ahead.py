"""Predicts the bytes that the scan of a tar shard will read, from Energon's index of it. Pure.

`NAME.tar.idx` has the offset of the first header of every sample and, at last, where the archive
ends: numbers of 64 bits, little-endian. So the headers of all samples can be read at once, and not
one after the other. Nothing else is taken from it: the scan reads the shard as it always does.
"""

import itertools
import tarfile
from collections.abc import Generator, Sequence

import numpy as np

SUFFIX = ".tar.idx"
# Bytes to read at the beginning of each sample, and the most that a scan may want of a member: a
# number, or the header of an array. Less would take more rounds, more only memory.
_READ_BYTES, _MEMBER_BYTES = 4096, 1024
# The archive's end is blocks of zeros, which `tar` writes up to 10 KiB.
_END_BYTES = 32 << 10
# Requests cost more than bytes: with smaller samples, four shards at once are read as fast from
# their beginning to their end (measured with 20 ms to the first byte: equal at 256 KiB, 1.4 times
# as fast at 1 MiB, 3 times at 4 MiB).
_MIN_SAMPLE_BYTES = 256 << 10
_MAX_READ_BYTES = 128 << 20  # of one shard, kept in memory until it is scanned
_EXTENDED = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)

Ranges = Sequence[tuple[int, int]]


def headers_ahead(index: bytes, shard_bytes: int) -> Generator[Ranges, Sequence[bytes], None]:
    """Yields the ranges to read next, all at once, and is sent their bytes.

    Args:
        index: the bytes of the file next to the shard.
        shard_bytes: the size of the shard.

    Raises:
        ValueError: the index is not that of the shard.
    """
    bounds = _bounds(index, shard_bytes)
    num_samples = len(bounds) - 1
    if num_samples * _MIN_SAMPLE_BYTES > shard_bytes:
        return
    if num_samples * _READ_BYTES > _MAX_READ_BYTES:
        return
    places = list(itertools.pairwise(bounds))
    extra = [(0, min(_READ_BYTES, shard_bytes))] if bounds[0] else []
    extra.append((max(0, bounds[-1] - 1), min(bounds[-1] + _END_BYTES, shard_bytes)))
    while places:
        wanted = [(max(0, at - 1), min(at + _READ_BYTES, shard_bytes)) for at, _ in places]
        pieces = yield [*wanted, *extra]
        if extra and any(pieces[-1][bounds[-1] > 0 :]):
            raise ValueError(f"the shard goes on at byte {bounds[-1]}, where it should end")
        extra = []
        left = []
        for (at, end), (start, _), piece in zip(places, wanted, pieces, strict=False):
            reached = _walk(piece, start, at, end)
            if reached > end:
                raise ValueError(f"the sample at byte {at} does not end where the next one begins")
            if reached < end:
                left.append((reached, end))
        places = left


def _bounds(index: bytes, shard_bytes: int) -> list[int]:
    """Where the samples begin, and where the last one ends."""
    if len(index) % 8 or len(index) < 8:
        raise ValueError(f"it has {len(index)} bytes, which are no numbers of 64 bits")
    offsets = np.frombuffer(index, "<u8")
    if (offsets > shard_bytes).any() or (offsets % tarfile.BLOCKSIZE).any():
        raise ValueError("it has offsets without a header")
    if (np.diff(offsets.astype(np.int64)) <= 0).any():
        raise ValueError("its offsets do not rise")
    bounds: list[int] = offsets.tolist()
    return bounds


def _walk(piece: bytes, start: int, at: int, end: int) -> int:
    """The offset of the first header that a piece lacks, or whose wanted member it lacks.

    Args:
        piece: bytes of the shard.
        start: where it begins.
        at: a header in it.
        end: of the sample.

    Raises:
        ValueError: there is no header.
    """
    begin = at
    while at < end:
        header = piece[at - start : at - start + tarfile.BLOCKSIZE]
        if len(header) < tarfile.BLOCKSIZE:
            break
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise ValueError(f"there is no header at byte {at}") from error
        data = at + tarfile.BLOCKSIZE
        has_data = member.isreg() or member.type in _EXTENDED
        size = member.size if has_data else 0
        if size < 0:
            raise ValueError(f"there is no header at byte {at}")
        if at > begin and data + min(size, _MEMBER_BYTES) > start + len(piece):
            break
        at = data + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return at
