"""Threads that read single files go one after the other, and none is held up by a slow one."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
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
