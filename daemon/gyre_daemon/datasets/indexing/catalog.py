"""The datasets of a daemon, by name: opened once, indexed, and kept."""

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gyre_daemon.config import DatasetConfig, MixtureConfig, PackConfig
from gyre_daemon.datasets.checks import CorruptReports
from gyre_daemon.datasets.dataset import Dataset, Memo, Prefix, pack
from gyre_daemon.datasets.formats.concat import MixedIndex, Source
from gyre_daemon.datasets.indexing.changes import (
    RECORD_SUFFIX,
    load_previous,
    remembered,
    save_record,
    save_version,
    what_changed,
)
from gyre_daemon.datasets.indexing.indexer import Indexer
from gyre_daemon.datasets.indexing.shards import IndexProgress, OpeningDataset
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards
from gyre_daemon.datasets.shard_worker import CheckMedia
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.errors import ConfigError, InvalidRequest, NotAllowed, UnknownDataset
from gyre_daemon.order.mixture import MixedSource, Mixture, source_seed, whole_weights
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.order.steps import Phase
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.engine.endpoint import Endpoint
from gyre_daemon.storage.location import CLASS, allow_scheme, redact
from gyre_daemon.storage.reads import MixedStorage
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer

if TYPE_CHECKING:
    from gyre_daemon.datasets.indexing.linting import LintProgress

_MAX_PREFIXES = 64  # each is small, and takes a look at all shards to find again
OpenSource = Callable[[str, DatasetConfig], Awaitable[Dataset]]
FilterLate = Callable[[str, DatasetConfig, Dataset], Awaitable[Dataset]]
# Each takes 20 bytes for each document. Jobs keep the one that they read in any case; with fewer,
# a job that describes one and then opens it may pack twice.
_MAX_PACKED = 8
_MAX_MIXTURES = 1024  # as many as are configured; those of sources that are gone make way
Sources = Sequence[tuple[str, Dataset]]


class Catalog:
    """Opens each dataset once and keeps it; clients that want the same one wait together.

    Attributes:
        datasets: the definitions by name.
        has_cache: whether remote datasets are read through the node's cache, unless they opt out.
        open_source: opens a source of a mixture, with its own transforms if it has any; as `open`
            until somebody who knows transforms says otherwise.
        filter_late: takes a dataset as it is stored, and leaves out what a filter says that
            compares more than the index knows; does nothing until somebody says otherwise.
    """

    def __init__(
        self,
        datasets: Mapping[str, DatasetConfig],
        opener: StorageOpener,
        sidecars: SidecarStore,
        cache: NodeCache | None,
        *,
        allow_ad_hoc: bool,
        compute_server: ComputeServer,
        unpacked: UnpackedShards,
        reports: CorruptReports,
    ) -> None:
        """Open nothing yet.

        Args:
            datasets: the definitions by name.
            opener: of their storages.
            sidecars: for their indexes.
            cache: of remote data; None for none.
            allow_ad_hoc: whether clients may define datasets.
            compute_server: forks the processes that scan and decode; closed by its owner.
            unpacked: where compressed shards go.
            reports: of samples that others replace.
        """
        self.datasets = datasets
        self.has_cache = cache is not None
        self._opener = opener
        self._indexer = Indexer(opener, sidecars, unpacked, cache, reports, compute_server)
        self._records = sidecars.sibling(RECORD_SUFFIX)
        self._allow_ad_hoc = allow_ad_hoc
        self._open: dict[str, Dataset] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._lint_locks: dict[str, asyncio.Lock] = {}
        # of open datasets that grow, by name, fingerprint and number of shards
        self._prefixes: Memo[Prefix] = Memo(_MAX_PREFIXES)
        self.open_source: OpenSource = self.open
        self.filter_late: FilterLate = _unfiltered
        self._packed: Memo[Dataset] = Memo(_MAX_PACKED)
        self._packing = asyncio.Lock()
        self._mixtures: Memo[Dataset] = Memo(_MAX_MIXTURES)

    @property
    def endpoints(self) -> Iterable[Endpoint]:
        """The object storages that datasets were opened from."""
        return self._opener.endpoints.values()

    def replace(self, datasets: Mapping[str, DatasetConfig]) -> None:
        """Serve these datasets from now on; local shards without a reader are closed.

        A session keeps the dataset that it reads, even if its definition is gone or has changed.
        """
        for name in self._open.keys() & self.datasets.keys():
            config, after = self.datasets[name], datasets.get(name)
            # its readers and its transforms are checked for each session
            if after is None or config != replace(
                after, allow=config.allow, transforms=config.transforms, pack=config.pack
            ):
                self._open.pop(name, None)
        self.datasets = datasets
        self._opener.expire_files()

    def close_idle_files(self) -> None:
        """Close local shards that no session reads any more, soon."""
        self._opener.close_idle_files()

    def is_open(self, name: str) -> bool:
        """Whether the dataset's index is in memory."""
        mixture = self.datasets[name].mixture if name in self.datasets else None
        return all(map(self.is_open, mixture.sources)) if mixture else name in self._open

    def resolve(
        self, name: str, readable: Collection[str] | None = None
    ) -> tuple[str, DatasetConfig]:
        """A configured dataset, of the `readable` names that exist for the caller; None for all.

        Raises:
            UnknownDataset: there is none of this name; lists those that there are.
        """
        readable = self.datasets if readable is None else readable
        if name not in readable or name not in self.datasets:
            known = ", ".join(sorted(readable)) or "none"
            raise UnknownDataset(
                f"no dataset is named {redact(name)[:200]!r}; this daemon serves: {known}",
                {"dataset": redact(name)[:200]},
            )
        return name, self.datasets[name]

    def resolve_ad_hoc(self, config: DatasetConfig) -> tuple[str, DatasetConfig]:
        """A dataset that the client defines; its definition is its name (`ad_hoc`).

        Raises:
            NotAllowed: this daemon serves named datasets only.
            InvalidRequest: the client brings a file system for a scheme that the daemon reads.
        """
        if not self._allow_ad_hoc:
            raise NotAllowed(
                "this daemon serves the datasets that its operator named; ask for one by name, or "
                "run a private daemon"
            )
        if CLASS in config.storage:
            allow_scheme(config.uri)
        return name_of(config), config

    async def open(self, name: str, config: DatasetConfig) -> Dataset:
        """The open dataset, packed if its definition says so; indexes that are missing are built.

        Raises:
            ConfigError, InvalidRequest: the definition makes no sense.
            ShardMissing, NotAllowed, StorageUnavailable, CorruptSample: its shards cannot be used;
                names the first.
        """
        if config.mixture:
            sources = [
                (each, await self.open_source(*self.resolve(each)))
                for each in config.mixture.sources
            ]
            origin = config.mixture, *(source for _, source in sources)
            dataset = self._mixtures.get(name, *origin) or self._mixtures.keep(
                _mixed(name, config.mixture, sources), name, *origin
            )
        else:
            documents = await self.stored(name, config)
            dataset = await self.filter_late(name, config, documents)
        return await self.packed(dataset, config.pack) if config.pack else dataset

    async def packed(self, documents: Dataset, config: PackConfig) -> Dataset:
        """The packed sequences of an open dataset.

        Raises:
            InvalidRequest: its samples cannot be packed so.
        """
        key = documents.fingerprint, documents.transforms, config
        if found := self._packed.get(key, documents.storage):  # while another one may be packed
            return found
        async with self._packing:
            found = self._packed.get(key, documents.storage)
            if found is None:
                packed = await compute(pack, documents, config)
                found = self._packed.keep(packed, key, documents.storage)
            return found

    async def stored(self, name: str, config: DatasetConfig) -> Dataset:
        """The open dataset, as it is before `filter_late` and packing.

        One that is open is there at once, also while it is indexed again.
        """
        if name in self._open:
            return self._open[name]
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._open:
                opening = await self._scanned(name, config)
                dataset = await self._indexer.finish(opening, refresh=False)
                return await self._keep(name, config, dataset)
            return self._open[name]

    async def prefix(
        self, name: str, config: DatasetConfig, dataset: Dataset, num_shards: int
    ) -> Prefix:
        """The first `num_shards` shards, one or more, of an open dataset as one of their own.

        Raises:
            InvalidRequest: a shard has changed since the dataset was opened.
            GyreError: as `open`.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            key = name, dataset.fingerprint, num_shards
            prefix = self._prefixes.get(key)
            if prefix is None:
                opening = await self._scanned(name, config)
                prefix = await self._indexer.prefix(opening, dataset, num_shards)
                if prefix is None:
                    raise InvalidRequest(
                        f"the shards of `{dataset.name}` have changed since the dataset was "
                        "opened; `gyre index` looks again"
                    )
                self._prefixes.keep(prefix, key)
            return prefix

    async def what_changed(self, dataset: Dataset, fingerprint: str) -> str:
        """See `changes.what_changed`."""
        return await what_changed(self._records, dataset, fingerprint)

    async def num_shards_then(self, dataset: Dataset, fingerprint: str) -> int:
        """How many shards a dataset had when it had this fingerprint; 0 if that is not known."""
        return len(await remembered(self._records, dataset.uri, fingerprint))

    async def index(
        self,
        name: str,
        config: DatasetConfig,
        *,
        with_checksums: bool = False,
        shards: range | None = None,
    ) -> AsyncGenerator[IndexProgress, None]:
        """List the shards again, index the stale ones, and report each shard.

        Sessions that begin later see the result. With `shards`, these alone are indexed, and the
        dataset stays as it is. With checksums, every local shard is read whole.

        Raises:
            Overloaded: an index cannot be stored; otherwise as `open`.
        """
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock if shards is None else contextlib.nullcontext():
            opening = await self._indexer.begin(self._shown(name), config)
            previous = await load_previous(
                self._records, name, opening.location, self._open.get(name)
            )
            progress = IndexProgress(0, len(opening.scans), 0, "", reused=False, change="indexed")
            indexing = self._indexer.shards.run(opening, previous, shards)
            async with contextlib.aclosing(indexing) as scanning:
                async for indexed in scanning:
                    if progress.num_done:
                        yield progress
                    progress = progress.after(opening.source.shards[indexed.number].name, indexed)
            if shards is not None:
                yield progress
                return
            dataset = await self._indexer.finish(opening, refresh=True)
            await self._keep(name, config, dataset)
            was_appended = False
            if dataset.grows and 0 < len(previous.shards) < len(dataset.shards):
                before = await self._indexer.prefix(opening, dataset, len(previous.shards))
                was_appended = (
                    before is not None
                    and before.fingerprint == previous.fingerprint
                    and before.keeps_blocks
                )
            listed = opening.source.shards
            await save_record(self._records, name, opening.location, listed, dataset.fingerprint)
        if with_checksums:  # may take hours, and no opening needs them
            await self._indexer.take_checksums(dataset)
        names = {shard.name for shard in listed}
        yield progress.finished(dataset, previous, names, was_appended=was_appended)

    async def lint(
        self,
        name: str,
        config: DatasetConfig,
        check_media: CheckMedia,
        shards: range | None = None,
    ) -> "AsyncGenerator[LintProgress, None]":
        """Read every shard and check every sample; see `lint_dataset`."""
        # no job needs what checks samples
        from gyre_daemon.datasets.indexing.linting import lint_dataset  # noqa: PLC0415

        lock = self._lint_locks.setdefault(name, asyncio.Lock())
        async with lock if shards is None else contextlib.nullcontext():
            linting = lint_dataset(self._indexer, self._shown(name), config, check_media, shards)
            async with contextlib.aclosing(linting) as progress:
                async for each in progress:
                    yield each

    def close(self) -> None:
        """Forget all datasets; sessions keep those that they read."""
        self._open.clear()
        self._packed.clear()
        self._mixtures.clear()
        self._indexer.close()

    def _shown(self, name: str) -> str | None:
        """The name for messages; None for an ad-hoc dataset."""
        return name if name in self.datasets else None

    async def _scanned(self, name: str, config: DatasetConfig) -> OpeningDataset:
        """The shards as they are listed now, each with its format's facts."""
        opening = await self._indexer.begin(self._shown(name), config)
        async with contextlib.aclosing(self._indexer.shards.run(opening, None)) as scanning:
            async for _ in scanning:
                pass
        return opening

    async def _keep(self, name: str, config: DatasetConfig, dataset: Dataset) -> Dataset:
        """Keep a dataset, unless its definition was replaced while it was being opened.

        The files of the one before are closed once no session reads them. Its shards are recorded,
        for `what_changed`.
        """
        await save_version(self._records, dataset.uri, dataset.shards, dataset.fingerprint)
        kept = self.datasets.get(name, config)
        if replace(kept, pack=None) == replace(config, pack=None):
            if name in self._open:
                self._opener.expire_files()
            self._open[name] = dataset
        return dataset


async def _unfiltered(name: str, config: DatasetConfig, dataset: Dataset) -> Dataset:
    return dataset


def name_of(config: DatasetConfig) -> str:
    """A name, equal for definitions of one dataset, whatever is done to its samples then."""
    # A URI may have a glob, which pathlib does not resolve.
    uri = config.uri if "://" in config.uri else os.path.abspath(config.uri)  # noqa: PTH100
    options = json.dumps(
        [
            config.format,
            dict(config.options),
            dict(config.storage),
            config.follow_links,
            dict(config.rename),
            dict(config.cast),
            config.on_corrupt,
            config.max_corrupt,
            config.append,
            config.filter,
        ],
        sort_keys=True,
        default=str,
    )
    return f"{uri} {options}"


def _mixed(name: str, config: MixtureConfig, sources: Sources) -> Dataset:
    parts = [
        Source(each, its.index, its.fields, len(its.storage.shards), its.source_names)
        for each, its in sources
    ]
    try:
        index = MixedIndex(parts)
    except ConfigError as error:
        raise ConfigError(f"mixtures.{name}: {error}") from error
    first_ids = index.first_ids
    mixed = tuple(
        MixedSource(each, its.fingerprint, its.ordered, its.corrupt, first)
        for (each, its), first in zip(sources, first_ids, strict=False)
    )
    shares = partial(_phases, config)
    phases, num_samples = shares([its.num_samples for _, its in sources])
    fingerprints = [(each.name, each.fingerprint) for each in mixed]
    said = json.dumps([fingerprints, config.block, num_samples]).encode()
    corrupt = [each.corrupt + each.first_id for each in mixed]
    return Dataset(
        name=name,
        format="mixture",
        uri=f"mixture:{name}",
        storage=MixedStorage(
            [its.storage for _, its in sources],
            [partial(source_seed, name=each) if its.drawing else None for each, its in sources],
        ),
        shards=[shard for _, its in sources for shard in its.shards],
        index=index,
        fingerprint=hashlib.blake2b(said, digest_size=16, person=b"gyre.mixture").hexdigest(),
        corrupt=np.concatenate([NO_SAMPLES, *corrupt]),
        num_left_out=sum(its.num_left_out for _, its in sources),
        drawing=tuple(name for _, its in sources for name in its.drawing),
        mixture=Mixture(mixed, phases, config.block, num_samples, shares),
        sources=dict(sources),
        source_names=tuple(name for part in parts for name in part.names),
    )


def _phases(config: MixtureConfig, sizes: Sequence[int]) -> tuple[tuple[Phase, ...], int]:
    """The phases of a definition, and the samples of an epoch."""
    names = config.sources
    num_samples = sum(sizes)
    if config.epochs:
        dues = [config.epochs.get(name, 0) * size for name, size in zip(names, sizes, strict=True)]
        first, num_samples = dues, max(1, round(sum(dues)))
    elif config.temperature:
        greatest = max(sizes)
        first = [round((size / greatest) ** (1 / config.temperature), 9) for size in sizes]
    else:
        first = [config.weights.get(name, 0) for name in names]
    phases = [Phase(0, whole_weights(first))]
    for each in config.schedule:
        weights = whole_weights([each.weights.get(name, 0) for name in names])
        phases.append(Phase(each.step, weights))
    return tuple(phases), num_samples
