"""The datasets of a daemon: from the name that a client sends to a dataset that is open, indexed and fingerprinted."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.changes import Change, DatasetRecords, Known
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.indexing import Indexer, ScannedShard
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.datasets.unpacked import UnpackedShards, is_compressed, unpacked_name
from gyre_daemon.errors import NotAllowed, UnknownDataset
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.engine.endpoint import Endpoint
from gyre_daemon.storage.opener import StorageOpener


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """One more shard of a dataset has its index.

    Attributes:
        num_done: shards so far.
        num_shards: of the dataset.
        num_samples: in the shards so far, where they are scanned; in the last progress, of the dataset.
        shard: the one just done.
        reused: its sidecar was fresh, or nothing is scanned and it is what it was.
        change: what became of it since it was last indexed.
        fingerprint: of the dataset, in the last progress; empty before.
        fingerprint_before: likewise, of the dataset as it was; empty where it was never indexed or opened.
        removed: likewise, shards that it had and has no longer.
    """

    num_done: int
    num_shards: int
    num_samples: int
    shard: str
    reused: bool
    change: Change
    fingerprint: str = ""
    fingerprint_before: str = ""
    removed: tuple[str, ...] = ()

    def after(self, shard: str, scanned: ScannedShard) -> "IndexProgress":
        """The progress once one more shard is done."""
        return IndexProgress(
            self.num_done + 1,
            self.num_shards,
            self.num_samples + scanned.num_samples,
            shard,
            scanned.reused,
            scanned.change or "indexed",
        )

    def finished(self, dataset: Dataset, known: Known, names: Set[str]) -> "IndexProgress":
        """The last progress, of a dataset whose shards have these names; compressed ones are known by both of theirs."""
        names = names | {unpacked_name(name) for name in names if is_compressed(name)}
        return replace(
            self,
            num_samples=dataset.num_samples,
            fingerprint=dataset.fingerprint,
            fingerprint_before=known.fingerprint,
            removed=tuple(sorted(known.shards.keys() - names)),
        )


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
        unpacked: UnpackedShards | None = None,
    ) -> None:
        """Nothing is open yet.

        Args:
            datasets: by name.
            opener: of their storages.
            sidecars: keep their indexes.
            cache: of what is remote; None for none.
            allow_ad_hoc: clients may define datasets.
            unpacked: where compressed shards go; None where there are none.
        """
        self.datasets = datasets
        self._has_cache = cache is not None
        self._opener = opener
        self._indexer = Indexer(opener, sidecars, unpacked, cache)
        self._records = DatasetRecords(sidecars)
        self._allow_ad_hoc = allow_ad_hoc
        self._open: dict[str, Dataset] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    @property
    def has_cache(self) -> bool:
        """Datasets in object storage are read through the node's cache, unless they say otherwise."""
        return self._has_cache

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
                opening = await self._indexer.begin(self._shown(name), config)
                async for _ in self._indexer.scan(opening, None):
                    pass
                return self._keep(name, config, await self._indexer.finish(opening, anew=False))
            return self._open[name]

    async def index(self, name: str, config: DatasetConfig, *, with_checksums: bool = False) -> AsyncIterator[IndexProgress]:
        """List the shards anew, index what is stale, and tell about each shard; sessions that come later see the result.

        Args:
            name: from `resolve`.
            config: likewise.
            with_checksums: wait until every local shard has checksums, which reads all of it.

        Raises:
            Overloaded: an index cannot be stored; otherwise as `open`.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            opening = await self._indexer.begin(self._shown(name), config)
            known = await asyncio.to_thread(self._records.load, name, opening.location, self._open.get(name))
            progress = IndexProgress(0, len(opening.scans), 0, "", reused=False, change="indexed")
            async for scanned in self._indexer.scan(opening, known):
                if progress.num_done:
                    yield progress
                progress = progress.after(opening.source.shards[scanned.number].name, scanned)
            dataset = await self._indexer.finish(opening, anew=True)
            if with_checksums:
                await self._indexer.take_checksums(dataset)
            self._keep(name, config, dataset)
            shards = opening.source.shards
            await asyncio.to_thread(self._records.save, name, opening.location, shards, dataset.fingerprint)
            yield progress.finished(dataset, known, {shard.name for shard in shards})

    def close(self) -> None:
        """Forget all datasets; sessions that still read keep theirs."""
        self._open.clear()
        self._indexer.close()

    def _shown(self, name: str) -> str | None:
        """A configured name; an ad-hoc dataset has none."""
        return name if name in self.datasets else None

    def _keep(self, name: str, config: DatasetConfig, dataset: Dataset) -> Dataset:
        """A dataset that was replaced while it was being opened is only for those who asked for it before."""
        if self.datasets.get(name, config) == config:
            self._open[name] = dataset
        return dataset
