"""Local shards that are touched, overwritten or put back while they are served.

The bytes decide, and never the times alone.
"""

import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.errors import CorruptSample, StorageUnavailable
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage import open_shards
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.reads import Reads, Storage
from gyre_daemon.storage.sources import local
from gyre_daemon.storage.sources.local import LocalStorage
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.contract.places import Targets, first_of, noise, openers, run, take_checksums

SIZE = 5000
BLOCK = 1000
DATA = noise(0, SIZE)

Work = Callable[[LocalStorage, Path], Awaitable[None]]


@pytest.fixture
def opener() -> Iterator[Callable[[str], Coroutine[Any, Any, Storage]]]:
    with ThreadPoolExecutor(3) as executor:

        async def open_storage(uri: str) -> Storage:
            opener = StorageOpener(FairExecutor(executor, 3), EndpointOptions(16, 10.0), Metrics())
            openers.append(opener)
            return await opener.open(parse_location(uri), {}, "*.bin")

        yield open_storage
    openers.clear()


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(open_shards, "BLOCK_BYTES", BLOCK)
    path = tmp_path / "0.bin"
    path.write_bytes(DATA)
    return path


def read(opener: Any, shard: Path, work: Work, *, has_checksums: bool = True) -> None:
    async def whole() -> None:
        storage = await opener(str(shard))
        if has_checksums:
            take_checksums(storage)
        await serves(storage)
        await work(storage, shard)

    run(whole())


def touch(path: Path) -> None:
    path.chmod(0o600)


def put_back(backup: Path, path: Path, *, in_place: bool) -> None:
    if not in_place:
        path.unlink()
    shutil.copy2(backup, path)


async def serves(storage: LocalStorage, start: int = 0, size: int = SIZE) -> None:
    targets = Targets().add(0, start, size)
    await first_of(storage.read(targets.reads()))
    targets.check([DATA])


def overwrite(path: Path, data: bytes, start: int = 0) -> None:
    """Overwrite a file in place, and set its modification time back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_shard_overwritten_with_its_time_set_back(
    opener: Any, shard: Path, has_checksums: bool
) -> None:
    async def work(storage: LocalStorage, path: Path) -> None:
        overwrite(path, noise(9, 100), start=4200)
        with pytest.raises(
            CorruptSample, match=r"shard 0\.bin has changed since the dataset was opened"
        ):
            await serves(storage)
        with pytest.raises(
            CorruptSample, match=r"shard 0\.bin has changed since the dataset was opened"
        ):
            await serves(storage, 4250, 10)

    read(opener, shard, work, has_checksums=has_checksums)


def test_unchanged_blocks_are_served(opener: Any, shard: Path) -> None:
    async def work(storage: LocalStorage, path: Path) -> None:
        overwrite(path, noise(9, 100), start=4200)
        await serves(storage, 0, 4000)
        with pytest.raises(CorruptSample, match="has changed"):
            await serves(storage, 3999, 2)
        overwrite(path, DATA[4200:4300], start=4200)
        await serves(storage)

    read(opener, shard, work)


@pytest.mark.parametrize(
    "change",
    [
        touch,
        lambda path: path.with_name("link").hardlink_to(path),
        lambda path: path.rename(path.with_name("aside")).rename(path),
        lambda path: overwrite(path, DATA[:10]),
    ],
    ids=["mode", "link", "name", "same bytes"],
)
def test_shards_that_are_only_touched_stay_served(
    opener: Any, shard: Path, change: Callable[[Path], None]
) -> None:
    async def work(storage: LocalStorage, path: Path) -> None:
        change(path)
        await serves(storage)

    read(opener, shard, work)


def test_a_compared_shard_is_not_read_a_second_time(
    opener: Any, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def count(descriptor: int, size: int, offset: int) -> bytes:
        compared.append(offset)
        buffer = bytearray(size)
        return bytes(buffer[: os.preadv(descriptor, [buffer], offset)])

    async def work(storage: LocalStorage, path: Path) -> None:
        touch(path)
        monkeypatch.setattr(os, "pread", count)
        await serves(storage, 1500, 1000)
        await serves(storage, 0, 2500)
        await serves(storage, 2600, 10)
        assert compared == [1000, 2000, 0]
        await serves(storage)
        await serves(storage)
        assert compared == [1000, 2000, 0, 3000, 4000]

    read(opener, shard, work)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "a new file"])
def test_a_restored_shard_is_served_again(opener: Any, shard: Path, in_place: bool) -> None:
    backup = shard.with_name("backup")
    shutil.copy2(shard, backup)

    async def work(storage: LocalStorage, path: Path) -> None:
        os.truncate(path, 100)
        with pytest.raises(CorruptSample, match=r"0\.bin has changed .* restore it with its times"):
            await serves(storage)
        put_back(backup, path, in_place=in_place)
        await serves(storage)
        os.truncate(path, 100)
        with pytest.raises(CorruptSample, match=r"0\.bin has changed"):
            await serves(storage)

    read(opener, shard, work)


def test_another_file_of_the_same_size_and_time_is_refused(opener: Any, shard: Path) -> None:
    backup = shard.with_name("backup")
    shutil.copy2(shard, backup)
    overwrite(backup, b"other")

    async def work(storage: LocalStorage, path: Path) -> None:
        backup.rename(path)
        with pytest.raises(CorruptSample, match="has changed"):
            await serves(storage)
        await serves(storage, 1000, 4000)

    read(opener, shard, work)


def test_a_shard_that_changed_between_its_listing_and_its_first_read(
    opener: Any, shard: Path
) -> None:
    async def whole() -> None:
        storage = await opener(str(shard))
        take_checksums(storage)
        overwrite(shard, b"other")
        await serves(storage, 1000, 4000)
        with pytest.raises(CorruptSample, match="has changed"):
            await serves(storage)

    run(whole())


def test_without_checksums_the_error_says_that_a_change_cannot_be_ruled_out(
    opener: Any, shard: Path
) -> None:
    async def work(storage: LocalStorage, path: Path) -> None:
        touch(path)
        with pytest.raises(
            CorruptSample, match=r"or was only touched.* no checksums .* index the dataset again"
        ):
            await serves(storage)

    read(opener, shard, work, has_checksums=False)


def test_checksums_are_only_taken_of_what_was_listed(opener: Any, shard: Path) -> None:
    async def whole() -> None:
        storage = await opener(str(shard))
        touch(shard)
        assert storage.checksums.take(0, threading.Event()) is None

        class Changing(threading.Event):
            def is_set(self) -> bool:
                os.utime(shard)
                return False

        again = await opener(str(shard))
        os.truncate(shard, 20 * BLOCK)
        again = await opener(str(shard))
        assert again.checksums.take(0, Changing()) is None

    run(whole())


def test_a_shard_that_is_written_to_all_the_time(
    opener: Any, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = local.LocalStorage._copy

    def copy_and_touch(self: LocalStorage, reads: Reads, opened: Any) -> int | None:
        failed = copy(self, reads, opened)
        touch(shard)
        return failed

    async def work(storage: LocalStorage, path: Path) -> None:
        touch(path)
        monkeypatch.setattr(local.LocalStorage, "_copy", copy_and_touch)
        with pytest.raises(StorageUnavailable, match="is being changed while it is read"):
            await serves(storage)

    read(opener, shard, work)


def test_many_shards_some_of_which_were_touched(opener: Any, tmp_path: Path) -> None:
    shards = [noise(seed, SIZE) for seed in range(6)]
    for number, data in enumerate(shards):
        (tmp_path / f"{number}.bin").write_bytes(data)

    async def whole() -> None:
        storage = await opener(str(tmp_path))
        take_checksums(storage)
        generator = np.random.default_rng(0)
        for touched in ((), (2,), (0, 5), range(6)):
            for number in touched:
                (tmp_path / f"{number}.bin").chmod(0o600)
            targets = Targets()
            for _ in range(40):
                targets.add(int(generator.integers(6)), int(generator.integers(SIZE - 900)), 900)
            await first_of(storage.read(targets.reads()))
            targets.check(shards)

    run(whole())
