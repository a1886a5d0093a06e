"""Threads that read single files go one after the other, and none is held up by a slow one.

Reads of a slow mount that overlap share the open folder.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage import beneath
from gyre_daemon.storage.beneath import Root
from gyre_daemon.storage.listing import list_folder
from gyre_daemon.storage.reads import Reads
from gyre_daemon.storage.sources import local
from gyre_daemon.storage.sources.local import SingleFiles

NUM_FILES = 40


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[SingleFiles]:
    for number in range(NUM_FILES):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes([number]) * 100)
    root = Root(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        table = list_folder(root, lambda name: True)
        yield SingleFiles(root, table, FairExecutor(threads, 4), Metrics())


async def read_all(storage: SingleFiles) -> bool:
    """Whether eight readers at once each get what the files have."""
    into = [np.zeros((NUM_FILES, 100), np.uint8) for _ in range(8)]
    shards = list(range(NUM_FILES))
    await asyncio.gather(
        *(storage.read(Reads.into(list(rows), shards, [0] * NUM_FILES)) for rows in into)
    )
    wanted = np.repeat(np.arange(NUM_FILES, dtype=np.uint8), 100).reshape(NUM_FILES, 100)
    return all((rows == wanted).all() for rows in into)


def test_readers_of_the_page_cache_are_one_at_a_time(
    storage: SingleFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_TURN_S", 600.0)
    monkeypatch.setattr(local, "_blocks_from_disk", lambda: 0)
    at_once, most, lock = 0, 0, threading.Lock()
    held = Root.held

    @contextlib.contextmanager
    def counted(root: Root) -> Iterator[Callable[[str | bytes, int], int]]:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        with held(root) as open_beneath:
            yield open_beneath
        with lock:
            at_once -= 1

    monkeypatch.setattr(Root, "held", counted)
    assert asyncio.run(read_all(storage))
    assert most == 1


def test_a_slow_reader_holds_up_nobody(storage: SingleFiles) -> None:
    with storage._taking_turns():  # a read that does not end
        assert asyncio.run(asyncio.wait_for(read_all(storage), 60))


def test_readers_of_a_disk_do_not_wait_for_each_other(
    storage: SingleFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_TURN_S", 600.0)
    blocks = iter(range(10**6))
    monkeypatch.setattr(local, "_blocks_from_disk", lambda: next(blocks))
    assert asyncio.run(read_all(storage))
    with storage._taking_turns():
        assert asyncio.run(asyncio.wait_for(read_all(storage), 60))


@pytest.fixture
def first_read(
    storage: SingleFiles, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], bytes]]:
    """A read of the first file that has opened it and does not end before it is called."""
    has_begun, goes_on = threading.Event(), threading.Event()

    def pread(descriptor: int, _: object, start: int, stop: int) -> bytes:
        data = os.pread(descriptor, stop - start, start)
        if data[0] == 0:
            has_begun.set()
            assert goes_on.wait(60)
        return data

    monkeypatch.setattr(local, "_pread", pread)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(storage._read_range, 0, 0, 100)
        assert has_begun.wait(60)

        def result() -> bytes:
            goes_on.set()
            return first.result(60)

        yield result
        goes_on.set()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors of the dataset's folder that were opened so far."""
    found: list[int] = []
    open_real = os.open

    def opened(path: str | Path, *arguments: int, **options: int) -> int:
        descriptor = open_real(path, *arguments, **options)
        if path == tmp_path:
            found.append(descriptor)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    return found


def test_reads_that_overlap_open_the_folder_once(
    storage: SingleFiles,
    folders: list[int],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(beneath, "_SHARED_S", 600.0)
    first_read = request.getfixturevalue("first_read")
    assert [storage._read_range(number, 0, 1)[0] for number in range(1, 9)] == [*range(1, 9)]
    assert first_read() == bytes(100)
    assert len(folders) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):  # closed with the last read
        os.fstat(folders[0])
    assert storage._read_range(9, 0, 1) == b"\x09"
    assert len(folders) == 2


def test_reads_leave_the_folder_of_one_that_hangs(
    storage: SingleFiles,
    folders: list[int],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(beneath, "_SHARED_S", 0.0)  # it has hung for longer
    first_read = request.getfixturevalue("first_read")
    assert [storage._read_range(number, 0, 1)[0] for number in range(1, 4)] == [1, 2, 3]
    assert len(folders) == 4
    assert first_read() == bytes(100)


def test_a_folder_that_was_replaced_a_moment_ago_is_found(
    storage: SingleFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(beneath, "_SHARED_S", 600.0)
    request.getfixturevalue("first_read")
    old = tmp_path.with_name(tmp_path.name + "-old")
    tmp_path.rename(old)
    tmp_path.mkdir()
    (old / "01.bin").rename(tmp_path / "01.bin")
    # a rename changes this time; a remount would not
    storage._stamps[1, 1] = (tmp_path / "01.bin").stat().st_ctime_ns
    assert storage._read_range(1, 0, 1) == b"\x01"
