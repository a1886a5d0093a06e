"""Members of zip and tar archives in several storages."""

import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gyre_daemon.errors import CorruptSample, InvalidRequest, NotAllowed, ShardMissing
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.sources import fsspec_drivers
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.conftest import S3Server
from tests.contract.places import (
    HttpPlace,
    LocalPlace,
    MemoryPlace,
    Place,
    S3Place,
    Targets,
    first_of,
    noise,
    openers,
    run,
)
from tests.contract.storage.objects import ObjectServer

MEMBERS = {f"x/{number}.bin": noise(number, 5000 + number) for number in range(20)} | {
    "x/y/a.bin": b"deeper",
    "x/notes.txt": b"no shard",
}


def zipped(members: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return whole.getvalue()


def tarred(members: Mapping[str, bytes], mode: Any = "w") -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode=mode) as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return whole.getvalue()


ARCHIVES: dict[str, tuple[str, Callable[[Mapping[str, bytes]], bytes]]] = {
    "stored": ("zip", lambda members: zipped(members, zipfile.ZIP_STORED)),
    "deflated": ("zip", zipped),
    "tar": ("tar", tarred),
}


@pytest.fixture
def opener() -> Iterator[Any]:
    with ThreadPoolExecutor(2) as executor:
        terms = EndpointOptions(64, 30.0)
        openers.append(StorageOpener(FairExecutor(executor, 2), terms, Metrics()))

        def open_storage(uri: str, settings: Any) -> Any:
            return first_of(openers[-1].open(parse_location(uri), settings, "*.bin"))

        yield open_storage
    openers.clear()


@pytest.fixture(params=["local", "s3", "http", "driver"])
def place(request: Any, tmp_path: Path, s3_server: S3Server, object_server: ObjectServer) -> Place:
    return {
        "local": lambda: LocalPlace(tmp_path),
        "s3": lambda: S3Place(s3_server),
        "http": lambda: HttpPlace(object_server),
        "driver": MemoryPlace,
    }[request.param]()


@pytest.mark.parametrize("kind", ARCHIVES)
def test_members_are_shards(kind: str, place: Place, opener: Any) -> None:
    scheme, made = ARCHIVES[kind]
    place.put(f"x.{scheme}", made(MEMBERS))
    archive = f"{place.root}/x.{scheme}"

    async def whole() -> None:
        names = sorted(name for name in MEMBERS if name.count("/") == 1 and name.endswith("bin"))
        for inside in ("x", "/x/", "x/*.bin"):
            storage = await opener(f"{scheme}://{inside}::{archive}", place.settings)
            assert [f"x/{shard.name}" for shard in storage.shards] == names
        targets = Targets()
        for shard, name in enumerate(names):
            targets.add(shard, 0, len(MEMBERS[name])).add(shard, 1000, 700)
        await storage.read(targets.reads())
        targets.check([MEMBERS[name] for name in names])
        storage = await opener(f"{scheme}://x/{{3,1}}.bin::{archive}", place.settings)
        assert [shard.name for shard in storage.shards] == ["3.bin", "1.bin"]
        (shard,) = (await opener(f"{scheme}://x/y::{archive}", place.settings)).shards
        assert (shard.name, shard.size_bytes) == ("a.bin", 6)

    run(whole())


def test_an_archive_is_opened_by_the_rules_of_its_own_location(tmp_path: Path, opener: Any) -> None:
    secret = tmp_path / "secret.zip"
    secret.write_bytes(zipped(MEMBERS))
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "x.zip").symlink_to(secret)
    with pytest.raises(NotAllowed, match="out of the dataset's folder"):
        run(opener(f"zip://x::file://{shared}/x.zip", {}))
    with pytest.raises(NotAllowed, match="neither a regular file"):
        run(opener("zip://x::/dev/zero", {}))
    with pytest.raises(ShardMissing):
        run(opener(f"zip://x::{shared}/absent.zip", {}))


@pytest.mark.parametrize(
    ("scheme", "data", "error", "sentence"),
    [
        ("zip", b"x" * 1000, InvalidRequest, r"x\.bin is no zip archive"),
        ("tar", b"x" * 1000, InvalidRequest, r"x\.bin is no tar archive"),
        ("tar", tarred(MEMBERS, "w:gz"), InvalidRequest, "a compressed tar has no index|name it"),
        ("zip", zipped({}), ShardMissing, "does not exist"),
        ("zip", zipped({"a.txt": b"1"}), ShardMissing, r"a\.txt"),
    ],
)
def test_what_is_no_archive(
    scheme: str, data: bytes, error: Any, sentence: str, tmp_path: Path, opener: Any
) -> None:
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(error, match=sentence):
        run(opener(f"{scheme}::{tmp_path}/x.bin", {}))


def test_a_directory_that_would_take_too_much_memory(
    tmp_path: Path, opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.zip").write_bytes(zipped(MEMBERS))
    monkeypatch.setattr(fsspec_drivers, "_MAX_MEMBERS", 10)
    with pytest.raises(InvalidRequest, match=r"x\.zip has too many members \(got 24, at most 10\)"):
        run(opener(f"zip://x::{tmp_path}/x.zip", {}))


def test_an_archive_that_changes(place: Place, opener: Any) -> None:
    place.put("x.zip", zipped(MEMBERS))

    async def whole() -> None:
        storage = await opener(f"zip://x::{place.root}/x.zip", place.settings)
        others = {name: bytes(reversed(data)) for name, data in MEMBERS.items()}
        place.put("x.zip", zipped(others))
        if isinstance(place, LocalPlace):
            os.utime(f"{place.root}/x.zip", (1, 1))
        with pytest.raises(CorruptSample, match=r"x\.zip has changed"):
            await first_of(storage.read(Targets().add(0, 0, 5000).reads()))

    run(whole())


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member(compression: int, tmp_path: Path, opener: Any) -> None:
    data = b"0123456789" * 1000
    whole = bytearray(zipped({"a.bin": data, "b.bin": b"whole"}, compression))
    whole[60] ^= 255
    (tmp_path / "x.zip").write_bytes(whole)

    async def read() -> None:
        storage = await opener(f"zip::{tmp_path}/x.zip", {})
        with pytest.raises(CorruptSample, match="a member of the archive is damaged"):
            await first_of(storage.read(Targets().add(0, 0, len(data)).reads()))
        targets = Targets().add(1, 0, 5)
        await storage.read(targets.reads())
        targets.check([data, b"whole"])

    run(read())
