"""A storage behind the node cache: what every storage promises, and what only this one does."""

import asyncio
import copy
import gc
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gyre_daemon.errors import CorruptSample, ShardMissing
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor, Flow
from gyre_daemon.storage.cache.blocks import BlockMap, DiskCache, open_disk_cache
from gyre_daemon.storage.cache.node import CachedStorage, NodeCache
from gyre_daemon.storage.cache.placement import NEVER
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.contract.places import (
    HttpPlace,
    LocalPlace,
    Place,
    Targets,
    first_of,
    noise,
    openers,
    run,
)
from tests.contract.storage.objects import ObjectServer
from tests.contract.storage.storage_contract import StorageContract

BLOCK = 4096
Integers = npt.NDArray[np.int64]


def blocks_of(storage: Storage, block_bytes: int = BLOCK) -> BlockMap:
    """Blocks of one size; a read that crosses a border is read past the cache."""
    shard, start = [], []
    for index, listed in enumerate(storage.shards):
        for begin in range(0, listed.size_bytes, block_bytes):
            shard.append(index)
            start.append(begin)
    sizes = np.array([listed.size_bytes for listed in storage.shards], np.int64)
    starts, its = np.array(start, np.int64), np.array(shard, np.int64)
    return BlockMap(
        its, starts, np.minimum(starts + block_bytes, sizes[its]) if len(its) else starts
    )


def opened_again(storage: CachedStorage) -> CachedStorage:
    """Another dataset with the same shards, or the same one again."""
    source = copy.copy(storage._storage)
    return CachedStorage(source, storage._location, storage._cache, storage._block_map)


def is_idle(cache: NodeCache) -> bool:
    """Whether nothing is being fetched or written."""
    return not cache._fetching and not (cache._writer and cache._writer.is_busy)


Open = Callable[..., Coroutine[Any, Any, CachedStorage]]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        # The condition reads state that signals nothing.
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Job:
    """A job with a random future."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def next_use(self, _: int, blocks: Integers) -> Integers:
        return np.where(blocks % 5 == 0, NEVER, self._generator.integers(0, 50, len(blocks)))


class Soon:
    """A job that reads every block again at once."""

    def next_use(self, _: int, blocks: Integers) -> Integers:
        return np.ones(len(blocks), np.int64)


class CachedContract(StorageContract):
    """Over HTTP."""

    lists = False
    memory_bytes = 1 << 20
    disk_bytes = 0

    @pytest.fixture
    def place(self, object_server: ObjectServer) -> Place:
        return HttpPlace(object_server)

    @pytest.fixture
    def opener(self, metrics: Metrics, tmp_path: Path) -> Iterator[Open]:
        disks: list[DiskCache] = []
        with ThreadPoolExecutor(3) as executor:

            async def open_storage(
                uri: str, settings: Mapping[str, Any], pattern: str = "*.bin"
            ) -> CachedStorage:
                workers = FairExecutor(executor, 3)
                opener = StorageOpener(workers, EndpointOptions(16, 10.0), metrics)
                openers.append(opener)
                storage = await opener.open(parse_location(uri), settings, pattern)
                gc.collect()  # an earlier node closes its mirrors
                while disks:
                    disks.pop().close()
                disk = None
                if self.disk_bytes:
                    disk = open_disk_cache(tmp_path / "cache", self.disk_bytes)
                    assert disk
                    disks.append(disk)
                node = NodeCache(self.memory_bytes, disk, workers, metrics.cache)
                return CachedStorage(storage, uri, node, lambda _: blocks_of(storage))

            yield open_storage
        openers.clear()
        for disk in disks:
            disk.close()

    def test_requests_are_counted(self, place: Place, opener: Any, metrics: Metrics) -> None:
        place.put("0.bin", noise(0, 10_000))

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            for _ in range(3):
                await storage.read(Targets().add(0, 0, 10).add(0, 500, 20).add(0, 8200, 1).reads())

        run(read())
        (count,) = (count for labels, count in metrics.storage.items() if labels.kind == "read")
        assert (count.num_requests, count.num_bytes) == (2, BLOCK + 10_000 - 2 * BLOCK)
        assert (metrics.cache.num_hits, metrics.cache.num_misses, metrics.cache.num_joined) == (
            6,
            3,
            0,
        )

    @pytest.mark.parametrize("size", [100, 50, 150])
    def test_a_shard_that_changes(self, place: Place, opener: Any, size: int) -> None:
        self.check_changed(place, opener, size)

    def test_a_shard_of_which_only_times_are_told_changes(
        self, place: Place, opener: Any, object_server: ObjectServer
    ) -> None:
        object_server.tells = "Last-Modified"
        self.check_changed(place, opener, 100)

    def check_changed(self, place: Place, opener: Any, size: int) -> None:
        """Cached blocks are still served as they were listed; all others are an error."""
        held, fetched = Targets().add(0, 40, 20), Targets().add(0, 2 * BLOCK, 20)
        before = noise(0, 3 * BLOCK)

        async def read() -> None:
            place.put("0.bin", before)
            storage = await opener(f"{place.root}/0.bin", place.settings)
            await storage.read(held.reads())
            place.put("0.bin", noise(9, 3 * BLOCK + size - 100))
            await storage.read(held.reads())
            await first_of(storage.read(fetched.reads()))

        with pytest.raises(CorruptSample, match=r"0\.bin has changed|0\.bin is shorter"):
            run(read())
        held.check([before])


class TestCachedInMemory(CachedContract):
    def test_reads_of_one_block_share_one_request(
        self, place: Place, opener: Any, metrics: Metrics, object_server: ObjectServer
    ) -> None:
        data = noise(0, 2 * BLOCK)
        place.put("0.bin", data)
        object_server.delay_s = 0.1
        everyone = [Targets().add(0, start, 30).add(0, BLOCK + start, 30) for start in range(50)]

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            async with asyncio.TaskGroup() as group:
                for targets in everyone:
                    group.create_task(storage.read(targets.reads()))

        run(read())
        for targets in everyone:
            targets.check([data])
        assert sum(method == "GET" for method, _ in object_server.requests) == 2
        assert (
            metrics.cache.num_misses,
            metrics.cache.num_joined,
            metrics.cache.num_blocks_fetched,
        ) == (2, 98, 2)

    def test_memory_below_one_block_is_told_with_both_sizes(
        self,
        place: Place,
        opener: Any,
        metrics: Metrics,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(type(self), "memory_bytes", BLOCK // 2)
        caplog.set_level(logging.WARNING, "gyre_daemon")
        place.put("0.bin", noise(0, 10_000))

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            for _ in range(3):
                await storage.read(Targets().add(0, 0, 10).reads())

        run(read())
        (told,) = (each for each in caplog.records if "below one block" in each.getMessage())
        facts = told.facts  # type: ignore[attr-defined]
        assert (facts["cache_memory_bytes"], facts["largest_block_bytes"]) == (BLOCK // 2, BLOCK)
        assert metrics.cache.num_hits == 0

    def test_a_cancelled_read_takes_nothing_from_the_others(
        self, place: Place, opener: Any, metrics: Metrics, object_server: ObjectServer
    ) -> None:
        data = noise(0, BLOCK)
        place.put("0.bin", data)
        object_server.delay_s = 0.1
        kept = Targets().add(0, 7, 30)

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            leaving = asyncio.create_task(storage.read(Targets().add(0, 0, 30).reads()))
            await asyncio.sleep(0.05)
            staying = asyncio.create_task(storage.read(kept.reads()))
            await asyncio.sleep(0)
            leaving.cancel()
            await staying

        run(read())
        kept.check([data])
        assert sum(method == "GET" for method, _ in object_server.requests) == 1

    def test_a_failed_request_fails_all_reads_that_wait_for_it_and_the_next_read_repeats_it(
        self, place: Place, opener: Any, metrics: Metrics, object_server: ObjectServer
    ) -> None:
        data = noise(0, BLOCK)
        place.put("0.bin", data)
        again = Targets().add(0, 7, 30)

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            object_server.faults.append(404)
            both = [storage.read(Targets().add(0, start, 30).reads()) for start in (0, 9)]
            for failed in await asyncio.gather(*both, return_exceptions=True):
                assert isinstance(failed, ExceptionGroup)
                assert failed.split(ShardMissing)[1] is None
            assert metrics.cache.memory_bytes == 0
            await storage.read(again.reads())

        run(read())
        again.check([data])

    def test_datasets_with_the_same_shards_share_their_blocks(
        self, place: Place, opener: Any, metrics: Metrics, object_server: ObjectServer
    ) -> None:
        """As one opened again does; each has its own errors."""
        data = noise(0, 2 * BLOCK)
        place.put("0.bin", data)
        targets = [Targets().add(0, start, 30).add(0, BLOCK + start, 30) for start in (5, 70)]
        late = Targets().add(0, 9, 30)

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            other = opened_again(storage)
            object_server.delay_s = 0.1
            object_server.faults.append(404)
            failing = asyncio.create_task(first_of(storage.read(Targets().add(0, 0, 30).reads())))
            await until(lambda: bool(storage._cache._fetching))
            await other.read(late.reads())
            with pytest.raises(ShardMissing):
                await failing
            before = metrics.cache.num_misses
            await storage.read(targets[0].reads())
            await other.read(targets[1].reads())
            assert metrics.cache.num_misses == before + 2

        run(read())
        for each in (*targets, late):
            each.check([data])

    def test_expected_blocks_are_present_before_they_are_read(
        self, place: Place, opener: Any, metrics: Metrics, object_server: ObjectServer
    ) -> None:
        place.put("0.bin", noise(0, 4 * BLOCK))

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            await storage.expect(BLOCK, np.array([2, 0]), Flow("job"))
            await until(lambda: metrics.cache.num_blocks_fetched == 2)
            await storage.read(
                replace(Targets().add(0, 5, 10).add(0, 2 * BLOCK, 10).reads(), block_bytes=BLOCK)
            )

        run(read())
        assert (metrics.cache.num_hits, metrics.cache.num_misses) == (2, 0)
        assert sum(method == "GET" for method, _ in object_server.requests) == 2


class TestCachedOnDisk(CachedContract):
    memory_bytes = 4 * BLOCK
    disk_bytes = 1 << 20

    def test_the_next_daemon_reads_no_object(
        self, place: Place, opener: Any, metrics: Metrics, object_server: ObjectServer
    ) -> None:
        data = noise(0, 6 * BLOCK)
        place.put("0.bin", data)
        all_blocks = Targets()
        for block in range(6):
            all_blocks.add(0, block * BLOCK + 11, 2000)

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            while metrics.cache.disk_bytes < 6 * BLOCK:
                await storage.read(all_blocks.reads())
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)

        run(read())
        before = len(object_server.requests)

        async def read_again() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            await storage.read(all_blocks.reads())
            assert storage.is_node_local

        run(read_again())
        all_blocks.check([data])
        assert [method for method, _ in object_server.requests[before:]] == ["HEAD"]

    def test_a_damaged_block_holds_up_no_other(
        self,
        place: Place,
        opener: Any,
        metrics: Metrics,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(type(self), "memory_bytes", BLOCK)
        monkeypatch.setattr(type(self), "disk_bytes", BLOCK)
        data = noise(0, 3 * BLOCK)
        place.put("0.bin", data)
        both = Targets().add(0, 0, 100), Targets().add(0, 2 * BLOCK, 100)

        def damage() -> None:
            (mirror,) = tmp_path.glob("cache/*.blocks")
            with mirror.open("r+b") as file:
                file.write(bytes(100))

        async def read() -> None:
            storage, job = await opener(f"{place.root}/0.bin", place.settings), Soon()

            async def one(targets: Targets) -> None:
                reads = targets.reads()
                await storage.read(replace(reads, block_bytes=BLOCK, next_use=job.next_use))

            for block in (0, 1):  # the first is on disk then, the second in memory
                await one(Targets().add(0, block * BLOCK, 100))
                await until(lambda: is_idle(storage._cache))
            damage()
            async with asyncio.timeout(10):
                await asyncio.gather(*map(one, both))

        run(read())
        for targets in both:
            targets.check([data])
        assert metrics.cache.num_corrupt == 1

    def test_a_full_disk_of_leftovers_holds_up_no_job(
        self, place: Place, opener: Any, metrics: Metrics, tmp_path: Path
    ) -> None:
        data = noise(0, 24 * BLOCK)
        place.put("0.bin", data)
        leftover = tmp_path / "cache" / "0.blocks"
        leftover.parent.mkdir(mode=0o700)
        leftover.write_bytes(noise(1, self.disk_bytes))

        async def read() -> None:
            storage, job = await opener(f"{place.root}/0.bin", place.settings), Soon()
            for blocks in (range(4), range(4, 5), range(5, 24)):
                targets = Targets()
                for block in blocks:
                    targets.add(0, block * BLOCK, BLOCK)
                reads = replace(targets.reads(), block_bytes=BLOCK, next_use=job.next_use)
                async with asyncio.timeout(10):
                    await storage.read(reads)
                targets.check([data])
            await until(lambda: is_idle(storage._cache))

        run(read())
        assert not leftover.exists()

    def test_a_dataset_that_is_opened_again_keeps_its_blocks_on_disk(
        self, place: Place, opener: Any, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(self), "memory_bytes", BLOCK)
        monkeypatch.setattr(type(self), "disk_bytes", 2 * BLOCK)
        data = noise(0, 3 * BLOCK)
        place.put("0.bin", data)

        async def read() -> None:
            before = await opener(f"{place.root}/0.bin", place.settings)
            again = opened_again(before)
            for storage in (before, before, again, before, again):
                for block in range(3):  # the last is not on disk, and so in memory
                    targets = Targets().add(0, block * BLOCK + 7, 2000)
                    await storage.read(targets.reads())
                    await until(lambda: is_idle(before._cache))
                    targets.check([data])

        run(read())
        assert (metrics.cache.num_corrupt, metrics.cache.num_blocks_fetched) == (0, 3)


class TestCachedAtOddTimes(CachedContract):
    """A cache that holds next to nothing."""

    memory_bytes = 2 * BLOCK
    disk_bytes = 3 * BLOCK

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("block_bytes", [0, BLOCK])
    def test_any_mix_of_readers(
        self, place: Place, opener: Any, metrics: Metrics, seed: int, block_bytes: int
    ) -> None:
        """Some give up half-way.

        The others get their bytes, the bounds hold throughout, and nothing stays pinned.
        """
        shards = [noise(number, 5 * BLOCK + 100 * number) for number in range(2)]
        for number, data in enumerate(shards):
            place.put(f"{number}.bin", data)
        generator = np.random.default_rng(seed)

        def bounds_hold() -> bool:
            return (
                metrics.cache.memory_bytes <= self.memory_bytes
                and metrics.cache.disk_bytes <= self.disk_bytes
            )

        async def read() -> None:
            storage = await opener(f"{place.root}/{{0,1}}.bin", place.settings)
            job = Job(generator)

            async def one() -> None:
                targets = Targets()
                for _ in range(int(generator.integers(1, 12))):
                    targets.add(
                        int(generator.integers(2)),
                        int(generator.integers(5 * BLOCK - 300)),
                        int(generator.integers(300)),
                    )
                reads = replace(
                    targets.reads(),
                    block_bytes=block_bytes,
                    next_use=job.next_use if block_bytes else None,
                )
                reading = asyncio.create_task(storage.read(reads))
                if generator.integers(4) == 0:
                    await asyncio.sleep(float(generator.random()) * 0.02)
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                else:
                    await reading
                    targets.check(shards)
                assert bounds_hold()

            for _ in range(8):
                async with asyncio.TaskGroup() as group:
                    for _ in range(6):
                        group.create_task(one())
            (opened,) = (opening.result().volume for opening in storage._views.values())
            await until(lambda: is_idle(storage._cache))
            assert not opened.num_pins.any()
            assert opened.on_disk.sum() * BLOCK <= self.disk_bytes
            assert metrics.cache.num_corrupt == 0

        run(read())


def test_large_blocks_in_place_of_scattered_small_ones_need_few_mappings(tmp_path: Path) -> None:
    """A process may have 65,530 mappings, and a cache more blocks than that."""
    num_blocks, large, metrics = 1500, 64 * BLOCK, Metrics()
    place, generator = LocalPlace(tmp_path), np.random.default_rng(0)
    data = noise(0, num_blocks * BLOCK), noise(1, num_blocks * BLOCK // 2)
    place.put("small/0.bin", data[0])
    place.put("large/0.bin", data[1])

    def whole(num_bytes: int, size: int) -> Targets:
        every = Targets()
        for start in range(0, num_bytes, size):
            every.add(0, start, min(size, num_bytes - start))
        return every

    def num_mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    async def read(executor: ThreadPoolExecutor) -> None:
        workers = FairExecutor(executor, 2)
        node = NodeCache(num_blocks * BLOCK, None, workers, metrics.cache)
        opener = StorageOpener(workers, EndpointOptions(16, 10.0), metrics)

        async def opened(name: str, size: int) -> CachedStorage:
            storage = await opener.open(parse_location(f"{place.root}/{name}"), {}, "*.bin")
            return CachedStorage(storage, name, node, lambda _: blocks_of(storage, size))

        job, small, other = Job(generator), whole(len(data[0]), BLOCK), whole(len(data[1]), large)
        await (await opened("small", BLOCK)).read(replace(small.reads(), next_use=job.next_use))
        assert metrics.cache.memory_bytes == num_blocks * BLOCK
        before = num_mappings()
        await (await opened("large", large)).read(replace(other.reads(), block_bytes=large))
        assert metrics.cache.num_evicted >= num_blocks // 2
        assert num_mappings() < before + 50
        other.check([data[1]])

    with ThreadPoolExecutor(2) as executor:
        run(read(executor))


@pytest.mark.parametrize("num_blocks", [10, 40])
def test_a_dataset_that_no_job_reads_any_more_makes_way(tmp_path: Path, num_blocks: int) -> None:
    metrics, generator = Metrics(), np.random.default_rng(0)
    place = LocalPlace(tmp_path)

    async def read(executor: ThreadPoolExecutor) -> None:
        workers = FairExecutor(executor, 2)
        node = NodeCache(10 * BLOCK, None, workers, metrics.cache)
        opener = StorageOpener(workers, EndpointOptions(16, 10.0), metrics)
        for name in ("left", "new"):
            place.put(f"{name}/0.bin", noise(0, num_blocks * BLOCK))
            storage = await opener.open(parse_location(f"{place.root}/{name}"), {}, "*.bin")
            cached = CachedStorage(storage, name, node, partial(blocks_of, storage), BLOCK)
            for _ in range(25):
                before = metrics.cache.num_hits
                for block in generator.permutation(num_blocks).tolist():
                    await cached.read(Targets().add(0, block * BLOCK, 10).reads())
        assert metrics.cache.num_hits - before == 10

    with ThreadPoolExecutor(2) as executor:
        run(read(executor))


def test_what_is_known_of_read_blocks_is_bounded(tmp_path: Path) -> None:
    metrics, place = Metrics(), LocalPlace(tmp_path)
    place.put("0.bin", noise(0, 100 * BLOCK))
    every = Targets()
    for block in range(100):
        every.add(0, block * BLOCK, BLOCK)

    async def read(executor: ThreadPoolExecutor) -> None:
        workers = FairExecutor(executor, 2)
        node = NodeCache(100 * BLOCK, None, workers, metrics.cache)
        opener = StorageOpener(workers, EndpointOptions(16, 10.0), metrics)
        storage = await opener.open(parse_location(place.root), {}, "*.bin")
        cached = CachedStorage(storage, "all", node, partial(blocks_of, storage), BLOCK)
        for _ in range(30):
            await cached.read(every.reads())
        assert metrics.cache.num_hits == 2900
        assert len(node._placement._half_read) <= 1024

    with ThreadPoolExecutor(2) as executor:
        run(read(executor))
