"""What every storage promises. Inherited by one class of tests for each."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from gyre_daemon.errors import CorruptSample, ShardMissing
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage import reads
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.reads import Reads, Storage
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers

from tests.contract.places import GUARD, Place, Targets, first_of, noise, openers, run


class StorageContract:
    """Inherited by one class for each storage."""

    lists = True  # folders and globs
    notices_changes = True  # of a shard of the same length

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    @pytest.fixture
    def metrics(self) -> Metrics:
        return Metrics()

    @pytest.fixture
    def copy_workers(self) -> CopyWorkers:
        return NO_COPY_WORKERS

    @pytest.fixture
    def opener(
        self, metrics: Metrics, copy_workers: CopyWorkers
    ) -> Iterator[Callable[..., Coroutine[Any, Any, Storage]]]:
        with ThreadPoolExecutor(3) as executor:

            async def open_storage(
                uri: str, settings: Mapping[str, Any], pattern: str = "*.bin"
            ) -> Storage:
                opener = StorageOpener(
                    FairExecutor(executor, 3), EndpointOptions(16, 10.0), metrics, copy_workers
                )
                openers.append(opener)
                return self.seen(
                    await opener.open(parse_location(uri), settings, pattern), copy_workers
                )

            yield open_storage
        openers.clear()

    def seen(self, storage: Storage, copy_workers: CopyWorkers) -> Storage:
        """What the tests read from."""
        return storage

    def names(self, opener: Any, place: Place, rest: str) -> list[str]:
        return [shard.name for shard in run(opener(place.root + rest, place.settings)).shards]

    def test_a_single_shard(self, place: Place, opener: Any) -> None:
        place.put("one.bin", b"12345")
        (shard,) = run(opener(f"{place.root}/one.bin", place.settings)).shards
        assert (shard.name, shard.size_bytes) == ("one.bin", 5)

    def test_the_matching_files_of_a_folder_are_sorted_by_name(
        self, place: Place, opener: Any
    ) -> None:
        if not self.lists:
            pytest.skip("this storage cannot list")
        for name in (
            "b.bin",
            "a.bin",
            "B.bin",
            "a-1.bin",
            "notes.txt",
            "deeper/c.bin",
            ".hidden.bin",
        ):
            place.put(name, name.encode())
        expected = ["B.bin", "a-1.bin", "a.bin", "b.bin"]  # a hidden file holds no samples
        assert self.names(opener, place, "") == expected
        assert self.names(opener, place, "/") == expected
        assert [shard.size_bytes for shard in run(opener(place.root, place.settings)).shards] == [
            5,
            7,
            5,
            5,
        ]

    def test_a_glob_may_span_folders(self, place: Place, opener: Any) -> None:
        if not self.lists:
            pytest.skip("this storage cannot list")
        for name in ("x/a.bin", "x-1/a.bin", "y/b.bin", "y/c.txt", "a.bin", "x/deeper/a.bin"):
            place.put(name, b"1")
        assert self.names(opener, place, "/*/*.bin") == ["x-1/a.bin", "x/a.bin", "y/b.bin"]
        assert self.names(opener, place, "/x/[ab].bin") == ["a.bin"]

    def test_a_brace_list_keeps_its_order(self, place: Place, opener: Any) -> None:
        for name in ("part-0.bin", "part-1.bin", "part-2.bin"):
            place.put(name, b"1")
        assert self.names(opener, place, "/part-{2,0,1}.bin") == [
            "part-2.bin",
            "part-0.bin",
            "part-1.bin",
        ]

    def test_names_are_relative_to_the_common_folder(self, place: Place, opener: Any) -> None:
        for name in ("train/x/a.bin", "train/y/a.bin"):
            place.put(name, b"1")
        assert self.names(opener, place, "/train/{y,x}/a.bin") == ["y/a.bin", "x/a.bin"]

    def test_names_with_unusual_characters(self, place: Place, opener: Any) -> None:
        names = ["a b.bin", "a%20b.bin", "a+b.bin", "naïve.bin"]
        for name in names:
            place.put(name, name.encode())
        for name in names:
            (shard,) = run(opener(f"{place.root}/{name}", place.settings)).shards
            assert (shard.name, shard.size_bytes) == (name, len(name.encode()))

    @pytest.mark.parametrize("rest", ["/none.bin", "/{none,one}.bin", "/one.bin/x.bin"])
    def test_a_path_that_does_not_exist(self, place: Place, opener: Any, rest: str) -> None:
        place.put("one.bin", b"1")
        with pytest.raises(ShardMissing, match=r"none.bin|one.bin|\{none,one\}"):
            run(first_of(opener(place.root + rest, place.settings)))

    @pytest.mark.parametrize("rest", ["/*.none", "/none", "/none/*"])
    def test_a_location_without_a_matching_file(self, place: Place, opener: Any, rest: str) -> None:
        if not self.lists:
            pytest.skip("this storage cannot list")
        place.put("one.bin", b"1")
        with pytest.raises(ShardMissing):
            run(first_of(opener(place.root + rest, place.settings)))

    @pytest.mark.parametrize(
        ("names", "text", "fix"),
        [
            (["x/a.bin", "y/b.bin"], r"such as x/a\.bin: name \S+/\*\*/\*\.bin$", "/**/*.bin"),
            (["x/y/a.bin"], r"such as x/y/a\.bin: name \S+/\*\*/\*\.bin$", "/**/*.bin"),
            (["test/a.bin", "train/b.bin"], "such as [^ ]+/train, or ", "/train"),
            (["train/x/a.bin"], r"such as \S+/train/\*\*/\*\.bin, or", "/train/**/*.bin"),
            (["a.txt", ".b.txt"], "but 1 other, such as a.txt; correct `format`", ""),
        ],
    )
    def test_a_folder_without_a_shard_says_what_would_match(
        self, place: Place, opener: Any, names: list[str], text: str, fix: str
    ) -> None:
        if not self.lists:
            pytest.skip("this storage cannot list")
        for name in names:
            place.put(name, b"1")
        with pytest.raises(ShardMissing, match=text):
            run(first_of(opener(place.root, place.settings)))
        assert not fix or run(opener(place.root + fix, place.settings)).shards

    def test_reads_land_where_they_belong(
        self, place: Place, opener: Any, metrics: Metrics
    ) -> None:
        shards = [noise(seed, size) for seed, size in enumerate((50_000, 70_001, 3))]
        for index, data in enumerate(shards):
            place.put(f"{index}.bin", data)
        generator = np.random.default_rng(7)
        targets = Targets()
        for _ in range(150):
            shard = int(generator.integers(3))
            start, stop = sorted(generator.integers(0, len(shards[shard]) + 1, 2).tolist())
            targets.add(shard, start, min(stop - start, 900))
        targets.add(0, 0, 50_000).add(1, 70_000, 1).add(2, 0, 3).add(0, 10, 0).add(2, 3, 0)

        async def read() -> None:
            storage = await opener(f"{place.root}/{{0,1,2}}.bin", place.settings)
            await storage.read(targets.reads())

        run(read())
        targets.check(shards)

    def test_fields_of_a_sample_may_be_scattered(self, place: Place, opener: Any) -> None:
        data = noise(1, 40_000)
        place.put("0.bin", data)
        targets = (
            Targets().add(0, 100, 10, sample=0).add(0, 110, 0, sample=0).add(0, 600, 30, sample=0)
        )
        targets.add(0, 20_000, 40, sample=0).add(0, 50, 60, sample=1).add(0, 60, 20, sample=1).add(
            0, 5, 1, sample=1
        )

        async def read() -> None:
            await (await opener(f"{place.root}/0.bin", place.settings)).read(targets.reads())

        run(read())
        targets.check([data])

    def test_nothing_to_read(self, place: Place, opener: Any, metrics: Metrics) -> None:
        place.put("0.bin", b"")
        place.put("1.bin", b"1")

        async def read() -> None:
            storage = await opener(f"{place.root}/{{0,1}}.bin", place.settings)
            await storage.read(Targets().add(0, 0, 0).add(1, 1, 0).reads())

        run(read())
        assert not [labels for labels in metrics.storage if labels.kind == "read"]

    @pytest.mark.parametrize(
        ("start", "size"), [(90, 20), (100, 1), (5000, 10), (-1, 10), (1 << 62, 1 << 62), (0, -1)]
    )
    def test_reads_beyond_a_shard(self, place: Place, opener: Any, start: int, size: int) -> None:
        place.put("0.bin", noise(0, 100))
        memory = np.full(64, GUARD, np.uint8)
        one = Reads.into([memory[:10]], [0], [0])
        reads = Reads(
            one.shard, np.array([start]), np.array([size]), one.target, one.sample, one.memory
        )

        async def read() -> None:
            await first_of((await opener(f"{place.root}/0.bin", place.settings)).read(reads))

        with pytest.raises(CorruptSample, match=r"shard 0\.bin is shorter than its index says"):
            run(read())
        assert (memory == GUARD).all()

    def test_a_shard_that_vanishes(self, place: Place, opener: Any) -> None:
        place.put("0.bin", noise(0, 100))

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            place.delete("0.bin")
            await first_of(storage.read(Targets().add(0, 0, 10).reads()))

        with pytest.raises(ShardMissing, match=r"0\.bin"):
            run(read())

    @pytest.mark.parametrize("size", [100, 50, 150])
    def test_a_shard_that_changes(self, place: Place, opener: Any, size: int) -> None:
        """Old and new data never mix, neither before the first read of a shard nor after it."""
        if size >= 100 and not self.notices_changes:
            pytest.skip("this storage tells no versions")
        place.put("0.bin", noise(0, 100))

        async def read(num_before: int) -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            for _ in range(num_before):
                await storage.read(Targets().add(0, 40, 20).reads())
            await asyncio.sleep(0.01)  # file systems count time in ticks
            place.put("0.bin", noise(9, size))
            await first_of(storage.read(Targets().add(0, 40, 20).reads()))

        for num_before in (0, 1):
            place.put("0.bin", noise(0, 100))
            with pytest.raises(CorruptSample, match=r"0\.bin has changed|0\.bin is shorter"):
                run(read(num_before))

    @pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 4321])
    def test_a_stream_is_the_whole_shard(
        self, place: Place, opener: Any, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reads, "STREAM_CHUNK_BYTES", 1000)
        place.put("0.bin", noise(3, size))

        async def stream() -> list[bytes]:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            return [chunk async for chunk in storage.stream(0)]

        chunks = run(stream())
        assert b"".join(chunks) == noise(3, size)
        assert [len(chunk) for chunk in chunks[:-1]] == [1000] * (len(chunks) - 1)

    def test_a_stream_may_be_abandoned(
        self, place: Place, opener: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reads, "STREAM_CHUNK_BYTES", 1000)
        place.put("0.bin", noise(3, 10_000))

        complaints: list[object] = []

        async def stream() -> None:
            asyncio.get_running_loop().set_exception_handler(
                lambda _, context: complaints.append(context)
            )
            chunks = (await opener(f"{place.root}/0.bin", place.settings)).stream(0)
            assert await anext(chunks) == noise(3, 1000)
            place.delete("0.bin")  # the chunk that is on its way fails, and nobody wants it
            await asyncio.sleep(0.05)
            await chunks.aclose()
            gc.collect()

        run(stream())
        assert complaints == []

    def test_a_stream_of_a_shard_that_shrinks(self, place: Place, opener: Any) -> None:
        place.put("0.bin", noise(3, 1000))

        async def stream() -> list[bytes]:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            place.put("0.bin", noise(3, 500))
            return [chunk async for chunk in storage.stream(0)]

        with pytest.raises(CorruptSample, match=r"0\.bin"):
            run(stream())

    def test_a_stream_of_a_missing_shard(self, place: Place, opener: Any) -> None:
        place.put("0.bin", noise(3, 1000))

        async def stream() -> list[bytes]:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            place.delete("0.bin")
            return [chunk async for chunk in storage.stream(0)]

        with pytest.raises(ShardMissing, match=r"0\.bin"):
            run(stream())

    def test_requests_are_counted(self, place: Place, opener: Any, metrics: Metrics) -> None:
        place.put("0.bin", noise(0, 1000))

        async def read() -> str:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            await storage.read(Targets().add(0, 0, 10).add(0, 500, 20).reads())
            with pytest.raises(CorruptSample):
                await first_of(storage.read(Targets().add(0, 995, 10).reads()))
            _ = [chunk async for chunk in storage.stream(0)]
            return next(iter(metrics.storage)).scheme

        scheme = run(read())
        counts = {
            (kind, outcome): count
            for (its, kind, outcome), count in metrics.storage.items()
            if its == scheme
        }
        assert counts["list", "ok"].num_requests == 1
        assert (counts["read", "ok"].num_requests, counts["read", "ok"].num_bytes) == (3, 1030)
        assert ("read", "error") not in counts, "a read that cannot succeed is not tried"

    def test_many_tasks_share_a_storage(self, place: Place, opener: Any) -> None:
        shards = [noise(seed, 5000) for seed in range(4)]
        for index, data in enumerate(shards):
            place.put(f"{index}.bin", data)
        generator = np.random.default_rng(0)
        batches = [Targets() for _ in range(12)]
        for targets in batches:
            for _ in range(8):
                targets.add(
                    int(generator.integers(4)),
                    int(generator.integers(4000)),
                    int(generator.integers(1000)),
                )

        async def read() -> None:
            storage = await opener(f"{place.root}/{{0..3}}.bin", place.settings)
            async with asyncio.TaskGroup() as group:
                for targets in batches:
                    group.create_task(storage.read(targets.reads()))

        run(read())
        for targets in batches:
            targets.check(shards)
