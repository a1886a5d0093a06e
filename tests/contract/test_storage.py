"""What every storage promises, tried on each: local files, S3, HTTP and any other fsspec driver."""

import asyncio
import itertools
import os
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
import numpy.typing as npt
import pytest
from gyre_daemon.errors import CorruptSample, GyreError, InvalidRequest, NotAllowed, ShardMissing, first_error
from gyre_daemon.metrics import Metrics
from gyre_daemon.storage import Reads, Storage, StorageOpener, local, parse_location, remote

from tests.conftest import S3Server
from tests.contract.objects import ObjectServer

Result = TypeVar("Result")
Bytes = npt.NDArray[np.uint8]

GUARD = 0xA5
_unique = itertools.count()


class Place:
    """Where the shards of a test lie.

    Attributes:
        root: a URI; shards lie below it.
        settings: for the driver.
    """

    root: str
    settings: Mapping[str, Any] = {}

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Store a shard."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove one."""


class LocalPlace(Place):
    def __init__(self, folder: Path) -> None:
        self.root, self._folder = str(folder), folder

    def put(self, name: str, data: bytes) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink()


class S3Place(Place):
    def __init__(self, server: S3Server) -> None:
        self._server, self._bucket = server, f"storage-{os.getpid()}-{next(_unique)}"
        self.root, self.settings = f"s3://{self._bucket}/data", server.storage_settings
        server.make_bucket(self._bucket)

    def put(self, name: str, data: bytes) -> None:
        self._server.put(self._bucket, f"data/{name}", data)

    def delete(self, name: str) -> None:
        self._server.delete(self._bucket, f"data/{name}")


class MemoryPlace(Place):
    """fsspec's own driver for tests: it is synchronous, and stands for all that are."""

    def __init__(self) -> None:
        self.root = f"memory://storage-{next(_unique)}/data"
        self._filesystem = fsspec.filesystem("memory")

    def put(self, name: str, data: bytes) -> None:
        self._filesystem.pipe_file(f"{self.root}/{name}", data)

    def delete(self, name: str) -> None:
        self._filesystem.rm_file(f"{self.root}/{name}")


class HttpPlace(Place):
    def __init__(self, server: ObjectServer) -> None:
        self._server, self._folder = server, f"/storage-{next(_unique)}/data"
        self.root = server.url + self._folder

    def put(self, name: str, data: bytes) -> None:
        self._server.objects[f"{self._folder}/{name}"] = data

    def delete(self, name: str) -> None:
        del self._server.objects[f"{self._folder}/{name}"]


class Targets:
    """Memory for reads, each piece between guards that nobody may touch."""

    def __init__(self) -> None:
        self._reads: list[tuple[int, int, int, int]] = []  # shard, start, size, sample
        self._memory: list[Bytes] = []

    def add(self, shard: int, start: int, size: int, sample: int | None = None) -> "Targets":
        self._reads.append((shard, start, size, len(self._reads) if sample is None else sample))
        self._memory.append(np.full(size + 32, GUARD, np.uint8))
        return self

    def reads(self) -> Reads:
        shard, start, size, sample = (np.array(column, np.int64) for column in zip(*self._reads, strict=True))
        target = np.array([memory.ctypes.data + 16 for memory in self._memory], np.uint64)
        return Reads(shard, start, size, target, sample, tuple(self._memory))

    def check(self, shards: list[bytes]) -> None:
        """Every target holds what its shard has there, and nothing beside it was touched."""
        for (shard, start, size, _), memory in zip(self._reads, self._memory, strict=True):
            assert memory[16 : 16 + size].tobytes() == shards[shard][start : start + size]
            assert (memory[:16] == GUARD).all()
            assert (memory[16 + size :] == GUARD).all()


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


async def first_of(work: Coroutine[Any, Any, Result]) -> Result:
    """An error may come in a group."""
    try:
        return await work
    except ExceptionGroup as errors:
        raise first_error(errors) from errors


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


class StorageContract:
    """Inherited by one class for each storage."""

    lists = True  # folders and globs
    notices_changes = True  # of a shard of the same length
    counts_at_server = False

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    @pytest.fixture
    def metrics(self) -> Metrics:
        return Metrics()

    @pytest.fixture
    def opener(self, metrics: Metrics) -> Iterator[Callable[..., Coroutine[Any, Any, Storage]]]:
        with ThreadPoolExecutor(3) as executor:

            def open_storage(uri: str, settings: Mapping[str, Any], pattern: str = "*.bin") -> Coroutine[Any, Any, Storage]:
                return StorageOpener(executor, 3, 16, metrics).open(parse_location(uri), settings, pattern)

            yield open_storage

    def names(self, opener: Any, place: Place, rest: str) -> list[str]:
        return [shard.name for shard in run(opener(place.root + rest, place.settings)).shards]

    def test_a_single_shard(self, place: Place, opener: Any) -> None:
        place.put("one.bin", b"12345")
        (shard,) = run(opener(f"{place.root}/one.bin", place.settings)).shards
        assert (shard.name, shard.size_bytes) == ("one.bin", 5)

    def test_a_folder_holds_what_matches_in_the_order_of_names(self, place: Place, opener: Any) -> None:
        if not self.lists:
            pytest.skip("this storage cannot list")
        for name in ("b.bin", "a.bin", "B.bin", "a-1.bin", "notes.txt", "deeper/c.bin", ".hidden.bin"):
            place.put(name, name.encode())
        expected = [".hidden.bin", "B.bin", "a-1.bin", "a.bin", "b.bin"]
        assert self.names(opener, place, "") == expected
        assert self.names(opener, place, "/") == expected
        assert [shard.size_bytes for shard in run(opener(place.root, place.settings)).shards] == [11, 5, 7, 5, 5]

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
        assert self.names(opener, place, "/part-{2,0,1}.bin") == ["part-2.bin", "part-0.bin", "part-1.bin"]

    def test_names_are_relative_to_the_folder_of_all(self, place: Place, opener: Any) -> None:
        for name in ("train/x/a.bin", "train/y/a.bin"):
            place.put(name, b"1")
        assert self.names(opener, place, "/train/{y,x}/a.bin") == ["y/a.bin", "x/a.bin"]

    def test_names_with_odd_letters(self, place: Place, opener: Any) -> None:
        names = ["a b.bin", "a%20b.bin", "a+b.bin", "naïve.bin"]
        for name in names:
            place.put(name, name.encode())
        for name in names:
            (shard,) = run(opener(f"{place.root}/{name}", place.settings)).shards
            assert (shard.name, shard.size_bytes) == (name, len(name.encode()))

    @pytest.mark.parametrize("rest", ["/none.bin", "/{none,one}.bin", "/one.bin/x.bin"])
    def test_what_is_not_there(self, place: Place, opener: Any, rest: str) -> None:
        place.put("one.bin", b"1")
        with pytest.raises(ShardMissing, match=r"none.bin|one.bin|\{none,one\}"):
            run(first_of(opener(place.root + rest, place.settings)))

    @pytest.mark.parametrize("rest", ["/*.none", "/none", "/none/*"])
    def test_what_matches_nothing(self, place: Place, opener: Any, rest: str) -> None:
        if not self.lists:
            pytest.skip("this storage cannot list")
        place.put("one.bin", b"1")
        with pytest.raises(ShardMissing):
            run(first_of(opener(place.root + rest, place.settings)))

    def test_reads_land_where_they_belong(self, place: Place, opener: Any, metrics: Metrics) -> None:
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
        targets = Targets().add(0, 100, 10, sample=0).add(0, 110, 0, sample=0).add(0, 600, 30, sample=0)
        targets.add(0, 20_000, 40, sample=0).add(0, 50, 60, sample=1).add(0, 60, 20, sample=1).add(0, 5, 1, sample=1)

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

    @pytest.mark.parametrize(("start", "size"), [(90, 20), (100, 1), (5000, 10), (-1, 10), (1 << 62, 1 << 62), (0, -1)])
    def test_reads_beyond_a_shard(self, place: Place, opener: Any, start: int, size: int) -> None:
        place.put("0.bin", noise(0, 100))
        memory = np.full(64, GUARD, np.uint8)
        one = Reads.into([memory[:10]], [0], [0])
        reads = Reads(one.shard, np.array([start]), np.array([size]), one.target, one.sample, one.memory)

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
        """Old and new data never mix: neither before the first read of a shard, nor after it."""
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
    def test_a_stream_is_the_whole_shard(self, place: Place, opener: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "_STREAM_CHUNK_BYTES", 1000)
        monkeypatch.setattr(remote, "_STREAM_CHUNK_BYTES", 1000)
        place.put("0.bin", noise(3, size))

        async def stream() -> list[bytes]:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            return [chunk async for chunk in storage.stream(0)]

        chunks = run(stream())
        assert b"".join(chunks) == noise(3, size)
        assert [len(chunk) for chunk in chunks[:-1]] == [1000] * (len(chunks) - 1)

    def test_a_stream_may_be_left(self, place: Place, opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "_STREAM_CHUNK_BYTES", 1000)
        monkeypatch.setattr(remote, "_STREAM_CHUNK_BYTES", 1000)
        place.put("0.bin", noise(3, 10_000))

        async def stream() -> None:
            chunks = (await opener(f"{place.root}/0.bin", place.settings)).stream(0)
            assert await anext(chunks) == noise(3, 1000)
            place.delete("0.bin")  # the chunk that is on its way fails, and nobody wants it
            await asyncio.sleep(0.05)
            await chunks.aclose()

        run(stream())

    def test_a_stream_of_a_shard_that_shrinks(self, place: Place, opener: Any) -> None:
        place.put("0.bin", noise(3, 1000))

        async def stream() -> list[bytes]:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            place.put("0.bin", noise(3, 500))
            return [chunk async for chunk in storage.stream(0)]

        with pytest.raises(CorruptSample, match=r"0\.bin"):
            run(stream())

    def test_a_stream_of_what_is_not_there(self, place: Place, opener: Any) -> None:
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
        counts = {(kind, outcome): count for (its, kind, outcome), count in metrics.storage.items() if its == scheme}
        assert counts["list", "ok"].num_requests == 1
        assert (counts["read", "ok"].num_requests, counts["read", "ok"].num_bytes) == (2, 30)
        assert ("read", "error") not in counts, "a read that cannot succeed is not tried"

    def test_many_tasks_share_a_storage(self, place: Place, opener: Any) -> None:
        shards = [noise(seed, 5000) for seed in range(4)]
        for index, data in enumerate(shards):
            place.put(f"{index}.bin", data)
        generator = np.random.default_rng(0)
        batches = [Targets() for _ in range(12)]
        for targets in batches:
            for _ in range(8):
                targets.add(int(generator.integers(4)), int(generator.integers(4000)), int(generator.integers(1000)))

        async def read() -> None:
            storage = await opener(f"{place.root}/{{0..3}}.bin", place.settings)
            async with asyncio.TaskGroup() as group:
                for targets in batches:
                    group.create_task(storage.read(targets.reads()))

        run(read())
        for targets in batches:
            targets.check(shards)


class TestLocal(StorageContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        (tmp_path / "data").mkdir()
        return LocalPlace(tmp_path / "data")

    def test_local_paths(self, place: Place, opener: Any, tmp_path: Path) -> None:
        place.put("a.bin", b"1")
        storage = run(opener(place.root, {}))
        assert storage.local_path(0) == tmp_path / "data" / "a.bin"
        assert storage.reads_in_bulk

    def test_a_file_replaced_after_its_first_read_is_read_on(self, place: Place, opener: Any, tmp_path: Path) -> None:
        """As it was indexed: its blocks are still there."""
        place.put("0.bin", noise(0, 1000))
        first, second = Targets().add(0, 0, 100), Targets().add(0, 500, 100)

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", {})
            await storage.read(first.reads())
            place.put("new.bin", noise(1, 1000))
            (tmp_path / "data" / "new.bin").rename(tmp_path / "data" / "0.bin")
            await storage.read(second.reads())
            place.delete("0.bin")
            await storage.read(second.reads())

        run(read())
        first.check([noise(0, 1000)])
        second.check([noise(0, 1000)])

    def test_descriptors_come_back(self, place: Place, opener: Any) -> None:
        for index in range(20):
            place.put(f"{index:02}.bin", noise(index, 10))

        async def read() -> int:
            storage = await opener(place.root, {})
            targets = Targets()
            for shard in range(20):
                targets.add(shard, 0, 10)
            await storage.read(targets.reads())
            return num_descriptors()

        before = num_descriptors()
        assert run(read()) >= before + 20
        assert num_descriptors() == before

    @pytest.mark.parametrize(
        ("make", "error"),
        [
            (os.mkfifo, NotAllowed),
            (lambda path: path.symlink_to("/dev/zero"), NotAllowed),
            (lambda path: path.symlink_to(path), ShardMissing),
            (lambda path: path.symlink_to(path.parent / "absent"), ShardMissing),
            (lambda path: path.mkdir(), ShardMissing),
        ],
        ids=["pipe", "device", "loop", "dangling", "empty folder"],
    )
    def test_what_is_no_file(self, place: Place, opener: Any, make: Any, error: type[GyreError], tmp_path: Path) -> None:
        make(tmp_path / "data" / "odd.bin")
        with pytest.raises(error, match=r"odd\.bin"):
            run(opener(f"{place.root}/odd.bin", {}))
        place.put("one.bin", b"1")
        assert self.names(opener, place, "") == ["one.bin"], "and in a folder it is passed over"

    def test_a_pipe_in_place_of_a_shard_keeps_nobody_waiting(self, place: Place, opener: Any, tmp_path: Path) -> None:
        place.put("0.bin", b"")
        path = tmp_path / "data" / "0.bin"

        async def read() -> None:
            path.write_bytes(b"12345")
            storage = await opener(str(path), {})
            path.unlink()
            os.mkfifo(path)
            await first_of(storage.read(Targets().add(0, 0, 5).reads()))

        with pytest.raises(CorruptSample, match="has changed"):
            run(read())

    @pytest.mark.parametrize(
        ("rest", "error"),
        [
            ("/" + "x" * 300 + ".bin", "cannot be read: File name too long"),
            ("/" + "d/" * 2000 + "x.bin", r"cannot be read: File name too long|no shard"),
            ("/a**b/*.bin", "no glob"),
        ],
    )
    def test_names_that_the_file_system_refuses(self, place: Place, opener: Any, rest: str, error: str) -> None:
        with pytest.raises(GyreError, match=error):
            run(opener(place.root + rest, {}))

    def test_a_file_whose_name_looks_like_a_glob(self, place: Place, opener: Any) -> None:
        place.put("a[1].bin", b"12")
        place.put("a1.bin", b"1")
        assert [shard.size_bytes for shard in run(opener(f"{place.root}/a[1].bin", {})).shards] == [2]

    def test_a_folder_that_may_not_be_read(self, place: Place, opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Root may read everything, so the system's answer is played."""
        place.put("0.bin", b"1")

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "is_dir", refuse)
        with pytest.raises(NotAllowed, match="grant its user read access"):
            run(opener(place.root, {}))


class TestLocalOneByOne(TestLocal):
    """Where a sandbox forbids the fast way."""

    @pytest.fixture(autouse=True)
    def no_gather(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "is_allowed", lambda: False)


class TestMemory(StorageContract):
    notices_changes = False

    @pytest.fixture
    def place(self) -> Iterator[Place]:
        place = MemoryPlace()
        yield place
        fsspec.filesystem("memory").store.clear()


class RemoteContract(StorageContract):
    """What only storages behind a server promise."""

    @abstractmethod
    def num_gets(self, place: Place) -> int:
        """Reads that the server has answered."""

    def test_a_sample_is_one_request(self, place: Place, opener: Any, metrics: Metrics) -> None:
        data = noise(0, 100_000)
        place.put("0.bin", data)
        targets = Targets()
        for sample in range(20):  # three fields side by side, headers of 512 bytes between them, as in a tar
            start = sample * 4000
            targets.add(0, start, 100, sample).add(0, start + 700, 1000, sample).add(0, start + 2300, 7, sample)

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            before = self.num_gets(place)
            await storage.read(targets.reads())
            assert self.num_gets(place) - before == 20

        run(read())
        targets.check([data])
        assert {labels.kind: count.num_requests for labels, count in metrics.storage.items()} == {"list": 1, "read": 20}


class TestS3(RemoteContract):
    @pytest.fixture
    def place(self, s3_server: S3Server) -> Place:
        return S3Place(s3_server)

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        self.server = s3_server

    def num_gets(self, place: Place) -> int:
        return self.server.num_requests("GET", f"{place.root.removeprefix('s3:/')}/")

    def test_keys_that_a_url_would_cut(self, place: Place, opener: Any) -> None:
        place.put("a#1.bin", b"1")
        place.put("b?2.bin", b"22")
        assert self.names(opener, place, "/a#1.bin") == ["a#1.bin"]
        assert self.names(opener, place, "") == ["a#1.bin", "b?2.bin"]

    def test_the_root_of_a_bucket(self, s3_server: S3Server, opener: Any) -> None:
        bucket = f"root-{os.getpid()}-{next(_unique)}"
        s3_server.make_bucket(bucket)
        s3_server.put(bucket, "b.bin", b"1")
        s3_server.put(bucket, "a.bin", b"1")
        s3_server.put(bucket, "x/c.bin", b"1")
        for uri in (f"s3://{bucket}", f"s3://{bucket}/", f"s3://{bucket}/*.bin", f"S3://{bucket}"):
            storage = run(opener(uri, s3_server.storage_settings))
            assert [shard.name for shard in storage.shards] == ["a.bin", "b.bin"]

    @pytest.mark.parametrize("rest", ["", "/x.bin", "/*.bin"])
    def test_no_such_bucket(self, s3_server: S3Server, opener: Any, rest: str) -> None:
        with pytest.raises(ShardMissing, match="no-such-bucket"):
            run(opener(f"s3://no-such-bucket{rest}", s3_server.storage_settings))

    def test_paths_that_no_key_can_have(self, place: Place, opener: Any) -> None:
        with pytest.raises(InvalidRequest, match="cannot list"):
            run(opener(f"{place.root}//x.bin", place.settings))

    def test_a_folder_beyond_one_page_of_the_listing(self, place: Place, opener: Any) -> None:
        for index in range(1005):
            place.put(f"{index:05}.bin", b"1")
        assert len(self.names(opener, place, "")) == 1005


class TestHttp(RemoteContract):
    lists = False

    @pytest.fixture
    def place(self, object_server: ObjectServer) -> Place:
        return HttpPlace(object_server)

    @pytest.fixture(autouse=True)
    def _server(self, object_server: ObjectServer) -> None:
        self.server = object_server

    def num_gets(self, place: Place) -> int:
        return sum(method == "GET" for method, _ in self.server.requests)
