"""Local files, read the fast way and the other."""

import asyncio
import errno
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.errors import (
    CorruptSample,
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import NO_JOB, FairExecutor
from gyre_daemon.storage.beneath import LocalFile, OpenBeneath
from gyre_daemon.storage.sources import local
from gyre_daemon.storage.sources.local import LocalStorage

from tests.contract.places import (
    FailingDisk,
    LocalPlace,
    Place,
    Targets,
    first_of,
    noise,
    num_descriptors,
    run,
    take_checksums,
)
from tests.contract.storage.storage_contract import StorageContract


class TestLocal(StorageContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        (tmp_path / "data").mkdir()
        return LocalPlace(tmp_path / "data")

    def test_local_paths(self, place: Place, opener: Any, tmp_path: Path) -> None:
        place.put("a.bin", b"1")
        storage = run(opener(place.root, {}))
        assert storage.local_file(0).path == tmp_path / "data" / "a.bin"
        assert storage.is_node_local

    @pytest.mark.parametrize("rest", ["", "/*.bin", "/**/*.bin"])
    def test_a_name_that_is_not_utf_8_is_refused_by_name(
        self, place: Place, opener: Any, rest: str
    ) -> None:
        place.put("good.bin", b"1")
        Path(os.fsdecode(place.root.encode() + b"/\xff.bin")).write_bytes(b"2")
        with pytest.raises(InvalidRequest, match=r"/\\xff\.bin is not UTF-8; rename the file"):
            run(opener(place.root + rest, {}))

    def test_a_file_replaced_or_deleted_after_its_first_read(
        self, place: Place, opener: Any, tmp_path: Path
    ) -> None:
        """By one as large and as old, too.

        Its bytes could still be read, but the dataset is not what it was.
        """
        place.put("0.bin", noise(0, 1000))
        path = tmp_path / "data" / "0.bin"
        first, second = Targets().add(0, 0, 100), Targets().add(0, 500, 100)

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", {})
            take_checksums(storage)
            await storage.read(first.reads())
            place.put("new.bin", noise(1, 1000))
            old, new = path.with_name("old.bin"), path.with_name("new.bin")
            os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
            await asyncio.sleep(0.01)  # file systems count time in ticks
            path.rename(old)
            new.rename(path)
            with pytest.raises(CorruptSample, match=r"shard 0\.bin has changed"):
                await first_of(storage.read(second.reads()))
            place.delete("0.bin")
            with pytest.raises(ShardMissing, match=r"shard 0\.bin does not exist"):
                await first_of(storage.read(second.reads()))
            old.rename(path)
            path.chmod(0o600)
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

        gc.collect()  # files of earlier tests
        before = num_descriptors()
        assert run(read()) >= before + 20
        deadline = time.monotonic() + 120
        while num_descriptors() > before:  # a worker thread may still be letting go of its last job
            assert time.monotonic() < deadline
            gc.collect()
            time.sleep(0.01)

    def test_more_shards_than_may_be_open(
        self, place: Place, opener: Any, few_descriptors: int
    ) -> None:
        """In one batch and in many: the descriptors of the process are left to others."""
        num_shards = few_descriptors
        shards = [noise(index, 50) for index in range(num_shards)]
        for index, data in enumerate(shards):
            place.put(f"{index:04}.bin", data)
        generator = np.random.default_rng(0)
        batches = [Targets() for _ in range(20)]
        for targets in batches:
            for _ in range(30):
                targets.add(int(generator.integers(num_shards)), int(generator.integers(25)), 25)
        for index in range(num_shards):
            batches[0].add(index, 10, 20)

        async def read() -> None:
            storage = await opener(place.root, {})
            async with asyncio.TaskGroup() as group:
                for targets in batches:
                    group.create_task(storage.read(targets.reads()))
            assert num_descriptors() < few_descriptors * 3 // 4

        run(read())
        for targets in batches:
            targets.check(shards)

    @pytest.mark.parametrize(
        ("make", "error"),
        [
            (os.mkfifo, NotAllowed),
            (lambda path: path.symlink_to(path), ShardMissing),
            (lambda path: path.symlink_to(path.parent / "absent"), ShardMissing),
            (lambda path: path.mkdir(), ShardMissing),
        ],
        ids=["pipe", "loop", "dangling", "empty folder"],
    )
    def test_what_is_no_file(
        self, place: Place, opener: Any, make: Any, error: type[GyreError], tmp_path: Path
    ) -> None:
        make(tmp_path / "data" / "odd.bin")
        with pytest.raises(error, match=r"odd\.bin"):
            run(opener(f"{place.root}/odd.bin", {}))
        place.put("one.bin", b"1")
        assert self.names(opener, place, "") == ["one.bin"], "and in a folder it is passed over"

    def test_a_pipe_in_place_of_a_shard_keeps_nobody_waiting(
        self, place: Place, opener: Any, tmp_path: Path
    ) -> None:
        place.put("0.bin", b"")
        path = tmp_path / "data" / "0.bin"

        async def read() -> None:
            path.write_bytes(b"12345")
            storage = await opener(str(path), {})
            path.unlink()
            os.mkfifo(path)
            await first_of(storage.read(Targets().add(0, 0, 5).reads()))

        with pytest.raises(NotAllowed, match=r"0\.bin is no regular file"):
            run(read())

    @pytest.mark.parametrize(
        ("rest", "error"),
        [
            ("/" + "x" * 300 + ".bin", "cannot be read: File name too long"),
            ("/" + "d/" * 2000 + "x.bin", r"cannot be read: File name too long|no shard"),
            ("/a**b/*.bin", r"no valid glob: `\*\*` can only be an entire path component"),
        ],
    )
    def test_names_that_the_file_system_refuses(
        self, place: Place, opener: Any, rest: str, error: str
    ) -> None:
        with pytest.raises(GyreError, match=error):
            run(opener(place.root + rest, {}))

    def test_a_file_whose_name_looks_like_a_glob(self, place: Place, opener: Any) -> None:
        place.put("a[1].bin", b"12")
        place.put("a1.bin", b"1")
        assert [shard.size_bytes for shard in run(opener(f"{place.root}/a[1].bin", {})).shards] == [
            2
        ]

    def test_a_folder_that_may_not_be_read(
        self, place: Place, opener: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Root may read everything, so the system's answer is played."""
        place.put("0.bin", b"1")

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "is_dir", refuse)
        with pytest.raises(NotAllowed, match="grant its user read access"):
            run(opener(place.root, {}))

    def test_a_shard_that_may_not_be_read_is_told_at_opening(
        self, place: Place, opener: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Any of them, and not only those that the first batch needs.

        Root may read everything, so the answer is played.
        """
        place.put("0.bin", b"1")
        place.put("1.bin", b"1")
        opened = LocalFile.open

        def open_some(file: LocalFile, open_beneath: OpenBeneath | None = None) -> int:
            if file.name == "1.bin":
                raise PermissionError(errno.EACCES, "Permission denied")
            return opened(file, open_beneath)

        monkeypatch.setattr(LocalFile, "open", open_some)
        with pytest.raises(
            NotAllowed, match=r"may not read shard 1\.bin; grant its user read access"
        ):
            run(opener(place.root, {}))

    def test_a_disk_that_loses_its_blocks(self, opener: Any, failing_disk: FailingDisk) -> None:
        """The shard has not changed and cannot be read: the error names it, and nothing dies."""
        (failing_disk.folder / "0.bin").write_bytes(noise(0, 4 << 20))
        failing_disk.evict("0.bin")

        async def read() -> None:
            storage = await opener(f"{failing_disk.folder}/0.bin", {})
            failing_disk.fail()
            await first_of(
                storage.read(Targets().add(0, 1 << 20, 5000).add(0, 3 << 20, 5000).reads())
            )

        with pytest.raises(
            StorageUnavailable, match=r"0\.bin has not changed and yet cannot be read"
        ):
            run(read())


class TestLocalOneByOne(TestLocal):
    """Local files in a sandbox that forbids `gather`."""

    @pytest.fixture(autouse=True)
    def no_gather(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "is_allowed", lambda: False)


def test_reads_are_cut_for_several_threads_only_where_all_have_nothing_else_to_do() -> None:
    async def cuts() -> list[list[int]]:
        with ThreadPoolExecutor(3) as executor:
            workers, done = FairExecutor(executor, 3), threading.Event()
            reads = LocalStorage([], [], workers, Metrics())
            found = [
                reads.cuts(12, 64 << 20),
                reads.cuts(12, 1 << 20),
                reads.cuts(2, 64 << 20),
            ]
            busy = asyncio.create_task(workers.run(NO_JOB, 0, 0, done.wait))
            await asyncio.sleep(0)
            found.append(reads.cuts(12, 64 << 20))
            done.set()
            await busy
            return [*found, reads.cuts(12, 64 << 20)]

    assert run(cuts()) == [[0, 4, 8, 12], [0, 12], [0, 1, 2], [0, 12], [0, 4, 8, 12]]
