"""Opens datasets: from a definition to a `Dataset`.

The shards are listed, unpacked if they are compressed, inspected as their format demands, and
assembled to one index.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks.replacement import CorruptRecord, CorruptReports, check_limit
from gyre_daemon.datasets.checks.samples import SampleChecker
from gyre_daemon.datasets.chunks.decoded import DecodedStorage, DecodingRoom
from gyre_daemon.datasets.chunks.decoders import Decoders
from gyre_daemon.datasets.dataset import (
    Dataset,
    block_ranges,
    fingerprint,
    fingerprint_ranges,
    sample_ranges,
)
from gyre_daemon.datasets.fields import chosen_fields
from gyre_daemon.datasets.formats import SINGLE_FILES, FieldSpec, SampleIndex, make_format
from gyre_daemon.datasets.formats.base import (
    Arrays,
    DamagedSample,
    Listing,
    Probe,
    TolerantFormat,
)
from gyre_daemon.datasets.formats.chunk_index import ChunkIndex
from gyre_daemon.datasets.indexing.changes import PreviousIndex
from gyre_daemon.datasets.indexing.checksum_taker import ChecksumTaker
from gyre_daemon.datasets.indexing.detection import detect_format
from gyre_daemon.datasets.indexing.listing import FileListing, list_files
from gyre_daemon.datasets.indexing.probing import ProbeRunner
from gyre_daemon.datasets.indexing.scan_processes import ScanProcesses
from gyre_daemon.datasets.indexing.shard_files import read_ranges
from gyre_daemon.datasets.indexing.shards import (
    NUM_THREADS,
    IndexedShard,
    OpeningDataset,
    ShardIndexer,
    is_packed,
)
from gyre_daemon.datasets.indexing.unpacked import UnpackedDataset, UnpackedShards, unpacked_name
from gyre_daemon.datasets.sidecars.store import SidecarStore
from gyre_daemon.errors import ConfigError, InvalidRequest, ShardMissing
from gyre_daemon.order.substitutes import NO_SAMPLES
from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.cached import CachedStorage
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.local.listing import stat_shard
from gyre_daemon.storage.location import Location, parse_location
from gyre_daemon.storage.opener import StorageOpener
from gyre_daemon.storage.shard import Shard

Result = TypeVar("Result")


class Indexer:
    """Indexes datasets in threads and processes of its own."""

    def __init__(
        self,
        opener: StorageOpener,
        sidecars: SidecarStore,
        unpacked: UnpackedShards | None,
        cache: NodeCache | None,
        reports: CorruptReports | None,
    ) -> None:
        self._opener = opener
        self._sidecars = sidecars
        self._unpacked = unpacked
        self._cache = cache
        self._checksums = ChecksumTaker(sidecars)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gyre-scan")
        self.probes = ProbeRunner(opener, sidecars, self._threads)
        self._processes = ScanProcesses()
        self._shards = ShardIndexer(sidecars, self._checksums, self._threads, self._processes)
        self.checker = SampleChecker(sidecars, self._processes)
        self._reports = reports
        self.decoding = DecodingRoom(Decoders(self._processes), opener.workers)

    def close(self) -> None:
        """Stop the work that is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.decoding.close()
        self._processes.close()
        self._checksums.close()

    async def begin(self, name: str | None, config: DatasetConfig) -> OpeningDataset:
        """List the shards of a dataset; without a name, its location is its name.

        Where the configuration names no format, the names of all files there decide.
        """
        location = await self._in_thread(parse_location, config.uri)  # it may name 100,000 shards
        files: FileListing | None = None
        if not config.format:
            detected, files = await self._detect(location, config)
            config = replace(config, format=detected)
            log_event("format found", {"location": location.text, "format": config.format})
        dataset_format = make_format(name or config.uri, config)
        if isinstance(listing := dataset_format.inspection, Listing):
            files = files or await list_files(self._opener, location, config, listing)
        source: Storage = (
            files.storage
            if files
            else await self._opener.open(
                location, config.storage, dataset_format.pattern, follow_links=config.follow_links
            )
        )
        opening = OpeningDataset(
            name or location.text,
            config,
            dataset_format,
            location.text,
            source,
            [None] * len(source.shards),
            None,
            {},
            files,
        )
        if dataset_format.unpacks_gzip and any(map(is_packed, source.shards)):
            opening.unpacked = await self._in_thread(self._open_unpacked, opening, location)
        return opening

    def scan(
        self, opening: OpeningDataset, previous: PreviousIndex | None
    ) -> AsyncGenerator[IndexedShard, None]:
        """See `ShardIndexer.run`."""
        return self._shards.run(opening, previous)

    async def finish(self, opening: OpeningDataset, *, refresh: bool) -> Dataset:
        """The dataset, once all shards are scanned.

        Args:
            opening: from `begin`.
            refresh: probe the shards even if the result of an earlier probe was kept.
        """
        served = self.served(opening)
        shards = served.shards
        inspected = cast("list[Arrays]", opening.scans)
        if opening.scan is None:
            inspected = await self.probed(opening, served, refresh=refresh)
        damaged: Sequence[DamagedSample] = ()
        replaces = opening.config.on_corrupt == "replace"
        if opening.files:
            index = await self._in_thread(opening.files.assemble)
        elif replaces and isinstance(opening.format, TolerantFormat):
            assemble = opening.format.assemble_tolerantly
            index, damaged = await self._in_thread(assemble, shards, inspected)
        else:
            index = await self._in_thread(opening.format.assemble, shards, inspected)
        if index.num_samples == 0:
            raise InvalidRequest(
                f"dataset `{opening.name}` has no sample: its {len(shards)} shards are empty or "
                "too short"
            )
        fields = chosen_fields(index.fields, opening.config.rename, opening.config.cast)
        corrupt = NO_SAMPLES
        if replaces:
            corrupt = await self._find_corrupt(opening, served, index, fields, damaged)
        ranges = fingerprint_ranges(shards) if opening.files is None else sample_ranges(index)
        contents = await read_ranges(served, *ranges)
        chosen = None if fields is index.fields else fields
        identity = await self._in_thread(
            fingerprint, shards, index, contents, corrupt, chosen or ()
        )
        storage = self._behind_cache(opening, served, index)
        if served.checksums:
            await self._in_thread(self._checksums.begin, opening.location, served.checksums)
        dataset = Dataset(
            opening.name,
            opening.config.format,
            opening.location,
            storage,
            index,
            identity,
            corrupt,
            chosen,
            sum(shard.size_bytes for shard in shards) if isinstance(index, ChunkIndex) else 0,
        )
        facts: dict[str, object] = {
            "dataset": opening.name,
            "samples": dataset.num_samples,
            "shards": len(shards),
            "fingerprint": dataset.fingerprint,
        }
        if len(corrupt):
            facts["replaced"] = len(corrupt)
        log_event("dataset open", facts)
        return dataset

    async def probed(
        self, opening: OpeningDataset, served: Storage, *, refresh: bool
    ) -> list[Arrays]:
        """What a probe found, for `Format.assemble`; empty without inspection.

        Raises:
            CorruptSample: the shards are nothing that the format stores.
        """
        probe = opening.format.inspection
        if not isinstance(probe, Probe):
            return []
        settings, location = opening.config.storage, opening.location
        return [await self.probes.run(probe, served, location, settings, refresh=refresh)]

    async def _find_corrupt(
        self,
        opening: OpeningDataset,
        served: Storage,
        index: SampleIndex,
        fields: Sequence[FieldSpec],
        damaged: Sequence[DamagedSample],
    ) -> npt.NDArray[np.int64]:
        """The ids of all corrupt samples, in rising order; they are reported.

        Args:
            opening: the dataset.
            served: its shards, uncompressed.
            index: its samples.
            fields: its fields, renamed and cast.
            damaged: those that are known to be corrupt.

        Raises:
            CorruptSample: they are more than `max_corrupt`, or a shard cannot be checked.
        """
        if self._reports is None:
            raise ConfigError(
                f"dataset `{opening.name}` replaces corrupt samples, and this daemon has no folder "
                "for their report"
            )
        if isinstance(index, ChunkIndex):
            raise ConfigError(
                f"dataset `{opening.name}` cannot replace corrupt samples: they are rows of a "
                f"{index.noun}, which is damaged as a whole; leave `on_corrupt` out"
            )
        corrupt = [
            CorruptRecord(served.shards[each.shard].name, each.offset, each.sample, each.reason)
            for each in damaged
        ]
        known = np.array([each.sample for each in damaged], np.int64)
        checking = self.checker.run(opening.location, served, index, known, fields, refresh=False)
        async with contextlib.aclosing(checking) as checked:
            async for shard in checked:
                if shard.failure:
                    raise shard.failure
                name = served.shards[shard.number].name
                corrupt += [
                    CorruptRecord(name, each.offset, shard.first_sample + each.sample, each.reason)
                    for each in shard.damages
                ]
        corrupt.sort(key=lambda each: each.sample_id)
        path = await self._in_thread(self._reports.write, opening.name, opening.identity, corrupt)
        if corrupt:
            facts = {"dataset": opening.name, "samples": len(corrupt), "report": path}
            log_event("corrupt samples found", facts, logging.WARNING)
        check_limit(opening.name, corrupt, index.num_samples, opening.config.max_corrupt)
        return np.array([each.sample_id for each in corrupt], np.int64)

    async def take_checksums(self, dataset: Dataset) -> None:
        """Have a checksum of every block of a local dataset, also for later daemons.

        Raises:
            StorageUnavailable: a shard cannot be read.
        """
        checksums = dataset.storage.checksums
        if checksums is None:
            return
        stopped = threading.Event()
        try:
            for shard in range(len(checksums.listed)):
                await self._in_thread(self._checksums.keep, dataset.uri, checksums, shard, stopped)
        finally:
            stopped.set()

    async def _detect(
        self, location: Location, config: DatasetConfig
    ) -> tuple[str, FileListing | None]:
        """The format that the names of files say; single files may lie in folders of folders.

        Those are listed then, and returned.
        """
        try:
            listed = await self._opener.open(
                location, config.storage, "*", follow_links=config.follow_links
            )
            names = [shard.name.rpartition("/")[2] for shard in listed.shards]
            return detect_format(location.text, names), None
        except ShardMissing as missing:
            files = replace(config, format=SINGLE_FILES)
            try:
                listing = cast("Listing", make_format(location.text, files).inspection)
                return SINGLE_FILES, await list_files(self._opener, location, files, listing)
            except (ShardMissing, InvalidRequest, ConfigError):
                raise missing from None

    def _open_unpacked(self, opening: OpeningDataset, location: Location) -> UnpackedDataset:
        shards = opening.source.shards
        if self._unpacked is None:
            raise ConfigError(
                f"dataset `{opening.name}` has compressed shards, and this daemon has no folder to "
                "unpack them"
            )
        if not opening.source.local_file(0) and not all(map(is_packed, shards)):
            raise InvalidRequest(
                f"some shards of {location.text} are compressed and some are not; compress all of "
                "them or none, or name those that are meant"
            )
        _check_distinct(shards, location)
        return self._unpacked.open(opening.identity, shards)

    def served(self, opening: OpeningDataset) -> Storage:
        """What batches are read from: the shards as they are stored, or unpacked."""
        if not opening.unpacked:
            return opening.source
        files: list[LocalFile] = []
        shards: list[Shard] = []
        for number, shard in enumerate(opening.source.shards):
            unpacked = opening.paths.get(number)
            files.append(unpacked or cast("LocalFile", opening.source.local_file(number)))
            shards.append(stat_shard(unpacked, unpacked_name(shard.name)) if unpacked else shard)
        return self._opener.local(files, shards, opening.unpacked)

    def _behind_cache(
        self, opening: OpeningDataset, storage: Storage, index: SampleIndex
    ) -> Storage:
        """The storage, behind the node's cache unless its shards are on this machine.

        Where samples lie in chunks, that of decoded shards, whose blocks are the chunks.
        """
        cache = self._cache if opening.config.cache else None
        if isinstance(index, ChunkIndex):
            decoded = DecodedStorage(storage, index, self.decoding)
            if cache is None:
                return decoded
            size = int(index.chunk_bytes.max())
            identity = f"{opening.identity} decoded"
            return CachedStorage(decoded, identity, cache, lambda _: decoded.chunks, size)
        if cache is None or storage.is_node_local:
            return storage

        def block_map(block_bytes: int) -> BlockMap:
            table = index.blocks(block_bytes)
            ranges = block_ranges(index, table, np.arange(table.num_blocks))
            return BlockMap.of(ranges.shard, ranges.start, ranges.stop)

        return CachedStorage(storage, opening.identity, cache, block_map)

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _check_distinct(shards: Sequence[Shard], location: Location) -> None:
    """Refuse a folder that has a shard twice, as it is and compressed."""
    plain = {shard.name for shard in shards if not is_packed(shard)}
    for shard in shards:
        if is_packed(shard) and unpacked_name(shard.name) in plain:
            raise InvalidRequest(
                f"{location.text} has both {shard.name} and {unpacked_name(shard.name)}; name "
                "those that are meant, by a pattern"
            )
