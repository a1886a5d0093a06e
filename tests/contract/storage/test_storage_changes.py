"""Local shards that are touched, overwritten or put back while they are served: all are refused."""

import os
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gyre_daemon.errors import CorruptSample
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.local.local import LocalStorage
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.opening.opener import StorageOpener

from tests.contract.places import Targets, first_of, noise, openers, run

SIZE = 5000
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
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "0.bin"
    path.write_bytes(DATA)
    return path


def read(opener: Any, shard: Path, work: Work) -> None:
    async def whole() -> None:
        storage = await opener(str(shard))
        await serves(storage)
        await work(storage, shard)

    run(whole())


async def serves(storage: LocalStorage, start: int = 0, size: int = SIZE) -> None:
    targets = Targets().add(0, start, size)
    await first_of(storage.read(targets.reads()))
    targets.check([DATA])


async def refuses(storage: LocalStorage, match: str = r"0\.bin has changed") -> None:
    for _ in range(2):
        with pytest.raises(CorruptSample, match=match):
            await serves(storage, 10, 20)


def put_back(backup: Path, path: Path, *, in_place: bool) -> None:
    if not in_place:
        path.unlink()
    shutil.copy2(backup, path)


def overwrite(path: Path, data: bytes, start: int = 0) -> None:
    """Overwrite a file in place, and set its modification time back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: overwrite(path, noise(9, 100), start=4200),
        lambda path: path.chmod(0o600),
        lambda path: path.with_name("link").hardlink_to(path),
        lambda path: path.rename(path.with_name("aside")).rename(path),
    ],
    ids=["overwritten, its time set back", "mode", "link", "name"],
)
def test_a_shard_whose_change_time_alone_moved_is_refused(
    opener: Any, shard: Path, change: Callable[[Path], None]
) -> None:
    async def work(storage: LocalStorage, path: Path) -> None:
        change(path)
        await refuses(storage, r"0\.bin has changed .*, or was only touched.* `gyre index`")
        await serves(await opener(str(path)), 0, 4000)  # as it is listed now

    read(opener, shard, work)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "a new file"])
def test_a_restored_shard_must_be_listed_again(opener: Any, shard: Path, in_place: bool) -> None:
    backup = shard.with_name("backup")
    shutil.copy2(shard, backup)

    async def work(storage: LocalStorage, path: Path) -> None:
        os.truncate(path, 100)
        await refuses(storage)
        put_back(backup, path, in_place=in_place)
        await refuses(storage, "only touched")
        await serves(await opener(str(path)))

    read(opener, shard, work)


def test_another_file_of_the_same_size_and_time_is_refused(opener: Any, shard: Path) -> None:
    backup = shard.with_name("backup")
    shutil.copy2(shard, backup)
    overwrite(backup, b"other")

    async def work(storage: LocalStorage, path: Path) -> None:
        backup.rename(path)
        await refuses(storage)

    read(opener, shard, work)


def test_a_shard_that_changed_between_its_listing_and_its_first_read(
    opener: Any, shard: Path
) -> None:
    async def whole() -> None:
        storage = await opener(str(shard))
        overwrite(shard, b"other")
        await refuses(storage)

    run(whole())


def test_the_other_shards_are_served(opener: Any, tmp_path: Path) -> None:
    shards = [noise(seed, SIZE) for seed in range(4)]
    for number, data in enumerate(shards):
        (tmp_path / f"{number}.bin").write_bytes(data)

    async def whole() -> None:
        storage = await opener(str(tmp_path))
        (tmp_path / "2.bin").chmod(0o600)
        targets = Targets()
        for number in (0, 1, 3):
            targets.add(number, 100, 900)
        await first_of(storage.read(targets.reads()))
        targets.check(shards)
        with pytest.raises(CorruptSample, match=r"2\.bin has changed"):
            await first_of(storage.read(Targets().add(0, 0, 10).add(2, 0, 10).reads()))

    run(whole())
