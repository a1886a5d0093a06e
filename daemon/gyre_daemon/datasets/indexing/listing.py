"""Lists the single files of a dataset, and joins them to one shard.

A manifest may name the files: a table of them, or, as for YOLO, files of their own that describe
the samples next to them. One that is parsed at once, as JSON is, would keep the daemon's
interpreter for seconds: 5.5 s for 460 MB of annotations. Labels of many images are parsed in
Python, which takes turns of it from all others as long. So a compute worker does that.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import ListedFormat, SampleIndex
from gyre_daemon.datasets.formats.base import (
    Arrays,
    Described,
    DescribedFormat,
    Manifest,
    ManifestColumn,
    ManifestFormat,
    ManifestPlace,
)
from gyre_daemon.datasets.scanning import Scanner
from gyre_daemon.errors import CorruptSample, InvalidRequest, ShardMissing
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.location import Location, check_one_tree
from gyre_daemon.storage.shard import FileTable, Shard, Texts
from gyre_daemon.storage.shard_files import read_ranges
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.storage.unions import ConcatenatedFiles
from gyre_daemon.workers.compute_workers import ComputeWorkers

_AT_ONCE = 2  # each may take the memory of one process
_LABELS, _TEXTS_AT_ONCE = "labels", 1000
# Files to read at a time: of an object storage as requests that wait, and each with the
# cost of a plan. All of them stay in memory until they are parsed, so their size has a limit.
_FILES_AT_ONCE = 1000
_MAX_BYTES = 1 << 30
# A manifest is read whole, and its rows take some ten times its bytes while that is done.
_MAX_MANIFEST_BYTES = 1 << 30


class ManifestReader:
    """Reads the manifests of all datasets of a daemon."""

    def __init__(self, processes: ComputeWorkers) -> None:
        """See `Scanner`."""
        self._processes = processes
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def read(self, listed: ManifestFormat, storage: Storage) -> Manifest:
        """The manifest, the only shard of a storage.

        Raises:
            CorruptSample: it is damaged, or takes too much memory.
            ConfigError: it lacks columns.
            GyreError: it cannot be read.
        """
        if not listed.reads_apart:
            shard = storage.shards[0]
            (data,) = await read_ranges(storage, [0], [0], [shard.size_bytes])
            return await compute(listed.read_manifest, shard.name, data)
        scanner = Scanner(self._processes)
        try:
            async with self._turns:
                arrays = await scanner.scan(partial(_run, listed), storage, 0)
        finally:
            scanner.kill()
        return await _received(storage.shards[0].name, arrays)

    async def parse(
        self, listed: DescribedFormat, described: Described, texts: Sequence[bytes]
    ) -> Manifest:
        """The manifest that the texts of samples make.

        Args:
            listed: the format.
            described: the n samples.
            texts: n, see `DescribedFormat.manifest`.

        Raises:
            CorruptSample: one is damaged, or they take too much memory.
        """
        sizes = np.array([len(text) for text in texts], np.int64)
        run = partial(_run_described, listed, described, sizes)
        scanner = Scanner(self._processes)
        try:
            async with self._turns:
                arrays = await scanner.scan_stream(run, _LABELS, _portions(texts))
        finally:
            scanner.kill()
        return await _received(_LABELS, arrays)


async def _portions(texts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        yield b"".join(texts[begin : begin + _TEXTS_AT_ONCE])


def _run_described(
    listed: DescribedFormat,
    described: Described,
    sizes: npt.NDArray[np.int64],
    name: str,
    file: BinaryIO,
) -> Arrays:
    texts = Texts.joined([file.read()], sizes)
    return _as_arrays(listed.manifest(described, [texts[row] for row in range(len(texts))]))


async def _received(name: str, arrays: Arrays) -> Manifest:
    try:
        return await compute(_from_arrays, arrays)
    except (KeyError, ValueError, TypeError) as error:
        reason = "the process that read it has failed"
        raise CorruptSample(
            f"the manifest {name}: {reason}", {"shard": name, "reason": reason}
        ) from error


def _run(listed: ManifestFormat, name: str, file: BinaryIO) -> Arrays:
    return _as_arrays(listed.read_manifest(name, file.read()))


def _as_arrays(manifest: Manifest) -> Arrays:
    columns = manifest.columns
    about = [[column.name, column.kind, column.categories] for column in columns]
    arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    values = [manifest.names, *(column.values for column in columns)]
    for number, each in enumerate(values):
        if isinstance(each, Texts):
            arrays[f"data{number}"] = np.frombuffer(each.data, np.uint8)
            arrays[f"ends{number}"] = each.ends
        else:
            arrays[f"values{number}"] = each
    return arrays


def _from_arrays(arrays: Arrays) -> Manifest:
    names = _texts(arrays, 0)
    columns = []
    about = json.loads(arrays["about"].tobytes())
    for number, (name, kind, categories) in enumerate(about, 1):
        is_text = f"ends{number}" in arrays
        values = _texts(arrays, number) if is_text else arrays[f"values{number}"]
        if len(values) != len(names):
            raise ValueError(f"the column {name} has {len(values)} values")
        columns.append(ManifestColumn(name, kind, values, tuple(categories)))
    return Manifest(names, tuple(columns))


def _texts(arrays: Arrays, number: int) -> Texts:
    data, ends = arrays[f"data{number}"].tobytes(), arrays[f"ends{number}"]
    if ends[0] != 0 or ends[-1] != len(data) or (np.diff(ends) < 0).any():
        raise ValueError("texts are not where they are said to be")
    return Texts(data, ends)


async def read_described(
    opener: StorageOpener,
    location: Location,
    config: DatasetConfig,
    listed: DescribedFormat,
    about: Storage,
    manifests: ManifestReader,
) -> Manifest:
    """The manifest of a folder whose samples are described by files of their own.

    Args:
        opener: of storages.
        location: of the folder.
        config: of the dataset.
        listed: its format.
        about: the file that describes all samples, as the only shard.
        manifests: makes the manifest.

    Raises:
        CorruptSample: a file is damaged.
        ConfigError: the options do not fit the files.
        InvalidRequest: the files that describe samples are too large together, or cannot be listed.
        ShardMissing, NotAllowed, StorageUnavailable: a file cannot be read.
    """
    (shard,) = about.shards
    (data,) = await read_ranges(about, [0], [0], [shard.size_bytes])
    files, table = await opener.open_files(
        location, config.storage, listed.is_wanted, follow_links=config.follow_links
    )
    described = await compute(listed.described, shard.name, data, table.names)
    sizes = np.where(described.texts < 0, 0, table.sizes[described.texts])
    if (total := int(sizes.sum())) > _MAX_BYTES:
        raise InvalidRequest(
            f"the files that describe those of {location.text} have {total} bytes, more than "
            f"{_MAX_BYTES}; split it into several datasets"
        )
    texts = await _read_files(files, described.texts, sizes)
    return await manifests.parse(listed, described, texts)


async def _read_files(
    files: Storage, numbers: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Sequence[bytes]:
    """Whole files; empty ones are not read."""
    texts = [b""] * len(numbers)
    wanted = np.flatnonzero(sizes)
    for begin in range(0, len(wanted), _FILES_AT_ONCE):
        some = wanted[begin : begin + _FILES_AT_ONCE]
        found = await read_ranges(
            files, numbers[some].tolist(), [0] * len(some), sizes[some].tolist()
        )
        for number, text in zip(some.tolist(), found, strict=True):
            texts[number] = text
    return texts


class FileListing(Struct, frozen=True):
    """The single files of a dataset; the `Format` of the one shard that they make.

    Attributes:
        storage: the shard.
        format: of the files.
        table: of the files.
        columns: a manifest's columns of them.
    """

    storage: ConcatenatedFiles
    format: ListedFormat
    table: FileTable
    columns: Sequence[ManifestColumn]
    pattern = "*"
    unpacks_gzip = False
    inspection = None

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`; the list says it all."""
        return self.format.index_of(self.table, self.columns)


async def list_files(
    opener: StorageOpener,
    location: Location,
    config: DatasetConfig,
    listed: ListedFormat,
    manifests: ManifestReader,
) -> FileListing:
    """The files of a location.

    Args:
        opener: of storages.
        location: of a folder, or of a manifest.
        config: of the dataset.
        listed: its format.
        manifests: reads them.

    Raises:
        CorruptSample: the manifest is damaged.
        InvalidRequest: the folder holds several datasets, or the manifest is too long; otherwise
            see `StorageOpener.open_files`.
    """
    manifest: Manifest | None = None
    place = listed.manifest_of(location.paths[0]) if len(location.paths) == 1 else None
    if place:
        storage = await _open_manifest(opener, location, config, listed, place)
        _check_one(place.path, storage)
        if isinstance(listed, DescribedFormat):
            manifest = await read_described(opener, location, config, listed, storage, manifests)
        else:
            assert isinstance(listed, ManifestFormat)
            manifest = await manifests.read(listed, storage)
        if not len(manifest.names):
            raise ShardMissing(f"{place.path} lists no files")
        location = replace(location, paths=(place.folder,))
    files, table = await opener.open_files(
        location,
        config.storage,
        listed.is_wanted,
        manifest.names if manifest else None,
        follow_links=config.follow_links,
    )
    columns = manifest.columns if manifest else ()
    if manifest is None:
        check_one_tree(location.text, table.top_folders())
    texts = [column.values for column in columns if isinstance(column.values, Texts)]
    heads = await compute(Texts.merged, [table.names, *texts])  # a tenth of a second
    joined = await compute(ConcatenatedFiles, files, table, heads, location.text)
    return FileListing(joined, listed, table, columns)


async def _open_manifest(
    opener: StorageOpener,
    location: Location,
    config: DatasetConfig,
    listed: ListedFormat,
    place: ManifestPlace,
) -> Storage:
    """The manifest as the only shard; below the folder, links lead nowhere else than in it."""
    settings, follow_links = config.storage, config.follow_links
    name = place.path.removeprefix(place.folder.rstrip("/") + "/")
    if "/" not in name:
        at = replace(location, paths=(place.path,))
        return await opener.open(at, settings, "*", follow_links=follow_links)
    at, names = replace(location, paths=(place.folder,)), Texts.of([name.encode()])
    storage, _ = await opener.open_files(
        at, settings, listed.is_wanted, names, follow_links=follow_links
    )
    return storage


def _check_one(path: str, storage: Storage) -> None:
    """Refuse a manifest that is none, since a folder or a pattern stands for many files."""
    if len(storage.shards) != 1:
        raise InvalidRequest(
            f"{path} is {len(storage.shards)} files; name the one that describes the dataset"
        )
    (shard,) = storage.shards
    if shard.size_bytes > _MAX_MANIFEST_BYTES:
        raise InvalidRequest(
            f"the manifest {path} has {shard.size_bytes} bytes, more than "
            f"{_MAX_MANIFEST_BYTES}; split it into several datasets"
        )
