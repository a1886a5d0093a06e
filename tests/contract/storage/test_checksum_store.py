"""Checksums that an operator had taken are stored, and read when a shard was touched."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from gyre_daemon.datasets.indexing.changes import ChecksumStore
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.errors import CorruptSample, ShardMissing
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import DaemonThreads, FairExecutor
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.listing import stat_shard
from gyre_daemon.storage.reads import Reads
from gyre_daemon.storage.sources.local import LocalStorage

from tests.contract.places import noise

Result = TypeVar("Result")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.bin").write_bytes(noise(number, (1 << 20) + number))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ChecksumStore:
    return ChecksumStore(SidecarStore("", tmp_path / "kept"))


def opened(folder: Path) -> LocalStorage:
    files = [LocalFile.of(path) for path in sorted(folder.glob("*.bin"))]
    shards = [stat_shard(file, file.name) for file in files]
    return LocalStorage(files, shards, FairExecutor(DaemonThreads(1, "test"), 1), Metrics())


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def keep(store: ChecksumStore, storage: LocalStorage) -> None:
    for shard in range(len(storage.shards)):
        run(store.keep("data", storage.checksums, shard, threading.Event()))


def read(store: ChecksumStore, storage: LocalStorage, shard: int) -> bytes:
    """Read a shard as a daemon does that has just opened its dataset."""
    target = np.empty(storage.shards[shard].size_bytes, np.uint8)

    async def serve() -> None:
        store.serve("data", storage.checksums)
        await storage.read(Reads.into([target], [shard], [0]))

    try:
        run(serve())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return target.tobytes()


def test_stored_checksums_are_read_when_a_shard_was_touched(
    store: ChecksumStore, folder: Path, tmp_path: Path
) -> None:
    keep(store, opened(folder))
    assert len(list((tmp_path / "kept").iterdir())) == 3
    later = opened(folder)
    assert read(store, later, 0) == (folder / "0.bin").read_bytes()
    assert not later.checksums.known, "nothing is read before it is needed"
    (folder / "0.bin").chmod(0o600)
    assert read(store, later, 0) == (folder / "0.bin").read_bytes()
    assert list(later.checksums.known) == [0]
    times = (folder / "1.bin").stat()
    (folder / "1.bin").write_bytes(noise(9, (1 << 20) + 1))
    os.utime(folder / "1.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(CorruptSample, match=r"shard 1\.bin has changed"):
        read(store, later, 1)


def test_without_checksums_the_error_names_the_command(store: ChecksumStore, folder: Path) -> None:
    storage = opened(folder)
    (folder / "0.bin").chmod(0o600)
    with pytest.raises(CorruptSample, match=r"0\.bin .* index .* \(`gyre index --checksums`\)"):
        read(store, storage, 0)


def test_checksums_of_another_version_only_tell_what_it_was(
    store: ChecksumStore, folder: Path
) -> None:
    first = opened(folder)
    keep(store, first)
    (folder / "1.bin").write_bytes(noise(9, 1 << 20))
    second = opened(folder)
    found = run(store.stored("data", second.checksums, 1))
    assert found is not None
    assert not found[1]
    assert np.array_equal(found[0], first.checksums.known[1])
    assert run(store.stored("other data", second.checksums, 1)) is None
    kept = run(store.stored("data", second.checksums, 0))
    assert kept is not None
    assert kept[1]


def test_a_shard_that_cannot_be_read_gets_no_checksums(store: ChecksumStore, folder: Path) -> None:
    storage = opened(folder)
    (folder / "0.bin").unlink()
    (folder / "1.bin").write_bytes(b"another")
    with pytest.raises(ShardMissing):
        run(store.take("data", storage.checksums, 0, threading.Event()))
    assert run(store.take("data", storage.checksums, 1, threading.Event())) is None
    stopped = threading.Event()
    stopped.set()
    assert run(store.take("data", storage.checksums, 2, stopped)) is None
    assert not storage.checksums.known
