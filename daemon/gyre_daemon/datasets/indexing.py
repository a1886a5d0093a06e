"""From a dataset's definition to an open dataset.

Its shards are listed, unpacked where they are compressed, scanned where their format must look into them, and put together.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.changes import Change, Known, ShardChanges
from gyre_daemon.datasets.checksum_taker import ChecksumTaker
from gyre_daemon.datasets.dataset import Dataset, block_ranges, fingerprint, probe_ranges
from gyre_daemon.datasets.formats import Format, SampleIndex, make_format
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.probing import Prober
from gyre_daemon.datasets.shardfiles import StreamFile, scan_file, scan_listed, unpack_file
from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.datasets.unpacked import UnpackedDataset, UnpackedShards, is_compressed, unpacked_name
from gyre_daemon.errors import ConfigError, InvalidRequest, Overloaded, first_error
from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.base import Reads, Storage
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.cached import CachedStorage
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.local.local import LocalStorage, stat_shard
from gyre_daemon.storage.local.openfiles import file_error
from gyre_daemon.storage.location import Location, parse_location
from gyre_daemon.storage.opener import StorageOpener
from gyre_daemon.storage.patterns import matches_any
from gyre_daemon.storage.shard import Shard

Result = TypeVar("Result")

_NUM_SCANS = 4  # shards that are scanned at once


@dataclass(frozen=True, slots=True)
class ScannedShard:
    """A shard has its index.

    Attributes:
        number: of the shard.
        num_samples: in it; 0 where nothing is scanned.
        reused: its sidecar was fresh, or there is nothing to scan.
        change: what became of it since it was last indexed; None where nobody asked.
    """

    number: int
    num_samples: int
    reused: bool
    change: Change | None


@dataclass(slots=True)
class Opening:
    """A dataset while its shards are being indexed.

    Attributes:
        name: for people.
        config: its definition.
        format: of it.
        location: where it lies, without credentials.
        source: the shards as they are stored.
        scans: of each shard, as far as it has been scanned.
        unpacked: where compressed shards go; None where there are none.
        paths: of each shard that was unpacked, where it lies now.
    """

    name: str
    config: DatasetConfig
    format: Format
    location: str
    source: Storage
    scans: list[Arrays | None]
    unpacked: UnpackedDataset | None
    paths: dict[int, Path]

    @property
    def identity(self) -> str:
        """Tells the data from other data that has the same location at another endpoint."""
        endpoints = sorted(str(value) for key, value in self.config.storage.items() if "endpoint" in key.lower())
        return " ".join([self.location, *endpoints])


class Indexer:
    """Indexes datasets, with threads of its own."""

    def __init__(
        self, opener: StorageOpener, sidecars: SidecarStore, unpacked: UnpackedShards | None, cache: NodeCache | None
    ) -> None:
        self._opener = opener
        self._sidecars = sidecars
        self._unpacked = unpacked
        self._cache = cache
        self._checksums = ChecksumTaker(sidecars)
        self._scanners = ThreadPoolExecutor(_NUM_SCANS, thread_name_prefix="gyre-scan")
        self._prober = Prober(opener, sidecars, self._scanners)

    def close(self) -> None:
        """Stop what is under way."""
        self._scanners.shutdown(wait=False, cancel_futures=True)
        self._checksums.close()

    async def begin(self, name: str | None, config: DatasetConfig) -> Opening:
        """The shards of a dataset; it is called by its location where it has no name."""
        dataset_format = make_format(name or config.uri, config)
        location = parse_location(config.uri)
        source = await self._opener.open(location, config.storage, dataset_format.pattern)
        scans: list[Arrays | None] = [None] * len(source.shards)
        opening = Opening(name or location.text, config, dataset_format, location.text, source, scans, None, {})
        if matches_any("compressed.tar.gz", dataset_format.pattern) and any(map(_is_packed, source.shards)):
            opening.unpacked = await self._in_thread(self._open_unpacked, opening, location)
        return opening

    async def scan(self, opening: Opening, known: Known | None) -> AsyncIterator[ScannedShard]:
        """Fill in the scans of an opening, several shards at once.

        Args:
            opening: from `begin`.
            known: what is known of the dataset from before, where an operator ordered the index and wants to know what became
                of each shard, and of an index that cannot be stored; None where nobody did.

        Raises:
            Overloaded: an index cannot be stored that was ordered, or a compressed shard not be unpacked.
        """
        if opening.format.scanner is None and opening.unpacked is None and known is None:
            return
        changes = ShardChanges(opening.location, opening.source, known, self._checksums) if known else None
        slots = asyncio.Semaphore(_NUM_SCANS)
        tasks = [asyncio.create_task(self._scan(opening, shard, slots, changes)) for shard in range(len(opening.scans))]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for pending in tasks:
                pending.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self, opening: Opening, *, anew: bool) -> Dataset:
        """The dataset, once all shards are scanned.

        Args:
            opening: from `begin`.
            anew: where shards are probed instead, forget what they told before.
        """
        served = self._served(opening)
        shards = served.shards
        scans = cast("list[Arrays]", opening.scans) if opening.format.scanner else []
        if probe := opening.format.probe:
            settings = opening.config.storage
            scans = [await self._prober.look(probe, served, opening.location, settings, anew=anew)]
        index = await self._in_thread(opening.format.assemble, shards, scans)
        if index.num_samples == 0:
            raise InvalidRequest(f"dataset `{opening.name}` has no sample: its {len(shards)} shards are empty or too short")
        identity = fingerprint(shards, index, await _probe(served))
        storage = self._behind_cache(opening, served, index)
        if isinstance(served, LocalStorage):
            await self._in_thread(self._checksums.begin, opening.location, served)
        dataset = Dataset(opening.name, opening.config.format, opening.location, storage, index, identity)
        facts = {
            "dataset": opening.name,
            "samples": dataset.num_samples,
            "shards": len(shards),
            "fingerprint": dataset.fingerprint,
        }
        log_event("dataset open", facts)
        return dataset

    async def take_checksums(self, dataset: Dataset) -> None:
        """Have a checksum of every block of a dataset on this machine's disk, also for later daemons.

        Raises:
            StorageUnavailable: a shard cannot be read.
        """
        storage = dataset.storage
        if not isinstance(storage, LocalStorage):
            return
        for shard in range(len(storage.shards)):
            await self._in_thread(self._keep_checksums, dataset.uri, storage, shard)

    def _keep_checksums(self, location: str, storage: LocalStorage, shard: int) -> None:
        try:
            self._checksums.keep(location, storage, shard)
        except OSError as error:
            raise file_error(storage.shards[shard].name, error) from error

    async def _scan(self, opening: Opening, shard: int, slots: asyncio.Semaphore, changes: ShardChanges | None) -> ScannedShard:
        """Load or make the index of one shard."""
        listed, path = opening.source.shards[shard], opening.source.local_path(shard)
        key = SidecarKey(opening.location, listed.name, listed.size_bytes, listed.version, str(opening.format.scanner))
        async with slots:
            if opening.unpacked and _is_packed(listed):
                opening.paths[shard] = await self._unpack(opening, opening.unpacked, shard)
            arrays = await self._sidecars.load(key, path) if opening.format.scanner else {}
            is_fresh, change = arrays is not None, None
            if changes:
                was_indexed = await self._in_thread(self._sidecars.load_outdated, key, path) is not None
                change = await self._in_thread(changes.of, shard, was_indexed, is_fresh)
            if arrays is None:
                arrays = await self._scan_shard(opening, shard)
                await self._save(key, shard, opening, arrays, must_save=changes is not None)
        opening.scans[shard] = arrays
        num_samples = len(arrays["first"]) - 1 if opening.format.scanner else 0
        return ScannedShard(shard, num_samples, is_fresh and change in (None, "kept"), change)

    async def _unpack(self, opening: Opening, unpacked: UnpackedDataset, shard: int) -> Path:
        listed, path = opening.source.shards[shard], opening.source.local_path(shard)
        found = await self._in_thread(unpacked.find, listed)
        if found:
            return found
        if path:
            return await self._in_thread(unpack_file, unpacked, listed, path)
        return await self._in_thread(unpacked.unpack, listed, _stream(opening, shard))

    async def _scan_shard(self, opening: Opening, shard: int) -> Arrays:
        listed, path = opening.source.shards[shard], opening.source.local_path(shard)
        if shard in opening.paths:
            return await self._in_thread(scan_file, opening.format, listed.name, opening.paths[shard])
        if path:
            return await self._in_thread(scan_listed, opening.format, listed, path)
        return await self._in_thread(opening.format.scan, listed.name, _stream(opening, shard))

    async def _save(self, key: SidecarKey, shard: int, opening: Opening, arrays: Arrays, *, must_save: bool) -> None:
        try:
            await self._sidecars.save(key, opening.source.local_path(shard), arrays)
        except Overloaded as error:
            if must_save:
                raise
            log_event("index not stored", {"shard": key.shard, "reason": error}, logging.WARNING)

    def _open_unpacked(self, opening: Opening, location: Location) -> UnpackedDataset:
        shards = opening.source.shards
        if self._unpacked is None:
            raise ConfigError(f"dataset `{opening.name}` has compressed shards, and this daemon has no folder to unpack them")
        if not opening.source.local_path(0) and not all(map(_is_packed, shards)):
            raise InvalidRequest(
                f"some shards of {location.text} are compressed and some are not; compress all of them or none, or name "
                "those that are meant"
            )
        _check_distinct(shards, location)
        return self._unpacked.open(opening.identity, shards)

    def _served(self, opening: Opening) -> Storage:
        """What batches are read from: the shards as they are stored, or unpacked."""
        if not opening.unpacked:
            return opening.source
        source = opening.source
        paths = [opening.paths.get(shard) or cast("Path", source.local_path(shard)) for shard in range(len(source.shards))]
        names = [unpacked_name(each.name) if _is_packed(each) else each.name for each in source.shards]
        shards = [
            stat_shard(path, name) if shard in opening.paths else source.shards[shard]
            for shard, (path, name) in enumerate(zip(paths, names, strict=True))
        ]
        return self._opener.local(paths, shards, opening.unpacked)

    def _behind_cache(self, opening: Opening, storage: Storage, index: SampleIndex) -> Storage:
        """The storage, behind the node's cache where its shards are not on this machine."""
        if self._cache is None or not opening.config.cache or storage.local_path(0):
            return storage

        def block_map(block_bytes: int) -> BlockMap:
            table = index.blocks(block_bytes)
            ranges = block_ranges(index, table, np.arange(table.num_blocks))
            return BlockMap.of(ranges.shard, ranges.start, ranges.stop)

        return CachedStorage(storage, opening.identity, self._cache, block_map)

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._scanners, work, *arguments)


def _stream(opening: Opening, shard: int) -> BinaryIO:
    return cast("BinaryIO", StreamFile(opening.source.stream(shard), asyncio.get_running_loop()))


def _is_packed(shard: Shard) -> bool:
    return is_compressed(shard.name)


def _check_distinct(shards: Sequence[Shard], location: Location) -> None:
    """Refuse a folder that has the same shards twice, as they are and compressed."""
    plain = {shard.name for shard in shards if not _is_packed(shard)}
    twice = next((shard.name for shard in shards if _is_packed(shard) and unpacked_name(shard.name) in plain), None)
    if twice:
        raise InvalidRequest(
            f"{location.text} has both {twice} and {unpacked_name(twice)}; name those that are meant, by a pattern"
        )


async def _probe(storage: Storage) -> Sequence[bytes]:
    """The bytes that the fingerprint looks at."""
    ranges = [wanted for wanted in probe_ranges(storage.shards) if wanted[2] > wanted[1]]
    probes = [np.empty(stop - start, np.uint8) for _, start, stop in ranges]
    try:
        if probes:
            await storage.read(Reads.into(probes, [shard for shard, _, _ in ranges], [start for _, start, _ in ranges]))
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return [probe.tobytes() for probe in probes]
