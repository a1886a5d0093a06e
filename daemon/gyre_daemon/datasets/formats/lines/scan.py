"""Finds the lines of a file, without looking at its characters one by one."""

from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays

_UTF8_MARK = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = b"\n\r"
PIECE_BYTES = 4 << 20  # numpy's arrays for one chunk stay in the processor's cache or near it


def chunks(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The pieces of a file, each with its offset, without a byte order mark at its beginning."""
    offset = 0
    while data := file.read(PIECE_BYTES):
        begin = 0
        if offset == 0:
            while len(data) < len(_UTF8_MARK) and (more := file.read(PIECE_BYTES)):
                data += more
            begin = len(_UTF8_MARK) if data.startswith(_UTF8_MARK) else 0
        if data[begin:]:
            yield offset + begin, data[begin:]
        offset += len(data)


def scan_lines(file: BinaryIO, check: Callable[[bytes], None]) -> Arrays:
    """The places of the N lines of a file.

    Lines end with a line feed, or with a carriage return and a line feed. The last line needs no
    end.

    Args:
        file: is read once.
        check: is called with the first nonempty line, unless it is longer than 4 MiB.

    Returns:
        start, size: int64 [N], first byte and length of each line, without its end.
    """
    begin = stop = before = 0
    starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for offset, data in chunks(file):
        if not stop:
            begin = offset
            first, end, _ = data.lstrip(b"\r\n").partition(b"\n")
            if end or len(data) < PIECE_BYTES:
                check(first)
        values = np.frombuffer(data, np.uint8)
        newlines = np.flatnonzero(values == _NEWLINE)
        if len(newlines):
            start = np.concatenate(([begin], newlines[:-1] + offset + 1))
            last = values[newlines - 1]
            if newlines[0] == 0:  # the byte before it was in the chunk before
                last[0] = before
            starts.append(start)
            size = newlines + offset - start
            sizes.append(size - ((last == _RETURN) & (size > 0)))
            begin = int(newlines[-1]) + offset + 1
        before, stop = data[-1], offset + len(data)
    if begin < stop:
        starts.append(np.array([begin]))
        sizes.append(np.array([stop - begin]))
    return {"start": np.concatenate(starts), "size": np.concatenate(sizes)}
