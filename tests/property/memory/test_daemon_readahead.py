"""Announcing cold files.

All that is read is covered, nothing twice, and nothing at all where it is in memory.
"""

import itertools
import mmap
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.listing import stat_shard
from gyre_daemon.storage.open_shards import OpenShard, OpenShards
from gyre_daemon.storage.reads import Reads
from gyre_daemon.storage.sources import local
from gyre_daemon.storage.sources.local import ReadAhead, blocks, is_mapped_in_memory
from hypothesis import given
from hypothesis import strategies as st

NUM_BYTES = 4 << 20

ranges = st.lists(
    st.tuples(st.sampled_from([0, 1, 5, 90_000]), st.integers(0, 300), st.integers(1, 120)),
    min_size=1,
    max_size=30,
)


@given(ranges, st.sampled_from([1, 16, 64]))
def test_ranges_cover_what_is_read_once_and_touch_nowhere(
    reads: list[tuple[int, int, int]], grain: int
) -> None:
    shard, start, size = (np.array(column, np.int64) for column in zip(*reads, strict=True))
    found = list(
        zip(*(column.tolist() for column in blocks(shard, start, start + size, grain)), strict=True)
    )
    wanted = {
        (its, block)
        for its, begin, length in reads
        for block in range(begin // grain, (begin + length - 1) // grain + 1)
    }
    covered = [
        (its, block) for its, begin, end in found for block in range(begin // grain, end // grain)
    ]
    assert sorted(wanted) == covered
    assert all(one[0] != other[0] or one[2] < other[1] for one, other in itertools.pairwise(found))


def test_very_large_shards() -> None:
    start = np.array([(1 << 50) - 4096, 0, (1 << 50) - 4096], np.int64)
    shard, begin, end = blocks(np.array([1_000_000, 3, 7]), start, start + 100, 4096)
    assert (shard.tolist(), begin.tolist()) == (
        [3, 7, 1_000_000],
        [0, (1 << 50) - 4096, (1 << 50) - 4096],
    )
    assert (end - begin == 4096).all()


@pytest.fixture
def shard(tmp_path: Path) -> OpenShard:
    file = LocalFile.of(tmp_path / "0.bin")
    file.path.write_bytes(bytes(NUM_BYTES))
    return OpenShards([file], [stat_shard(file, "0.bin")]).get(0)


def evict(shard: OpenShard) -> None:
    """Write the file out and drop it from memory.

    Where nothing can be dropped (a tmpfs), there is nothing to test.
    """
    os.fsync(shard.descriptor)
    deadline = time.monotonic() + 120
    while any(
        is_mapped_in_memory(shard.address + offset) for offset in range(0, NUM_BYTES, mmap.PAGESIZE)
    ):
        if time.monotonic() > deadline:
            pytest.skip("this file system keeps all files in memory")
        assert shard.mapping
        shard.mapping.madvise(mmap.MADV_DONTNEED)
        # this leaves pages that are being read
        os.posix_fadvise(shard.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def some_reads() -> Reads:
    start = np.random.default_rng(0).permutation(NUM_BYTES // 4096)[:100] * 4096
    return Reads(
        np.zeros(100, np.int64),
        start,
        np.full(100, 2000),
        start.astype(np.uint64),
        np.arange(100),
        (),
    )


def test_a_cold_file_is_announced_and_a_hot_one_is_not(shard: OpenShard) -> None:
    ahead = ReadAhead([shard.listed])
    evict(shard)
    for _ in range(3):
        assert 0 < ahead.announce(some_reads(), {0: shard}) <= 100
        evict(shard)
    for start in some_reads().start.tolist():
        assert os.pread(shard.descriptor, 1, start) == b"\0"
    assert ahead.announce(some_reads(), {0: shard}) == 0


def test_a_job_that_finds_a_cold_file_says_so(shard: OpenShard) -> None:
    ahead = ReadAhead([shard.listed])
    for _ in range(300):
        with ahead.around(some_reads(), {0: shard}) as is_cold:
            assert not is_cold
    evict(shard)
    with ahead.around(some_reads(), {0: shard}) as is_cold:
        assert is_cold


def test_file_systems_without_nonblocking_reads(
    shard: OpenShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> int:
        raise OSError(95, "Operation not supported")

    shard.is_own = False
    monkeypatch.setattr(os, "preadv", unsupported)
    assert ReadAhead([shard.listed]).announce(some_reads(), {0: shard}) == 0
    evict(shard)
    assert ReadAhead([shard.listed]).announce(some_reads(), {0: shard}) > 0


def test_a_fast_disk_is_not_taken_for_memory(
    shard: OpenShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nonblocking read starts readahead, and may find the page that it has just requested."""
    shard.is_own = False
    monkeypatch.setattr(os, "preadv", lambda *_: 1)
    evict(shard)
    assert ReadAhead([shard.listed]).announce(some_reads(), {0: shard}) > 0


def test_a_file_whose_residency_the_kernel_hides(
    shard: OpenShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports every page of another user's file as resident."""

    def would_wait(*_: object) -> int:
        raise BlockingIOError

    shard.is_own = False
    monkeypatch.setattr(local, "is_mapped_in_memory", lambda _: True)
    assert ReadAhead([shard.listed]).announce(some_reads(), {0: shard}) == 0
    monkeypatch.setattr(os, "preadv", would_wait)
    assert ReadAhead([shard.listed]).announce(some_reads(), {0: shard}) > 0


def test_refused_advice_is_no_error(shard: OpenShard, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    evict(shard)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert ReadAhead([shard.listed]).announce(some_reads(), {0: shard}) > 0


def test_a_dataset_beyond_memory_is_read_by_the_page(shard: OpenShard) -> None:
    assert ReadAhead([shard.listed]).grain_bytes > mmap.PAGESIZE
    assert ReadAhead([replace(shard.listed, size_bytes=1 << 50)]).grain_bytes == mmap.PAGESIZE
