"""The datasets of a daemon: from the name that a client sends to a dataset that is open, indexed and fingerprinted."""

import asyncio
import io
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np

from gyre_daemon.cache import Arrays, BlockMap, CachedStorage, NodeCache, SidecarKey, SidecarStore
from gyre_daemon.config import DatasetConfig
from gyre_daemon.dataset import Dataset, block_ranges, fingerprint, probe_ranges
from gyre_daemon.errors import InvalidRequest, NotAllowed, Overloaded, UnknownDataset, first_error
from gyre_daemon.events import log_event
from gyre_daemon.formats import Format, SampleIndex, make_format
from gyre_daemon.probing import Prober
from gyre_daemon.storage import Endpoint, Reads, Storage, StorageOpener, file_error, parse_location

_NUM_SCANS = 4  # shards that are scanned at once


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """One more shard of a dataset has its index.

    Attributes:
        num_done: shards so far.
        num_shards: of the dataset.
        num_samples: in the shards so far; 0 where nothing is scanned.
        shard: the one just done.
        reused: its sidecar was fresh.
    """

    num_done: int
    num_shards: int
    num_samples: int
    shard: str
    reused: bool


@dataclass(slots=True)
class _Opening:
    """A dataset while its shards are being indexed."""

    name: str
    config: DatasetConfig
    format: Format
    location: str
    storage: Storage
    scans: list[Arrays | None]


class Catalog:
    """Opens each dataset once and keeps it; several clients that want the same one wait for the same opening."""

    def __init__(
        self,
        datasets: Mapping[str, DatasetConfig],
        opener: StorageOpener,
        sidecars: SidecarStore,
        cache: NodeCache | None,
        *,
        allow_ad_hoc: bool,
    ) -> None:
        self.datasets = datasets
        self._cache = cache
        self._opener = opener
        self._sidecars = sidecars
        self._allow_ad_hoc = allow_ad_hoc
        self._open: dict[str, Dataset] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._scanners = ThreadPoolExecutor(_NUM_SCANS, thread_name_prefix="gyre-scan")
        self._prober = Prober(opener, sidecars, self._scanners)

    @property
    def has_cache(self) -> bool:
        """Datasets in object storage are read through the node's cache, unless they say otherwise."""
        return self._cache is not None

    @property
    def endpoints(self) -> Iterable[Endpoint]:
        """The object storages that datasets were opened from."""
        return self._opener.endpoints.values()

    def replace(self, datasets: Mapping[str, DatasetConfig]) -> None:
        """From now on these are served; whoever reads one that is gone, or another now, goes on with what it has."""
        for name, config in self.datasets.items():
            if datasets.get(name) != config:
                self._open.pop(name, None)
        self.datasets = datasets

    def is_open(self, name: str) -> bool:
        """Whether the dataset's index is in memory."""
        return name in self._open

    def resolve(self, name: str) -> tuple[str, DatasetConfig]:
        """A configured dataset.

        Raises:
            UnknownDataset: lists what there is.
        """
        if name not in self.datasets:
            known = ", ".join(sorted(self.datasets)) or "none"
            raise UnknownDataset(f"no dataset is named {name[:200]!r}; this daemon serves: {known}", {"dataset": name[:200]})
        return name, self.datasets[name]

    def resolve_ad_hoc(self, config: DatasetConfig) -> tuple[str, DatasetConfig]:
        """A dataset that the client defines; its definition is its name.

        Raises:
            NotAllowed: this daemon serves named datasets only.
        """
        if not self._allow_ad_hoc:
            raise NotAllowed(
                "this daemon serves the datasets that its operator named; ask for one by name, or run a private daemon"
            )
        uri = config.uri if "://" in config.uri else os.path.abspath(config.uri)  # noqa: PTH100  a glob is no path
        options = json.dumps([config.format, dict(config.options), dict(config.storage)], sort_keys=True, default=str)
        return f"{uri} {options}", config

    async def open(self, name: str, config: DatasetConfig) -> Dataset:
        """The open dataset; its index is built where it is missing.

        Raises:
            ConfigError, InvalidRequest: the definition makes no sense.
            ShardMissing, NotAllowed, StorageUnavailable, CorruptSample: its shards cannot be used; names the first.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._open:
                opening = await self._list(name, config)
                async for _ in self._index(opening, must_save=False):
                    pass
                return self._keep(name, config, await self._finish(opening, anew=False))
            return self._open[name]

    async def index(self, name: str, config: DatasetConfig) -> AsyncIterator[IndexProgress]:
        """List the shards anew, index what is stale, and tell about each shard; sessions that come later see the result.

        Raises:
            Overloaded: an index cannot be stored; otherwise as `open`.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            opening = await self._list(name, config)
            async for progress in self._index(opening, must_save=True):
                yield progress
            self._keep(name, config, await self._finish(opening, anew=True))

    def close(self) -> None:
        """Forget all datasets; sessions that still read keep theirs."""
        self._open.clear()
        self._scanners.shutdown(wait=False, cancel_futures=True)

    def _keep(self, name: str, config: DatasetConfig, dataset: Dataset) -> Dataset:
        """A dataset that was replaced while it was being opened is only for those who asked for it before."""
        if self.datasets.get(name, config) == config:
            self._open[name] = dataset
        return dataset

    async def _list(self, name: str, config: DatasetConfig) -> _Opening:
        dataset_format = make_format(name, config)
        location = parse_location(config.uri)
        storage = await self._opener.open(location, config.storage, dataset_format.pattern)
        name = name if name in self.datasets else location.text
        return _Opening(name, config, dataset_format, location.text, storage, [None] * len(storage.shards))

    async def _index(self, opening: _Opening, *, must_save: bool) -> AsyncIterator[IndexProgress]:
        """Fill in the scans of an opening, several shards at once."""
        if opening.format.scanner is None:
            return
        slots = asyncio.Semaphore(_NUM_SCANS)
        tasks = [asyncio.create_task(self._scan(opening, shard, slots, must_save)) for shard in range(len(opening.scans))]
        num_samples = 0
        try:
            for num_done, task in enumerate(asyncio.as_completed(tasks), start=1):
                shard, reused = await task
                num_samples += len(cast("Arrays", opening.scans[shard])["first"]) - 1
                yield IndexProgress(num_done, len(tasks), num_samples, opening.storage.shards[shard].name, reused)
        finally:
            for pending in tasks:
                pending.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _scan(self, opening: _Opening, shard: int, slots: asyncio.Semaphore, must_save: bool) -> tuple[int, bool]:
        """Load or make the index of one shard; gives the shard and whether its sidecar was fresh."""
        listed, path = opening.storage.shards[shard], opening.storage.local_path(shard)
        key = SidecarKey(opening.location, listed.name, listed.size_bytes, listed.version, str(opening.format.scanner))
        async with slots:
            arrays = await self._sidecars.load(key, path)
            reused = arrays is not None
            if arrays is None:
                arrays = await self._scan_shard(opening, shard)
                await self._save(key, shard, opening, arrays, must_save)
        opening.scans[shard] = arrays
        return shard, reused

    async def _scan_shard(self, opening: _Opening, shard: int) -> Arrays:
        loop = asyncio.get_running_loop()
        name, path = opening.storage.shards[shard].name, opening.storage.local_path(shard)
        if path:
            return await loop.run_in_executor(self._scanners, _scan_file, opening, name, str(path))
        chunks = opening.storage.stream(shard)
        file = cast("BinaryIO", _StreamFile(chunks, loop))
        return await loop.run_in_executor(self._scanners, opening.format.scan, name, file)

    async def _save(self, key: SidecarKey, shard: int, opening: _Opening, arrays: Arrays, must_save: bool) -> None:
        try:
            await self._sidecars.save(key, opening.storage.local_path(shard), arrays)
        except Overloaded as error:
            if must_save:
                raise
            log_event("index not stored", {"shard": key.shard, "reason": error}, logging.WARNING)

    async def _finish(self, opening: _Opening, *, anew: bool) -> Dataset:
        shards = opening.storage.shards
        scans = cast("list[Arrays]", opening.scans) if opening.format.scanner else []
        if probe := opening.format.probe:
            storage, settings = opening.storage, opening.config.storage
            scans = [await self._prober.look(probe, storage, opening.location, settings, anew=anew)]
        index = await asyncio.get_running_loop().run_in_executor(self._scanners, opening.format.assemble, shards, scans)
        if index.num_samples == 0:
            raise InvalidRequest(f"dataset `{opening.name}` has no sample: its {len(shards)} shards are empty or too short")
        probes = await _probe(opening.storage)
        storage = self._behind_cache(opening, index)
        dataset = Dataset(
            opening.name, opening.config.format, opening.location, storage, index, fingerprint(shards, index, probes)
        )
        facts = {
            "dataset": opening.name,
            "samples": dataset.num_samples,
            "shards": len(shards),
            "fingerprint": dataset.fingerprint,
        }
        log_event("dataset open", facts)
        return dataset

    def _behind_cache(self, opening: _Opening, index: SampleIndex) -> Storage:
        """The storage, behind the node's cache where its shards are not on this machine."""
        storage, config = opening.storage, opening.config
        if self._cache is None or not config.cache or storage.local_path(0):
            return storage
        endpoints = sorted(str(value) for key, value in config.storage.items() if "endpoint" in key.lower())

        def block_map(block_bytes: int) -> BlockMap:
            table = index.blocks(block_bytes)
            ranges = block_ranges(index, table, np.arange(table.num_blocks))
            return BlockMap.of(ranges.shard, ranges.start, ranges.stop)

        return CachedStorage(storage, " ".join([opening.location, *endpoints]), self._cache, block_map)


class _StreamFile(io.RawIOBase):
    """A stream of the event loop as a file that a scanning thread reads from its beginning to its end."""

    def __init__(self, chunks: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._chunks = chunks
        self._loop = loop
        self._rest = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(asyncio.run_coroutine_threadsafe(self._next(), self._loop).result())
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self._position += count
        return count

    async def _next(self) -> bytes:
        return await anext(self._chunks, b"")


def _scan_file(opening: _Opening, name: str, path: str) -> Arrays:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return opening.format.scan(name, file)
    except OSError as error:
        raise file_error(name, error) from error


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
