"""Datasets whose samples are single files: how they are listed, joined to one shard, and read."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.base import ListedFormat, ManifestColumn
from gyre_daemon.datasets.indexing.format_search import FileListing, ManifestReader, list_files
from gyre_daemon.datasets.known_formats import make_format
from gyre_daemon.datasets.scanning import scan_workers
from gyre_daemon.errors import (
    ConfigError,
    CorruptSample,
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.shard import FileTable, Texts
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer

from tests.conftest import S3Server
from tests.contract.formats.format_contract import IndexContract, Sample
from tests.contract.places import (
    LocalPlace,
    MemoryPlace,
    Place,
    S3Place,
    Targets,
    first_of,
    noise,
    num_descriptors,
    openers,
    run,
)

OPTIONS: dict[str, Any] = {"extensions": ["bin"]}
# sorted by path, as bytes: "!" and "." come before "/"
TREE = {
    "a!/x.bin": noise(0, 100),
    "a.b/x.BIN": noise(1, 0),
    "a/deep/er/x.bin": noise(2, 70_000),
    "a/x.bin": noise(3, 1),
    "z.bin": noise(5, 3),
    "ü/1 + 1 #?.bin": noise(4, 5000),
}
IGNORED = {"a/x.txt": b"no", ".hidden.bin": b"no", "a/.git/x.bin": b"no", "bin": b"no"}


def line_of(tree: Mapping[str, bytes]) -> bytes:
    return b"".join(name.encode() + data for name, data in tree.items())


@pytest.fixture
def listing() -> Iterator[Callable[..., Any]]:
    with ThreadPoolExecutor(3) as executor, closing(ComputeServer()) as server:

        async def list_place(uri: str, settings: Any = None, **keys: Any) -> FileListing:
            opener = StorageOpener(FairExecutor(executor, 3), EndpointOptions(16, 10.0), Metrics())
            openers.append(opener)
            config = DatasetConfig(uri, "files", OPTIONS, storage=settings or {}, **keys)
            listed = make_format("set", config)
            assert isinstance(listed, ListedFormat)
            read = ManifestReader(scan_workers(server))
            return await list_files(opener, parse_location(uri), config, listed, read)

        yield list_place


@pytest.fixture(params=["local", "s3", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        return S3Place(server)
    return LocalPlace(tmp_path / "data") if request.param == "local" else MemoryPlace()


def test_all_files_are_one_shard_of_which_any_range_can_be_read(
    place: Place, listing: Callable[..., Any]
) -> None:
    for name, data in {**TREE, **IGNORED}.items():
        place.put(name, data)
    line = line_of(TREE)
    generator = np.random.default_rng(0)
    targets = Targets()
    cuts = generator.integers(len(line) + 1, size=(200, 2))
    for sample, (start, stop) in enumerate([(0, len(line)), *np.sort(cuts, axis=1).tolist()]):
        targets.add(0, start, stop - start, sample)

    async def read() -> FileListing:
        found: FileListing = await listing(place.root, place.settings)
        await found.storage.read(targets.reads())
        chunks = [chunk async for chunk in found.storage.stream(0)]
        assert b"".join(chunks) == line
        return found

    found = run(read())
    targets.check([line])
    (shard,) = found.storage.shards
    assert shard.size_bytes == len(line)
    assert shard.version
    begin = 0
    for name, data in TREE.items():
        head = len(name.encode())
        for offset in range(0, head + len(data), max(1, len(data) // 3)):
            assert shard.place_of(begin + offset) == (name, max(0, offset - head))
        begin += head + len(data)
    table = found.storage.table
    assert table.sizes.tolist() == [len(data) for data in TREE.values()]
    assert [table.name(number) for number in range(len(table))] == list(TREE)
    assert found.storage.is_node_local == isinstance(place, LocalPlace)


def test_a_file_that_changed_is_named(tmp_path: Path, listing: Callable[..., Any]) -> None:
    """Also where its size and its modification time are what they were."""
    place, path = LocalPlace(tmp_path), tmp_path / "a/x.bin"
    other = {"b/y.bin": noise(9, 4000)}
    for name, data in {"a/x.bin": noise(1, 4000), **other}.items():
        place.put(name, data)
    os.utime(path, ns=(0, 0))
    targets = Targets().add(0, 0, 2 * 4007)

    def write(data: bytes, modified_ns: int) -> Callable[[], None]:
        def change() -> None:
            path.write_bytes(data)
            os.utime(path, ns=(modified_ns, modified_ns))

        return change

    cases: list[tuple[Callable[[], Any], type[GyreError], str]] = [
        (write(noise(2, 4000), 0), CorruptSample, r"a/x\.bin has changed .* or was only touched"),
        (write(noise(1, 4000), 10), CorruptSample, r"a/x\.bin has changed since"),
        (write(noise(1, 3999), 0), CorruptSample, r"a/x\.bin has changed since"),
        (path.unlink, ShardMissing, r"a/x\.bin does not exist"),
        (lambda: os.mkfifo(path), NotAllowed, r"a/x\.bin is no regular file"),
    ]

    async def read() -> None:
        found = await listing(str(tmp_path))
        await found.storage.read(targets.reads())
        await asyncio.sleep(0.02)  # file systems count time in ticks
        for change, error, text in cases:
            change()
            with pytest.raises(error, match=text):
                await first_of(found.storage.read(targets.reads()))
        await found.storage.read(Targets().add(0, 4007, 4007).reads())

    run(read())


def test_no_descriptor_stays_open(tmp_path: Path, listing: Callable[..., Any]) -> None:
    names = [f"{number % 7}/{number:03}.bin" for number in range(300)]
    for name in names:
        LocalPlace(tmp_path).put(name, name.encode())

    async def read() -> None:
        found = await listing(str(tmp_path))
        size = found.storage.shards[0].size_bytes
        before = num_descriptors()
        await found.storage.read(Targets().add(0, 0, size).reads())
        assert num_descriptors() <= before

    run(read())


def test_odd_entries_are_left_out_and_links_lead_nowhere_else(
    tmp_path: Path, listing: Callable[..., Any]
) -> None:
    place, data = LocalPlace(tmp_path / "data"), tmp_path / "data"
    place.put("a/x.bin", b"x")
    os.mkfifo(data / "a/pipe.bin")
    (data / "a/broken.bin").symlink_to("absent")
    (data / "b.bin").symlink_to("a/x.bin")

    def names(**keys: Any) -> bytes:
        found: FileListing = run(listing(str(data), **keys))
        return found.storage.table.names.data

    assert names() == b"a/x.binb.bin"
    (data / "c").symlink_to("a")
    with pytest.raises(NotAllowed, match="/c is a link to a folder; links to folders"):
        names()
    assert names(follow_links=True) == b"a/x.binb.binc/x.bin"
    (data / "c").unlink()
    (data / "a/loop").symlink_to("..")
    with pytest.raises(NotAllowed, match="/a/loop is a link to a folder around it"):
        names(follow_links=True)
    (data / "a/loop").unlink()
    (tmp_path / "secret").write_bytes(b"secret")
    (data / "d.bin").symlink_to("../secret")
    with pytest.raises(NotAllowed, match=r"shard d\.bin .* a link leads out of"):
        names()
    assert names(follow_links=True) == b"a/x.binb.bind.bin"


def test_what_is_no_dataset_is_refused(tmp_path: Path, listing: Callable[..., Any]) -> None:
    place = LocalPlace(tmp_path / "data")
    place.put("a/x.txt", b"")
    with pytest.raises(ShardMissing, match="no file below"):
        run(listing(f"{tmp_path}/data"))
    with pytest.raises(ShardMissing, match="does not exist"):
        run(listing(f"{tmp_path}/absent"))
    place.put("train/cat/x.bin", b"")
    place.put("val/cat/x.bin", b"")
    with pytest.raises(InvalidRequest, match=r"holds train and val, .* name .*/train or .*/val"):
        run(listing(f"{tmp_path}/data"))
    with pytest.raises(InvalidRequest, match="is a pattern"):
        run(listing(f"{tmp_path}/data/*"))
    with pytest.raises(StorageUnavailable, match="Connection refused"):
        run(listing("http://127.0.0.1:9/data"))


def test_a_file_is_exchanged_for_a_link_that_leads_out(
    tmp_path: Path, listing: Callable[..., Any]
) -> None:
    place, path = LocalPlace(tmp_path / "data"), tmp_path / "data/a/x.bin"
    place.put("a/x.bin", b"x")
    (tmp_path / "secret").write_bytes(b"s")

    async def read() -> None:
        found = await listing(str(tmp_path / "data"))
        path.unlink()
        path.symlink_to(tmp_path / "secret")
        with pytest.raises(NotAllowed, match=r"a/x\.bin is refused: a link"):
            await first_of(found.storage.read(Targets().add(0, 0, 8).reads()))

    run(read())


def index_of(
    tree: Mapping[str, bytes], columns: Sequence[ManifestColumn] = (), **options: Any
) -> SampleIndex:
    names = Texts.of(name.encode() for name in tree)
    sizes = np.array([len(data) for data in tree.values()], np.int64)
    listed = make_format("set", DatasetConfig("/", "files", options))
    assert isinstance(listed, ListedFormat)
    return listed.index_of(FileTable(names, sizes), columns)


class TestFiles(IndexContract):
    """Their one shard has paths and files in turn; there is nothing that could be damaged."""

    name = "files"
    options: ClassVar = {"fields": ["path", "image=file"]}
    tree: ClassVar = {
        f"{'ab'[number // 30]}/{number:03}.jpg": noise(number, number * 37 % 500)
        for number in range(55)
    }

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        samples = [{"path": name.encode(), "image": data} for name, data in self.tree.items()]
        return [line_of(self.tree)], list(samples)

    def index(self, shards: Sequence[bytes]) -> SampleIndex:
        return index_of(self.tree, **self.options)

    def test_the_digest_covers_meaning_and_not_versions(self) -> None:
        tree = {"a/b/1.jpg": b"1", "c/2.jpg": b"2"}
        both: dict[str, Any] = {"fields": ["file", "class"]}
        first, *others = [
            index_of(tree, **both).digest(),
            index_of({"a/b/1.jpg": b"1", "c/3.jpg": b"2"}, **both).digest(),
            index_of({"a/b/1.jpg": b"12", "c/2.jpg": b"2"}, **both).digest(),
            index_of(tree, fields=["file"]).digest(),
            index_of(tree, class_folder="first", **both).digest(),
        ]
        assert first not in others

    def test_the_class_is_the_name_of_a_folder(self) -> None:
        tree = {"b/2/1.jpg": b"", "b/a/1.jpg": b"", "c/10/x.jpg": b"", "d/2/x.jpg": b""}
        for folder, names, values in (
            ("last", ("10", "2", "a"), [1, 2, 0, 1]),
            ("first", ("b", "c", "d"), [0, 0, 1, 2]),
        ):
            index = index_of(tree, class_folder=folder)
            assert index.fields[-1].categories == names
            assert index.locate(np.arange(4)).indexed[0].tolist() == values

    def test_files_in_no_folder_have_no_class(self) -> None:
        index = index_of({"1.jpg": b"1"})
        assert [spec.name for spec in index.fields] == ["file"]
        with pytest.raises(ConfigError, match=r"the file 1\.jpg is in no folder"):
            index_of({"1.jpg": b"1", "a/1.jpg": b"1"})

    def test_the_names_tell_the_media_type(self) -> None:
        for names, media_type in (
            (["a/1.PNG", "a/2.png"], "image/png"),
            (["1.jpg", "2.png"], "image/*"),
            (["1.jpg", "2.wav"], ""),
        ):
            assert index_of(dict.fromkeys(names, b"x"), fields=["file"]).fields[0].media_type == (
                media_type
            )

    def test_wrong_options_are_refused(self) -> None:
        for key, value in (
            ("types", {"label": "float"}),
            ("extensions", [".jpg"]),
        ):
            with pytest.raises(ConfigError, match=f"`{key}` of a files dataset"):
                self.made(**{key: value})
        with pytest.raises(ConfigError, match="'middle': expected one of first, last"):
            self.made(class_folder="middle")
        with pytest.raises(ConfigError, match="must have file, path or a text"):
            index_of({"a/1.jpg": b"1"}, fields=["class"])
        with pytest.raises(
            ConfigError,
            match="names 'image', which it does not have; choose from path, file, class",
        ):
            index_of({"a/1.jpg": b"1"}, fields=["image"])

    def test_no_samples(self) -> None:
        assert index_of({}, fields=["file"]).num_samples == 0


class TestManifests(TestFiles):
    """The heads of files have the texts of a manifest, too."""

    captions: ClassVar = [f"wörd {number}" * (number % 5) for number in range(55)]
    options: ClassVar = {"fields": ["file", "caption"]}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        samples = [
            {"file": data, "caption": caption.encode()}
            for data, caption in zip(self.tree.values(), self.captions, strict=True)
        ]
        line = b"".join(
            name.encode() + sample["caption"] + sample["file"]
            for name, sample in zip(self.tree, samples, strict=True)
        )
        return [line], list(samples)

    def index(self, shards: Sequence[bytes]) -> SampleIndex:
        captions = Texts.of(caption.encode() for caption in self.captions)
        columns = [
            ManifestColumn("caption", "text", captions),
            ManifestColumn("score", "number", np.zeros(55)),
        ]
        return index_of(self.tree, columns, **self.options)
