"""Files of a slow mount: read by a thread each, counted by the server of a file system of FUSE."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.errors import CorruptSample, GyreError, NotAllowed, ShardMissing
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor, Flow
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.mounts import FAST_S, MOUNTS, SLOW_S, Latency
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.contract.places import Targets, first_of, noise, openers, run, take_checksums
from tests.fuse_folder import FuseFolder, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

NUM, BYTES = 100, 300
FILES = {f"{number % 3}/{number:03}.bin": noise(number, BYTES) for number in range(NUM)}
IN_ORDER = [FILES[name] for name in sorted(FILES)]

Open = Callable[[Path], Awaitable[Storage]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "source"


@pytest.fixture
def mount(source: Path, tmp_path: Path) -> Iterator[FuseFolder]:
    (tmp_path / "mount").mkdir()
    with FuseFolder(source, tmp_path / "mount") as folder:
        MOUNTS._renew()  # a mount is otherwise noticed some seconds later
        yield folder


@pytest.fixture
def opened() -> Iterator[tuple[Open, Open]]:
    """Opens a folder as shards, and as single files."""
    with ThreadPoolExecutor(3) as executor:

        def opener() -> StorageOpener:
            made = StorageOpener(
                FairExecutor(executor, 3), EndpointOptions(16, 60.0, hedges=False), Metrics()
            )
            openers.append(made)
            return made

        async def shards(folder: Path) -> Storage:
            return await opener().open(parse_location(f"{folder}/**/*.bin"), {}, "*.bin")

        async def files(folder: Path) -> Storage:
            return (await opener().open_files(parse_location(str(folder)), {}, _is_bin))[0]

        yield shards, files


def _is_bin(name: str) -> bool:
    return name.endswith(".bin")


def of_all(start: int = 0, size: int = BYTES) -> Targets:
    """A read of each file, in no order."""
    targets = Targets()
    for number in np.random.default_rng(0).permutation(NUM).tolist():
        targets.add(number, start, size)
    return targets


def test_each_file_is_opened_and_read_once_and_many_at_once(
    mount: FuseFolder, opened: tuple[Open, Open]
) -> None:
    targets = of_all()

    async def read() -> None:
        storage = await opened[1](mount.path)
        assert not storage.is_node_local, "a file system of FUSE is slow until it is measured"
        mount.behave(delay_s=1.0)
        await storage.read(targets.reads())

    run(read())
    counts = mount.behave()
    targets.check(IN_ORDER)
    assert (counts["open"], counts["read"]) == (NUM, NUM)
    assert 16 < counts["most_reads"] <= 64


def test_a_sample_of_an_open_shard_takes_one_read(
    mount: FuseFolder, opened: tuple[Open, Open], source: Path
) -> None:
    data = noise(1, 1 << 20)
    (source / "0" / "000.bin").write_bytes(data)
    mount.behave(is_direct=1)

    async def read() -> tuple[dict[str, int], dict[str, int]]:
        storage = await opened[0](mount.path)
        await storage.read(Targets().add(0, 0, 100).reads())
        mount.behave(delay_s=1.0)
        before = mount.behave()
        await storage.read(targets.reads())
        return before, mount.behave()

    targets = Targets()
    for number in np.random.default_rng(0).permutation(200)[:NUM].tolist():
        targets.add(0, number * 5000, 4096)
    before, after = run(read())
    targets.check([data])
    assert after["read"] - before["read"] == NUM
    assert after["open"] == before["open"]
    assert 16 < after["most_reads"] <= 64


@pytest.mark.parametrize("kind", [0, 1], ids=["shards", "files"])
def test_a_mount_that_was_fast_is_noticed_within_sixteen_reads(
    mount: FuseFolder, opened: tuple[Open, Open], kind: int
) -> None:
    """The rest of the batch is read at once, and none of it twice."""
    targets = of_all()
    mount.behave(delay_s=0.2)

    async def read() -> None:
        storage = await opened[kind](mount.path)
        MOUNTS.at(mount.path).latency.is_slow = False
        await storage.read(replace(targets.reads(), flow=Flow("job")))
        assert not storage.is_node_local

    run(read())
    counts = mount.behave()
    targets.check(IN_ORDER)
    assert counts["most_reads"] > 16
    assert counts["read"] <= NUM + 16 * (kind == 0)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: list[tuple[Callable[[Path], object], type[GyreError], str]] = [
    (lambda path: path.unlink(), ShardMissing, "does not exist"),
    (lambda path: path.write_bytes(b"other"), CorruptSample, "has changed"),
    (lambda path: path.write_bytes(noise(7, BYTES)), CorruptSample, "has changed"),
    (replace_by_pipe, NotAllowed, "no regular file"),
    (lambda path: path.chmod(0o600), CorruptSample, "has changed since .* or was only touched"),
]


@pytest.mark.parametrize("kind", [0, 1], ids=["shards", "files"])
@pytest.mark.parametrize(
    ("change", "error", "words"), CHANGES, ids=["gone", "shorter", "other", "pipe", "touched"]
)
def test_files_that_changed_fail_as_they_do_on_a_fast_mount(
    mount: FuseFolder,
    opened: tuple[Open, Open],
    source: Path,
    kind: int,
    change: Callable[[Path], object],
    error: type[GyreError],
    words: str,
) -> None:
    async def read() -> None:
        storage = await opened[kind](mount.path)
        await asyncio.sleep(0.02)  # file systems count time in ticks
        change(source / sorted(FILES)[5])
        await first_of(storage.read(Targets().add(5, 10, 100).reads()))

    with pytest.raises(error, match=f"{sorted(FILES)[5]}.*{words}"):
        run(read())


def test_a_shard_that_was_only_touched_is_compared_with_its_checksums(
    mount: FuseFolder, opened: tuple[Open, Open], source: Path
) -> None:
    targets = of_all(10, 200)

    async def read() -> None:
        storage: Any = await opened[0](mount.path)
        take_checksums(storage)
        await asyncio.sleep(0.02)
        for name in FILES:
            (source / name).chmod(0o600)
        await storage.read(targets.reads())

    run(read())
    targets.check(IN_ORDER)


def test_a_folder_that_was_replaced_is_found_by_its_path(
    mount: FuseFolder, opened: tuple[Open, Open], source: Path
) -> None:
    async def read() -> None:
        storage = await opened[1](mount.path / "0")
        (source / "0").rename(source / "old")
        with pytest.raises(ShardMissing):
            await first_of(storage.read(Targets().add(0, 0, BYTES).reads()))
        (source / "old").rename(source / "0")
        await storage.read(Targets().add(0, 0, BYTES).reads())

    run(read())


class TestLatency:
    @staticmethod
    def measured(latency: Latency, seconds: float, times: int) -> bool:
        for _ in range(times):
            latency.add_since(time.perf_counter() - seconds)
        return latency.is_slow

    @pytest.mark.parametrize(
        ("file_system", "is_slow"),
        [
            ("nfs4", True),
            ("lustre", True),
            ("ceph", True),
            ("fuse", True),
            ("fuse.s3fs", True),
            ("9p", True),
            ("cifs", True),
            ("gpfs", True),
            ("beegfs", True),
            ("ext4", False),
            ("xfs", False),
            ("tmpfs", False),
            ("overlay", False),
            ("unknown", False),
        ],
    )
    def test_the_type_decides_until_something_is_measured(
        self, file_system: str, is_slow: bool
    ) -> None:
        latency = Latency(file_system)
        assert latency.is_slow == is_slow == (latency.guess == "slow")
        assert latency.median_s is None

    def test_it_follows_the_measure_within_sixteen_reads(self) -> None:
        latency = Latency("ext4")
        assert not self.measured(latency, FAST_S / 10, 100)
        assert self.measured(latency, SLOW_S * 2, 16)
        assert not self.measured(latency, FAST_S / 10, 16)

    def test_between_the_bounds_it_stays_what_it_was(self) -> None:
        for file_system in ("ext4", "nfs4"):
            latency = Latency(file_system)
            assert self.measured(latency, (FAST_S + SLOW_S) / 2, 100) == latency.is_slow
            assert latency.is_slow == (latency.guess == "slow")

    def test_a_few_late_reads_decide_nothing(self) -> None:
        latency = Latency("ext4")
        for _ in range(20):
            assert not self.measured(latency, FAST_S / 10, 11)
            assert not self.measured(latency, 1.0, 5)
