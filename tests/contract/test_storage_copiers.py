"""Local files, read by processes that may die of it: all that is promised of local files holds."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gyre_daemon.copiers import Copiers
from gyre_daemon.errors import StorageUnavailable
from gyre_daemon.memory.arena import Arena
from gyre_daemon.storage.base import Reads
from gyre_daemon.storage.local import local
from gyre_daemon.storage.local.gather import memory_at
from gyre_daemon.storage.local.local import LocalStorage

from tests.contract import test_storage_local
from tests.contract.places import FailingDisk, Place, Targets, first_of, noise, run


class _Through:
    """A storage whose reads land in an arena that copiers have, and come from there to where they were asked for."""

    def __init__(self, storage: LocalStorage, copiers: Copiers) -> None:
        self._storage, self._copiers = storage, copiers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def read(self, reads: Reads) -> None:
        if int(reads.size.max()) > 1 << 30:
            await self._storage.read(reads)  # refused in any case
        ends = np.cumsum(reads.size)
        arena = Arena(int(ends[-1]) + 4096)
        self._copiers.map(arena.key, arena.descriptor, arena.num_bytes)
        arena.seal()
        slot = arena.take(int(ends[-1]) + 1)
        assert slot
        begins = ends - reads.size
        target = begins.astype(np.uint64) + np.uint64(slot.address)
        await self._storage.read(replace(reads, target=target, arena=arena, memory=()))
        self._copiers.unmap(arena.key)
        for begin, size, place in zip(begins.tolist(), reads.size.tolist(), reads.target.tolist(), strict=True):
            memory_at(place, size)[:] = slot.memory[begin : begin + size]
        arena.close()


class TestLocalByCopiers(test_storage_local.TestLocal):
    @pytest.fixture
    def copiers(self) -> Iterator[Copiers]:
        with Copiers(2) as copiers:
            yield copiers

    @pytest.fixture(autouse=True)
    def whatever_the_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "_MIN_COPIED_BYTES", 0)

    def seen(self, storage: Any, copiers: Copiers) -> Any:
        return _Through(storage, copiers)

    def test_they_did_it(self, place: Place, opener: Any, copiers: Copiers, monkeypatch: pytest.MonkeyPatch) -> None:
        place.put("0.bin", noise(0, 5000))
        targets = Targets().add(0, 10, 2000).add(0, 4000, 1000)
        monkeypatch.setattr(local, "gather", None)

        async def read() -> None:
            await (await opener(place.root, {})).read(targets.reads())

        run(read())
        targets.check([noise(0, 5000)])

    def test_one_that_dies_of_a_failing_disk_is_replaced_and_no_second_one_dies(
        self, opener: Any, failing_disk: FailingDisk, copiers: Copiers
    ) -> None:
        (failing_disk.folder / "0.bin").write_bytes(noise(0, 4 << 20))
        failing_disk.evict("0.bin")
        before = copiers.pids

        async def read() -> list[list[int]]:
            storage = await opener(f"{failing_disk.folder}/0.bin", {})
            for _ in range(2):  # there now, so that the next job is not looked at
                await storage.read(Targets().add(0, 0, 5000).reads())
            failing_disk.fail()
            pids = []
            for _ in range(2):
                with pytest.raises(StorageUnavailable, match=r"0\.bin is what it was and yet cannot be read"):
                    await first_of(storage.read(Targets().add(0, 3 << 20, 5000).reads()))
                pids.append(copiers.pids)
            return pids

        first, second = run(read())
        assert len(first) == 2
        assert len(set(before) & set(first)) == 1, "one died"
        assert second == first
