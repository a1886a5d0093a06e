"""Opens datasets: from a definition to a `Dataset`.

The shards are listed, unpacked if they are compressed, inspected as their format demands, and
assembled to one index.
"""

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import (
    CorruptRecord,
    CorruptReports,
    DecodedShards,
    SampleChecker,
    check_limit,
)
from gyre_daemon.datasets.codecs import chosen_fields, with_lengths
from gyre_daemon.datasets.dataset import (
    Dataset,
    Prefix,
    block_ranges,
    fingerprint,
    fingerprint_ranges,
    sample_ranges,
)
from gyre_daemon.datasets.filters import apply_filter, asked_of, numbered
from gyre_daemon.datasets.formats import FieldSpec, Format, ListedFormat, SampleIndex
from gyre_daemon.datasets.formats.base import Arrays, DamagedSample, TolerantFormat
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from gyre_daemon.datasets.formats.concat import (
    with_fields,
    with_folders,
)
from gyre_daemon.datasets.indexing.changes import ChecksumStore
from gyre_daemon.datasets.indexing.format_search import (
    FileListing,
    FoundFormat,
    ManifestReader,
    Nested,
    Partitions,
    find_format,
    find_nested,
    list_files,
    open_partitions,
    partitions_of,
)
from gyre_daemon.datasets.indexing.shard_lists import check_pattern, find_shard_list
from gyre_daemon.datasets.indexing.shards import (
    OpeningDataset,
    ProbeRunner,
    ShardIndexer,
    is_packed,
)
from gyre_daemon.datasets.indexing.unpacked import (
    UnpackedDataset,
    UnpackedShards,
    check_distinct,
    unpacked_name,
)
from gyre_daemon.datasets.known_formats import FORMATS, make_format, shown_format
from gyre_daemon.datasets.made_shards import Decoders, decoded_shards, places_of
from gyre_daemon.datasets.scanning import scan_workers
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.errors import ConfigError, InvalidRequest, ShardMissing
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.node import CachedStorage, NodeCache
from gyre_daemon.storage.listing import stat_shard
from gyre_daemon.storage.location import Location, parse_location
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.reads import ConcatenatedFiles, Storage, read_ranges
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer

# Of more local files, blocks of the cache have several: each block takes 80 bytes for good.
_MAX_BY_SAMPLE = 1 << 22


class Indexer:
    """Indexes datasets in separate threads and processes."""

    def __init__(
        self,
        opener: StorageOpener,
        sidecars: SidecarStore,
        unpacked: UnpackedShards,
        cache: NodeCache | None,
        reports: CorruptReports,
        compute_server: ComputeServer,
    ) -> None:
        self._opener = opener
        self._sidecars = sidecars
        self._unpacked = unpacked
        self._cache = cache
        self._checksums = ChecksumStore(sidecars)
        self._probes = ProbeRunner(opener, sidecars)
        self._processes = scan_workers(compute_server)
        self.shards = ShardIndexer(sidecars, self._checksums, self._processes)
        self._manifests = ManifestReader(self._processes)
        self.checker = SampleChecker(sidecars, self._processes)
        self.decoding = Decoders(compute_server, opener.workers)
        self._reports = reports

    def close(self) -> None:
        """Stop the work under way."""
        self.decoding.close()

    async def begin(self, name: str | None, config: DatasetConfig) -> OpeningDataset:
        """List the shards of a dataset; without a name, its location is its name.

        Where the configuration names no format, the names of all files there decide.
        """
        location = await compute(parse_location, config.uri)  # it may name 100,000 shards
        try:
            return await self._begin(name, config, Nested(location))
        except ShardMissing as missing:
            nested = await find_nested(self._opener, location, config)
            while nested:
                try:
                    return await self._begin(name, config, nested)
                except ShardMissing:
                    nested = await find_nested(self._opener, nested.location, config)
            raise missing

    async def _begin(
        self, name: str | None, config: DatasetConfig, nested: Nested
    ) -> OpeningDataset:
        """See `begin`; the location may be in folders of another one."""
        location = nested.location
        listed = await find_shard_list(self._opener, location, config)
        if listed:
            config = replace(config, format=listed.format)
        found = FoundFormat(config.format)
        if not config.format:
            found = await find_format(self._opener, location, config, self._manifests)
            config = replace(config, format=found.name)
            log_event("format found", {"location": location.text, "format": config.format})
        dataset_format = make_format(name or config.uri, config)
        source: Storage
        partitions = Partitions({})
        if isinstance(dataset_format, ListedFormat):
            if config.append:
                raise ConfigError(
                    f"dataset `{name or config.uri}` cannot grow by shards: all its single files "
                    "are one shard; leave `append` out"
                )
            dataset_format = found.files or await list_files(
                self._opener, location, config, dataset_format, self._manifests
            )
            source = dataset_format.storage
        elif listed:
            source = listed.storage
        elif nested.root:
            source = await open_partitions(
                self._opener, nested, config, found.pattern or dataset_format.pattern
            )
            config, partitions = partitions_of(nested.root, source).chosen(config)
            dataset_format = cast("Format", make_format(name or config.uri, config))
        else:
            source = await self._open(location, config, found.pattern or dataset_format.pattern)
            await check_pattern(self._opener, location, config, source)
        opening = OpeningDataset(
            name or location.text,
            config,
            dataset_format,
            location.text,
            source,
            [None] * len(source.shards),
            None,
            {},
            partitions.fields,
            listed,
        )
        if dataset_format.unpacks_gzip and any(map(is_packed, source.shards)):
            opening.unpacked = await self._open_unpacked(opening, location)
        return opening

    async def _open(self, location: Location, config: DatasetConfig, pattern: str) -> Storage:
        """The shards of a location, by the pattern; else by the ambiguous one of the format."""
        open_all = partial(
            self._opener.open, location, config.storage, follow_links=config.follow_links
        )
        entry = FORMATS.get(config.format)
        try:
            return await open_all(pattern)
        except ShardMissing as missing:
            if not entry or not entry.ambiguous_pattern or pattern != entry.pattern:
                raise
            try:
                return await open_all(entry.ambiguous_pattern)
            except ShardMissing:
                raise missing from None

    async def finish(self, opening: OpeningDataset, *, refresh: bool) -> Dataset:
        """The dataset, once all shards are scanned.

        Args:
            opening: from `begin`.
            refresh: probe the shards even if the result of an earlier probe was kept.
        """
        served = await self.served(opening)
        shards = served.shards
        is_tolerant = opening.config.on_corrupt == "replace"
        index, damaged = await self.assembled(
            opening, served, range(len(shards)), refresh=refresh, is_tolerant=is_tolerant
        )
        if index.num_samples == 0:
            raise InvalidRequest(
                f"dataset `{opening.name}` has no sample: all of its shards, "
                f"{len(shards)} in number, are empty or too short"
            )
        fields = chosen_fields(index.fields, opening.config.rename, opening.config.cast)
        chosen = None if fields is index.fields else fields
        names = [spec.name for spec in index.fields]
        index = with_fields(index, fields)
        if not opening.config.append:  # an appended shard may have other lengths
            ragged = opening.scan.ragged if opening.scan else ()
            fields = await compute(with_lengths, index, fields, names, ragged)
        corrupt = NO_SAMPLES
        if is_tolerant:
            corrupt = await self._find_corrupt(opening, served, index, fields, damaged)
        num_all = index.num_samples
        text = opening.config.filter
        if text and not asked_of(text, fields):  # otherwise it waits for these
            index, kept = await compute(apply_filter, index, fields, text)
            corrupt = numbered(corrupt, kept)
        is_listed = isinstance(opening.format, FileListing)
        ranges = sample_ranges(index) if is_listed else fingerprint_ranges(shards)
        contents = await read_ranges(served, *ranges)
        identity = await compute(fingerprint, shards, index, contents, corrupt, chosen or ())
        storage = behind_cache(opening, served, index, self._cache, self.decoding)
        if served.checksums:
            self._checksums.serve(opening.location, served.checksums)
        dataset = Dataset(
            opening.name,
            shown_format(opening.config.format),
            opening.location,
            storage,
            shards,
            index,
            identity,
            corrupt,
            fields,
            num_all - index.num_samples,
            opening.config.append,
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

    async def prefix(
        self, opening: OpeningDataset, dataset: Dataset, num_shards: int
    ) -> Prefix | None:
        """The first shards of a dataset; None if they have changed since.

        Args:
            opening: from `begin`, with all shards scanned.
            dataset: that was opened before.
            num_shards: how many of the first shards.
        """
        served = await self.served(opening)
        shards = served.shards[:num_shards]
        if list(shards) != list(dataset.shards[:num_shards]):
            return None
        is_tolerant = opening.config.on_corrupt == "replace"
        index, _ = await self.assembled(
            opening, served, range(len(shards)), refresh=False, is_tolerant=is_tolerant
        )
        fields = chosen_fields(index.fields, opening.config.rename, opening.config.cast)
        chosen = () if fields is index.fields else fields
        index = with_fields(index, fields)
        if opening.config.filter:
            index, _ = await compute(apply_filter, index, fields, opening.config.filter)
        corrupt = dataset.corrupt[: np.searchsorted(dataset.corrupt, index.num_samples)]
        contents = await read_ranges(served, *fingerprint_ranges(shards))
        identity = await compute(fingerprint, shards, index, contents, corrupt, chosen)
        keeps_blocks = (chunks_of(index) is None) == (chunks_of(dataset.index) is None)
        return Prefix(index.num_samples, identity, fields, keeps_blocks)

    async def assembled(
        self,
        opening: OpeningDataset,
        served: Storage,
        numbers: Sequence[int],
        *,
        refresh: bool,
        is_tolerant: bool,
    ) -> tuple[SampleIndex, Sequence[DamagedSample]]:
        """The index of inspected shards, with the columns of their folders; and damaged samples.

        Args:
            opening: the dataset.
            served: has these shards, and maybe others behind them.
            numbers: of the shards in the dataset.
            refresh: see `finish`.
            is_tolerant: whether damaged samples, where the format can tell them, are no error.

        Raises:
            CorruptSample: the shards do not make one dataset.
        """
        shards = served.shards[: len(numbers)]
        if opening.scan is None:
            inspected = await self._probes.run(opening, served, len(shards), refresh=refresh)
        else:
            inspected = [cast("Arrays", opening.scans[number]) for number in numbers]
        damaged: Sequence[DamagedSample] = ()
        if is_tolerant and isinstance(opening.format, TolerantFormat):
            index, damaged = await compute(opening.format.assemble_tolerantly, shards, inspected)
        else:
            index = await compute(opening.format.assemble, shards, inspected)
        return with_folders(index, opening.columns(numbers)), damaged

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
                await self._checksums.keep(dataset.uri, checksums, shard, stopped)
        finally:
            stopped.set()

    async def _find_corrupt(
        self,
        opening: OpeningDataset,
        served: Storage,
        index: SampleIndex,
        fields: Sequence[FieldSpec],
        damaged: Sequence[DamagedSample],
    ) -> npt.NDArray[np.int64]:
        """The ids of all corrupt samples, in rising order; they are reported.

        A chunk that cannot be decoded makes all of its samples corrupt.

        Args:
            opening: the dataset.
            served: its shards, uncompressed.
            index: its samples.
            fields: its fields, renamed and cast.
            damaged: those that are known to be corrupt.

        Raises:
            CorruptSample: they are more than `max_corrupt`, or a shard cannot be checked.
        """
        decoded: DecodedShards | None = None
        if chunks := chunks_of(index):
            decoded = DecodedShards(served, chunks, index, self.decoding)
        corrupt = [
            CorruptRecord(
                *served.shards[each.shard].place_of(each.offset), each.sample, each.reason
            )
            for each in damaged
        ]
        known = np.array([each.sample for each in damaged], np.int64)
        checking = self.checker.run(
            opening.location, decoded or served, index, known, fields, refresh=False
        )
        async with contextlib.aclosing(checking) as checked:
            async for shard in checked:
                if shard.failure:
                    raise shard.failure
                listed = served.shards[shard.number]
                for damage in shard.damages:
                    sample, place = shard.first_sample + damage.sample, damage.offset
                    corrupt.append(CorruptRecord(*listed.place_of(place), sample, damage.reason))
        corrupt.sort(key=lambda each: each.sample_id)
        path = await self._reports.write(opening.name, opening.identity, corrupt)
        if corrupt:
            facts = {"dataset": opening.name, "samples": len(corrupt), "report": path}
            log_event("corrupt samples found", facts, logging.WARNING)
        check_limit(opening.name, corrupt, index.num_samples, opening.config.max_corrupt)
        return np.array([each.sample_id for each in corrupt], np.int64)

    async def _open_unpacked(self, opening: OpeningDataset, location: Location) -> UnpackedDataset:
        shards = opening.source.shards
        if not opening.source.local_file(0) and not all(map(is_packed, shards)):
            raise InvalidRequest(
                f"some shards of {location.text} are compressed and some are not; compress all of "
                "them or none, or name the ones you mean"
            )
        check_distinct(shards, location.text)
        folder, work = self._unpacked.folder, self._unpacked.open
        return await MOUNTS.run(folder, work, opening.identity, shards)

    async def served(self, opening: OpeningDataset) -> Storage:
        """The storage that batches are read from: the shards as they are stored, or unpacked."""
        if not opening.unpacked:
            return opening.source
        files: list[LocalFile] = []
        shards: list[Shard] = []
        for number, listed in enumerate(opening.source.shards):
            if unpacked := opening.paths.get(number):
                name = unpacked_name(listed.name)
                files.append(unpacked)
                shards.append(await MOUNTS.run(unpacked.root.folder, stat_shard, unpacked, name))
            else:
                files.append(cast("LocalFile", opening.source.local_file(number)))
                shards.append(listed)
        return self._opener.local(files, shards, opening.unpacked)


def behind_cache(
    opening: OpeningDataset,
    storage: Storage,
    index: SampleIndex,
    node_cache: NodeCache | None,
    decoding: Decoders,
) -> Storage:
    """The storage, behind the node's cache, which local files pass by while their mount is fast.

    For samples in chunks, that of decoded shards, whose blocks are the chunks.
    """
    cache = node_cache if opening.config.cache else None
    if chunks := chunks_of(index):
        decoded = decoded_shards(storage, chunks, index.digest(), decoding)
        if cache is None:
            return decoded
        size = int(chunks.chunk_bytes.max())
        identity = f"{opening.identity} decoded"
        return CachedStorage(decoded, identity, cache, lambda _: places_of(chunks), size)
    if cache is None:
        return storage

    def block_map(block_bytes: int) -> BlockMap:
        table = index.blocks(block_bytes)
        ranges = block_ranges(index, table, np.arange(table.num_blocks))
        return BlockMap.of(ranges.shard, ranges.start, ranges.stop)

    is_folder = isinstance(storage, ConcatenatedFiles) and storage.table.stamps is not None
    return CachedStorage(
        storage,
        opening.identity,
        cache,
        block_map,
        by_sample=is_folder and index.num_samples <= _MAX_BY_SAMPLE,
        passes_local=True,
    )
