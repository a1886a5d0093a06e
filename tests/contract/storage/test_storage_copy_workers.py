"""Local files read by copy workers: everything that the local storage promises holds."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gyre_daemon.errors import StorageUnavailable
from gyre_daemon.memory.arenas import Arena
from gyre_daemon.storage.reads import Reads, memory_at
from gyre_daemon.storage.sources import local
from gyre_daemon.storage.sources.local import LocalStorage
from gyre_daemon.workers.copy_workers import CopyWorkers

from tests.contract.places import FailingDisk, Place, Targets, first_of, noise, run
from tests.contract.storage import test_storage_local


class _Through:
    """A storage that reads into an arena of copy workers, and copies from there to the targets."""

    def __init__(self, storage: LocalStorage, copy_workers: CopyWorkers) -> None:
        self._storage, self._copy_workers = storage, copy_workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def read(self, reads: Reads) -> None:
        if int(reads.size.max()) > 1 << 30:
            await self._storage.read(reads)  # refused in any case
        ends = np.cumsum(reads.size)
        arena = Arena(int(ends[-1]) + 4096)
        self._copy_workers.map(arena.key, arena.descriptor)
        arena.seal()
        slot = arena.take(int(ends[-1]) + 1)
        assert slot
        begins = ends - reads.size
        target = begins.astype(np.uint64) + np.uint64(slot.address)
        await self._storage.read(replace(reads, target=target, arena=arena, memory=()))
        self._copy_workers.unmap(arena.key)
        for begin, size, place in zip(
            begins.tolist(), reads.size.tolist(), reads.target.tolist(), strict=True
        ):
            memory_at(place, size)[:] = slot.memory[begin : begin + size]
        arena.close()


class TestLocalByCopyWorkers(test_storage_local.TestLocal):
    @pytest.fixture
    def copy_workers(self) -> Iterator[CopyWorkers]:
        with CopyWorkers(2) as copy_workers:
            yield copy_workers

    @pytest.fixture(autouse=True)
    def copies_of_any_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "_MIN_COPIED_BYTES", 0)

    def seen(self, storage: Any, copy_workers: CopyWorkers) -> Any:
        return _Through(storage, copy_workers)

    def test_copy_workers_copied(
        self, place: Place, opener: Any, copy_workers: CopyWorkers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.put("0.bin", noise(0, 5000))
        targets = Targets().add(0, 10, 2000).add(0, 4000, 1000)
        monkeypatch.setattr(local, "gather", None)

        async def read() -> None:
            await (await opener(place.root, {})).read(targets.reads())

        run(read())
        targets.check([noise(0, 5000)])

    def test_a_worker_killed_by_a_failing_disk_is_replaced_and_no_second_one_dies(
        self, opener: Any, failing_disk: FailingDisk, copy_workers: CopyWorkers
    ) -> None:
        (failing_disk.folder / "0.bin").write_bytes(noise(0, 4 << 20))
        failing_disk.evict("0.bin")
        before = copy_workers.pids

        async def read() -> list[list[int]]:
            storage = await opener(f"{failing_disk.folder}/0.bin", {})
            await storage.read(Targets().add(0, 0, 5000).reads())
            failing_disk.fail()
            # Every second read is looked up; these are in memory, so a worker copies.
            targets = Targets()
            for number in range(31):
                targets.add(0, number * 100, 100)
            targets.add(0, 3 << 20, 100)
            pids = []
            for _ in range(2):
                with pytest.raises(
                    StorageUnavailable, match=r"0\.bin has not changed and yet cannot be read"
                ):
                    await first_of(storage.read(targets.reads()))
                pids.append(copy_workers.pids)
            return pids

        first, second = run(read())
        assert len(set(before) & set(first)) == 1, "one died"
        assert set(first) <= set(second), "no second one died"
