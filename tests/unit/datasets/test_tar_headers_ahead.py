"""Energon's index of a tar shard: which ranges are read ahead because of it, and when."""

import io
import struct
import tarfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.formats.webdataset import ahead
from gyre_daemon.datasets.formats.webdataset.scan import scan_tar
from gyre_daemon.datasets.scans.read_ahead import KnownRanges

LONG_NAME = "folder/" * 30 + "b"


def shard(format_of_tar: int = tarfile.PAX_FORMAT) -> tuple[bytes, list[int]]:
    """A tar file of three samples, and where each begins, as Energon's `TarIndexWriter` is told."""
    image, array = np.random.default_rng(0).bytes(400 << 10), io.BytesIO()
    np.save(array, np.arange(90_000))
    samples = [
        {"a.cls": b"7", "a.jpg": image, "a.json": b'{"a": 1}'},
        {f"{LONG_NAME}.jpg": image, f"{LONG_NAME}.npy": array.getvalue()},
        {"c.jpg": image, "c.cls": b"-1", "c.txt": "wörter".encode()},
    ]
    file, offsets = io.BytesIO(), []
    with tarfile.open(fileobj=file, mode="w", format=format_of_tar) as archive:
        for sample in samples:
            offsets.append(archive.offset)
            for name, data in sample.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        offsets.append(archive.offset)
    return file.getvalue(), offsets


def index_of(offsets: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(offsets)}Q", *offsets)


def read_ahead(index: bytes, data: bytes) -> tuple[KnownRanges, int, int]:
    """What was read, how many bytes that were, and in how many rounds."""
    known, num_bytes, num_rounds = KnownRanges(), 0, 0
    response: Any = None
    steps = ahead.headers_ahead(index, len(data))
    try:
        while True:
            wanted = steps.send(response)
            assert all(0 <= start < stop <= len(data) for start, stop in wanted)
            response = [data[start:stop] for start, stop in wanted]
            known.add([start for start, _ in wanted], response)
            num_bytes, num_rounds = num_bytes + sum(map(len, response)), num_rounds + 1
    except StopIteration:
        return known, num_bytes, num_rounds


class Recorded(io.BytesIO):
    """A file that notes which ranges are read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.ranges: list[tuple[int, int]] = []

    def read(self, size: int | None = -1) -> bytes:
        begin = self.tell()
        data = super().read(size)
        self.ranges.append((begin, begin + len(data)))
        return data


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_all_that_a_scan_reads_was_read_ahead(kind: int) -> None:
    data, offsets = shard(kind)
    known, num_bytes, num_rounds = read_ahead(index_of(offsets), data)
    file = Recorded(data)
    scan_tar("a", file)
    for start, stop in file.ranges:
        if stop > start:
            assert known.find(start, stop) == data[start:stop], "a request of its own"
    assert num_rounds <= 3, "one for each large member of a sample"
    assert num_bytes < 100 << 10


def test_an_index_of_another_shard_is_stale() -> None:
    data, offsets = shard()
    for stale in (
        [0, 512],
        [*offsets[:-1], offsets[-1] + 512],
        offsets[:-1],
        [offsets[0], offsets[1] + 512, *offsets[2:]],
        [offsets[0], offsets[2], offsets[1], offsets[3]],
        [offset + 1 for offset in offsets],
        [offset + (1 << 40) for offset in offsets],
        [1 << 63, 1 << 63],
    ):
        with pytest.raises(ValueError, match=r"."):
            read_ahead(index_of(stale), data)
    with pytest.raises(ValueError, match="no numbers of 64 bits"):
        read_ahead(index_of(offsets)[:-1], data)
    with pytest.raises(ValueError, match="no header at byte"):
        read_ahead(index_of(offsets), bytes(len(data)))


def test_small_samples_are_read_from_beginning_to_end() -> None:
    data, offsets = shard()
    many = list(range(0, offsets[-1], 512))
    known, num_bytes, _ = read_ahead(index_of(many), data)
    assert num_bytes == 0
    assert known.find(0, 512) is None
