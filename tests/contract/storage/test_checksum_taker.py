"""Checksums are taken at once or in the background, and those of large datasets are stored."""

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gyre_daemon.datasets.indexing import checksum_taker as checksums
from gyre_daemon.datasets.indexing.checksum_taker import ChecksumTaker
from gyre_daemon.datasets.sidecars.store import SidecarStore
from gyre_daemon.errors import ShardMissing
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.local.listing import stat_shard
from gyre_daemon.storage.local.local import LocalStorage

from tests.contract.places import noise

DEADLINE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.bin").write_bytes(noise(number, (1 << 20) + number))
    return folder


@pytest.fixture
def taker(tmp_path: Path) -> Iterator[ChecksumTaker]:
    taker = ChecksumTaker(SidecarStore("", tmp_path / "kept"))
    yield taker
    taker.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "gyre-checksums"]


def opened(folder: Path) -> LocalStorage:
    files = [LocalFile.of(path) for path in sorted(folder.glob("*.bin"))]
    # nothing is read through the storage, so the executor starts no thread
    workers = FairExecutor(ThreadPoolExecutor(1), 1)
    return LocalStorage(files, [stat_shard(file, file.name) for file in files], workers, Metrics())


def await_all(storage: LocalStorage) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(storage.checksums.known) < len(storage.shards):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_small_datasets_have_checksums_at_once(
    taker: ChecksumTaker, folder: Path, tmp_path: Path
) -> None:
    storage = opened(folder)
    taker.begin("data", storage.checksums)
    assert {shard: its.shape for shard, its in storage.checksums.known.items()} == {
        0: (1, 16),
        1: (2, 16),
        2: (2, 16),
    }
    assert not (tmp_path / "kept").exists(), "what is taken again in no time is not kept"


def test_larger_datasets_get_checksums_in_the_background(
    taker: ChecksumTaker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = opened(folder)
    taker.begin("data", small.checksums)
    monkeypatch.setattr(checksums, "_AT_ONCE_BYTES", 0)
    for _ in range(2):
        large = opened(folder)
        taker.begin("data", large.checksums)
        await_all(large)
        assert all(
            np.array_equal(large.checksums.known[shard], its)
            for shard, its in small.checksums.known.items()
        )


def test_checksums_of_large_datasets_are_stored(
    taker: ChecksumTaker, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_MIN_STORED_BYTES", 0)
    first = opened(folder)
    taker.begin("data", first.checksums)
    assert len(list((tmp_path / "kept").iterdir())) == 3
    (folder / "1.bin").write_bytes(noise(9, 1 << 20))
    monkeypatch.setattr(checksums.ChecksumTaker, "_try_to_take", lambda *_: None)
    second = opened(folder)
    taker.begin("data", second.checksums)
    assert sorted(second.checksums.known) == [0, 2], "those of another version are not believed"
    assert taker.stored("data", second.checksums, 0) is not None
    found = taker.stored("data", second.checksums, 1)
    assert found is not None
    assert not found[1]
    assert np.array_equal(found[0], first.checksums.known[1]), "but they tell what it was"
    assert taker.stored("other data", second.checksums, 1) is None


def test_a_shard_that_cannot_be_read_gets_no_checksums(taker: ChecksumTaker, folder: Path) -> None:
    storage = opened(folder)
    (folder / "0.bin").unlink()
    (folder / "1.bin").write_bytes(b"another")
    taker.begin("data", storage.checksums)
    assert list(storage.checksums.known) == [2]
    with pytest.raises(ShardMissing):
        taker.take("data", storage.checksums, 0, threading.Event())
    assert taker.take("data", storage.checksums, 1, threading.Event()) is None


def test_a_closed_dataset_is_not_read_any_further(
    taker: ChecksumTaker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset that is being read when the daemon ends does not delay it."""
    monkeypatch.setattr(checksums, "_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(checksums, "_EAGER_BYTES", 0)
    monkeypatch.setattr(checksums, "_SHARE_OF_TIME", 10_000)
    (folder / "0.bin").write_bytes(bytes(64 << 20))
    storage = opened(folder)
    seen = weakref.ref(storage)
    taker.begin("data", storage.checksums)
    taker.close()
    assert 2 not in storage.checksums.known
    del storage
    assert seen() is None
