"""Tar shards in object storage are scanned by windows: the same index, and little is read."""

import asyncio
import io
import tarfile

import numpy as np
from gyre_daemon.datasets.formats.webdataset import scan_tar
from gyre_daemon.datasets.scanning import Scanner, scan_workers
from gyre_daemon.workers.compute_workers import ComputeServer

# Bytes of the members of a shard, and the share of it that is read at most.
SHARDS = [
    ([1000] * 3000, 1.0),
    ([4 << 20] * 12, 0.05),
    ([10, 3 << 20, 100 << 10, 900 << 10, 5000, 1100 << 10] * 8, 0.9),
    ([100 << 10] * 100 + [3 << 20] * 5 + [70] * 3000, 0.9),
    ([], 1.0),
]


def tar(sizes: list[int]) -> bytes:
    file, generator = io.BytesIO(), np.random.default_rng(0)
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, size in enumerate(sizes):
            for extension, data in (("jpg", generator.bytes(size)), ("cls", b"%d" % (number % 10))):
                member = tarfile.TarInfo(f"{number:06}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def test_a_shard_scanned_in_windows_has_the_index_of_the_whole_shard() -> None:
    async def run() -> None:
        process = Scanner(scan_workers(server))
        for sizes, share in SHARDS:
            data, asked = tar(sizes), list[tuple[int, int]]()

            async def read(
                start: int, stop: int, data: bytes = data, asked: list[tuple[int, int]] = asked
            ) -> bytes:
                asked.append((start, stop))
                return data[start:stop]

            found = await process.scan_ranges(scan_tar, "x", len(data), read, in_windows=True)
            expected = scan_tar("x", io.BytesIO(data))
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                assert np.array_equal(found[name], array), name
            assert sum(stop - start for start, stop in asked) <= share * len(data)
        process.kill()

    server = ComputeServer()
    try:
        asyncio.run(run())
    finally:
        server.close()
