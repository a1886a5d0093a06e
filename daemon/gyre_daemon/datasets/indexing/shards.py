"""Indexes the shards of one dataset: unpacks, scans and compares each, or probes all of them.

Several are scanned at once, by other processes: see `scanning`. Waits for files and for the disk
are in threads. All of it ends soon after the last caller has left. The result of a probe for many
shards, or for remote ones, is kept in one sidecar file, which counts for exactly these shards in
these versions, and for the files next to them that the probe has read. The scans of many shards are
kept joined, too, so that the next opening reads one file in place of a thousand sidecars.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import Format
from gyre_daemon.datasets.formats.base import (
    Arrays,
    Probe,
    ProbeRequest,
    ProbeResponse,
    ProbeSteps,
    Scan,
    array_of,
    corrupt,
)
from gyre_daemon.datasets.formats.concat import IndexedField
from gyre_daemon.datasets.indexing.changes import Change, ChecksumStore, PreviousIndex, ShardChanges
from gyre_daemon.datasets.indexing.shard_lists import ShardList
from gyre_daemon.datasets.indexing.unpacked import UnpackedDataset, is_compressed, unpacked_name
from gyre_daemon.datasets.scanning import Scanner
from gyre_daemon.datasets.sidecars import Loaded, SidecarKey, SidecarOf, SidecarStore
from gyre_daemon.errors import CorruptSample, ShardMissing
from gyre_daemon.runtime.events import debug_event
from gyre_daemon.runtime.threads import compute, in_thread
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.listing import open_shard, until
from gyre_daemon.storage.location import CLASS, data_owner
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.reads import Storage, read_ranges
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeWorkers

# Shards that are unpacked or scanned at once. Each dataset has its own turn, so that a small
# one does not wait behind a large one; the further turns are shared. A dataset that is opened has
# at most three of them: more would take more cores from the jobs. One that an operator orders to be
# indexed has as many as there are cores.
_MAX_DATASETS, _MAX_FURTHER = 32, 3
# Stored indexes loaded before their progress is told.
_LOADED_AT_ONCE = 256
# Up to this many local shards are probed, or their sidecars read, at every opening. That takes less
# time than to write a sidecar for all; with more of them, the second opening of a large dataset
# would be slower.
_MAX_UNKEPT_SHARDS = 16
# Joined scans with more bytes are not kept: to read them takes longer than to open the sidecars.
_MAX_JOINED_BYTES = 64 << 20
_ROWS = "rows of each shard"
_BESIDE = "files next to the shards"
_STAMPS = msgspec.json.Decoder(list[tuple[str, int, str]])  # made by one thread; see `sidecars`


class IndexedShard(Struct, frozen=True):
    """One more shard has its index.

    Attributes:
        number: of the shard.
        num_samples: in the shard; 0 if the format does not scan.
        reused: whether its sidecar was fresh, or there is nothing to scan.
        change: how it differs from the previous index; None if it was not compared.
    """

    number: int
    num_samples: int
    reused: bool
    change: Change | None


class OpeningDataset(Struct):
    """A dataset while its shards are being indexed.

    Attributes:
        name: for messages.
        config: its definition.
        format: its format.
        location: where it is, without credentials.
        source: the shards as they are stored.
        scans: of each shard, its arrays if it has been scanned.
        unpacked: where compressed shards go; None if there are none.
        paths: of each shard that was unpacked, the file.
        columns: takes numbers of shards, and returns the columns of their folders.
        listed: the list that names the shards; None if there is none.
        stopped: set when the last caller has left; threads that work for it end then.
        damaged: where it is a dict, all shards are scanned again, and one that is damaged goes
            there with the reason while the others go on; None where the first ends the work.
    """

    name: str
    config: DatasetConfig
    format: Format
    location: str
    source: Storage
    scans: list[Arrays | None]
    unpacked: UnpackedDataset | None
    paths: dict[int, LocalFile]
    columns: Callable[[Sequence[int]], Sequence[IndexedField]]
    listed: ShardList | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    damaged: dict[int, CorruptSample] | None = None

    @property
    def identity(self) -> str:
        """Distinguishes the data from other data at the same location of another storage."""
        endpoints = sorted(
            str(value)
            for key, value in self.config.storage.items()
            if "endpoint" in key.lower() or key == CLASS
        )
        owner = data_owner(self.config.uri, self.config.storage)
        return " ".join([self.location, *endpoints, *filter(None, [owner])])

    @property
    def scan(self) -> Scan | None:
        """The format's scan, if that is how it inspects shards."""
        inspection = self.format.inspection
        return inspection if isinstance(inspection, Scan) else None


class ShardIndexer:
    """Indexes shards of all datasets of a daemon, fairly between these."""

    def __init__(
        self,
        sidecars: SidecarStore,
        checksums: ChecksumStore,
        processes: ComputeWorkers,
    ) -> None:
        """Start no process yet.

        Args:
            sidecars: for the indexes.
            checksums: tell whether a shard has changed.
            processes: scan the shards.
        """
        self._sidecars = sidecars
        self._checksums = checksums
        self._processes = processes
        self._own_turns = asyncio.Semaphore(_MAX_DATASETS)
        self._num_cores = len(os.sched_getaffinity(0))
        self._shared_turns = asyncio.Semaphore(max(2 * _MAX_FURTHER, self._num_cores))

    async def run(
        self,
        opening: OpeningDataset,
        previous: PreviousIndex | None,
        chosen: range | None = None,
    ) -> AsyncGenerator[IndexedShard, None]:
        """Unpack and scan the shards of an opening, several at once, as far as that is needed.

        Args:
            opening: from `begin`.
            previous: the dataset's last state, if an operator ordered the index: then each shard
                is compared with it, and an index that cannot be stored is an error. None otherwise.
            chosen: the numbers of the shards; None for all.

        Raises:
            Overloaded: an ordered index cannot be stored, or a compressed shard not be unpacked.
        """
        if opening.scan is None and opening.unpacked is None and previous is None:
            return
        changes = (
            ShardChanges(opening.location, opening.source, previous, self._checksums)
            if previous
            else None
        )
        numbers: Sequence[int] = range(len(opening.scans))
        numbers = numbers if chosen is None else numbers[chosen.start : chosen.stop]
        key = _joined_key(opening) if chosen is None else None
        if key and not changes:
            check = partial(_check_joined, len(numbers))
            if joined := await self._sidecars.load(key, None, check):
                for shard, arrays in enumerate(await compute(_split, joined)):
                    yield _indexed(opening, shard, arrays)
                return
        async with contextlib.aclosing(self._each(opening, changes, numbers)) as found:
            async for each in found:
                yield each
        if key and (joined := await compute(_joined, opening.scans)):
            await self._sidecars.try_to_save(key, None, joined)

    async def _each(
        self, opening: OpeningDataset, changes: ShardChanges | None, numbers: Sequence[int]
    ) -> AsyncGenerator[IndexedShard, None]:
        """As `run`, by the sidecar of each shard."""
        stored: dict[int, Loaded] = {}
        # compressed shards load theirs once they are unpacked
        loads = opening.scan and not opening.unpacked and opening.damaged is None
        for first in range(0, len(numbers) if loads else 0, _LOADED_AT_ONCE):
            part = await self._stored(opening, numbers[first:][:_LOADED_AT_ONCE])
            stored |= part
            for shard, (arrays, is_fresh) in part.items():
                if is_fresh and not changes:
                    yield _indexed(opening, shard, arrays)
        if not changes:
            numbers = [each for each in numbers if each not in stored or not stored[each][1]]
        if numbers:
            async with contextlib.aclosing(self._scan(opening, changes, stored, numbers)) as found:
                async for each in found:
                    yield each

    async def _scan(
        self,
        opening: OpeningDataset,
        changes: ShardChanges | None,
        stored: Mapping[int, Loaded],
        numbers: Sequence[int],
    ) -> AsyncGenerator[IndexedShard, None]:
        """Index some shards, several at once; see `_index_shards` for the arguments."""
        results: asyncio.Queue[IndexedShard | Exception] = asyncio.Queue()
        work = partial(self._index_shards, opening, changes, stored, iter(numbers), results)
        num_further = max(_MAX_FURTHER, self._num_cores - 1) if changes else _MAX_FURTHER
        workers = [asyncio.create_task(work(self._own_turns, is_own=True))] + [
            asyncio.create_task(work(self._shared_turns, is_own=False))
            for _ in range(min(num_further, len(numbers) - 1))
        ]
        try:
            for _ in numbers:
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            opening.stopped.set()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _index_shards(
        self,
        opening: OpeningDataset,
        changes: ShardChanges | None,
        stored: Mapping[int, Loaded],
        shards: Iterator[int],
        results: asyncio.Queue[IndexedShard | Exception],
        turns: asyncio.Semaphore,
        *,
        is_own: bool,
    ) -> None:
        """Index one shard after the other, until there is none left or one fails.

        Its process ends with it, or when it is cancelled.

        Args:
            opening: the dataset.
            changes: compares each shard with its last state; None for no comparison.
            stored: earlier scans, by shard; compressed shards load theirs once unpacked.
            shards: their numbers; several workers take from it.
            results: takes findings, or why a shard failed.
            turns: it waits for one of these, and takes a shard only then.
            is_own: whether it keeps its turn for all shards.
        """
        with contextlib.ExitStack() as cleanup:
            scanner = Scanner(self._processes)
            cleanup.callback(scanner.kill)
            try:
                async with turns if is_own else contextlib.nullcontext():
                    while True:
                        async with contextlib.nullcontext() if is_own else turns:
                            if (shard := next(shards, None)) is None:
                                return
                            try:
                                found = await self._index_shard(
                                    opening, shard, changes, stored, scanner
                                )
                            except CorruptSample as error:
                                if opening.damaged is None:
                                    raise
                                opening.damaged[shard] = error
                                found = IndexedShard(shard, 0, reused=False, change=None)
                        results.put_nowait(found)
            except Exception as error:
                results.put_nowait(error)

    async def _index_shard(
        self,
        opening: OpeningDataset,
        shard: int,
        changes: ShardChanges | None,
        stored: Mapping[int, Loaded],
        scanner: Scanner,
    ) -> IndexedShard:
        """Unpack a shard if it is compressed, and make its index unless it is stored.

        Sidecars are read and written in other threads than those that unpack.
        """
        listed, local = opening.source.shards[shard], opening.source.local_file(shard)
        loop = asyncio.get_running_loop()
        if opening.unpacked and is_packed(listed):
            work = partial(_unpack, opening, opening.unpacked, shard, loop)
            # a thread that waits for another machine says nothing of a mount
            opening.paths[shard] = await (
                MOUNTS.run(local.root.folder, work) if local else in_thread(work, "gyre-unpack")
            )
        found = stored.get(shard)
        if opening.scan and opening.unpacked and opening.damaged is None:
            # a compressed shard can be checked now
            found = (await self._stored(opening, [shard])).get(shard)
        is_fresh = opening.scan is None or (found is not None and found[1])
        change: Change | None = None
        if changes:
            was_indexed = found is not None
            change = await changes.of(shard, was_indexed, is_fresh, opening.stopped)
        reused = is_fresh and change in (None, "kept")
        if opening.scan is None:
            return IndexedShard(shard, 0, reused, change)
        if found and is_fresh:
            arrays = found[0]
        else:
            unpacked = opening.paths.get(shard)
            scan, source = opening.scan, opening.source
            arrays = await scanner.scan(
                scan.run, source, shard, unpacked, seeks=scan.seeks, skips=scan.skips
            )
            sidecar = _sidecar_of(opening, shard)
            try:  # what a shard did to its worker does not reach the daemon
                await in_thread(partial(sidecar.check, arrays), "gyre-check")
            except ValueError as error:
                reason = f"its scan is none of this shard: {error}"
                raise corrupt(listed.name, None, reason) from error
            # an index that an operator ordered must be stored
            save = self._sidecars.save if changes else self._sidecars.try_to_save
            await save(sidecar.key, local, arrays)
        return _indexed(opening, shard, arrays, reused=reused, change=change)

    async def _stored(self, opening: OpeningDataset, shards: Sequence[int]) -> dict[int, Loaded]:
        """The stored scans of those shards that have one; see `SidecarStore.load_all`."""
        loaded = await self._sidecars.load_all([_sidecar_of(opening, each) for each in shards])
        return {shard: its for shard, its in zip(shards, loaded, strict=True) if its}


def _indexed(
    opening: OpeningDataset,
    shard: int,
    arrays: Arrays,
    *,
    reused: bool = True,
    change: Change | None = None,
) -> IndexedShard:
    """Note the scan of a shard."""
    assert opening.scan
    num_samples = opening.scan.num_samples(arrays)
    name = opening.source.shards[shard].name
    facts = {"dataset": opening.name, "shard": name, "samples": num_samples, "was_kept": reused}
    debug_event("shard indexed", facts)
    if opening.listed:
        opening.listed.check(shard, num_samples)
    opening.scans[shard] = arrays
    return IndexedShard(shard, num_samples, reused, change)


def _sidecar_of(opening: OpeningDataset, shard: int) -> SidecarOf:
    """Where the scan of a shard is stored."""
    assert opening.scan
    listed, version = opening.source.shards[shard], opening.scan.version
    key = SidecarKey(opening.location, listed.name, listed.size_bytes, listed.version, version)
    check = partial(_check, opening, opening.scan, shard)
    return SidecarOf(key, opening.source.local_file(shard), check)


def _joined_key(opening: OpeningDataset) -> SidecarKey | None:
    """The key of all scans together; None if they are not kept so."""
    shards, scan = opening.source.shards, opening.scan
    is_plain = not opening.unpacked and opening.damaged is None
    if not scan or not is_plain or len(shards) <= _MAX_UNKEPT_SHARDS:
        return None
    return _key_of_all(opening.location, shards, "all shards' scans", scan.version)


def _joined(scans: Sequence[Arrays | None]) -> Arrays | None:
    """The arrays of all shards, each after the one before, and how many rows each shard has.

    None if they do not fit together, or have too many bytes.
    """
    joined: dict[str, np.ndarray] = {}
    rows: list[list[int]] = []
    num_bytes = 0
    scanned = [scan for scan in scans if scan]
    if len({frozenset(scan) for scan in scanned}) != 1 or len(scanned) < len(scans):
        return None
    for name in scanned[0]:
        parts = [scan[name] for scan in scanned]
        num_bytes += sum(part.nbytes for part in parts)
        kinds = {(part.dtype, part.shape[1:]) for part in parts}
        if len(kinds) > 1 or num_bytes > _MAX_JOINED_BYTES:
            return None
        joined[name] = np.concatenate(parts)
        rows.append([len(part) for part in parts])
    return joined | {_ROWS: np.array(rows)}


def _split(joined: Arrays) -> list[Arrays]:
    """The arrays of each shard; they were checked before they were joined."""
    names = [name for name in joined if name != _ROWS]
    ends = joined[_ROWS].cumsum(axis=1)
    return [
        {name: joined[name][begin[n] : end[n]] for n, name in enumerate(names)}
        for begin, end in zip((ends - joined[_ROWS]).T.tolist(), ends.T.tolist(), strict=True)
    ]


def _check_joined(num_shards: int, joined: Arrays) -> None:
    """Refuse arrays that are not the joined ones of this number of shards.

    Raises:
        ValueError: says that.
    """
    rows = array_of(joined, _ROWS, np.int64, 2)
    lengths = [len(array) for name, array in joined.items() if name != _ROWS]
    is_whole = rows.shape == (len(lengths), num_shards) and (rows >= 0).all()
    if not is_whole or rows.sum(axis=1).tolist() != lengths:
        raise ValueError("it is not complete")


def _unpack(
    opening: OpeningDataset, unpacked: UnpackedDataset, shard: int, loop: asyncio.AbstractEventLoop
) -> LocalFile:
    """The file of an unpacked shard, made if there is none."""
    listed = opening.source.shards[shard]
    found = unpacked.find(listed)
    if found:
        return found
    with open_shard(opening.source, shard, loop) as file:
        return unpacked.unpack(listed, until(file, opening.stopped))


def _check(opening: OpeningDataset, scan: Scan, shard: int, arrays: Arrays) -> None:
    """Refuse a stored index that is none of this shard."""
    unpacked = opening.paths.get(shard)
    listed = opening.source.shards[shard].size_bytes
    scan.check(arrays, unpacked.stat().st_size if unpacked else listed)


def is_packed(shard: Shard) -> bool:
    """Whether a shard must be unpacked before it can be read."""
    return is_compressed(shard.name)


class ProbeRunner:
    """Probes the shards of a daemon's datasets."""

    def __init__(self, opener: StorageOpener, sidecars: SidecarStore) -> None:
        self._opener = opener
        self._sidecars = sidecars

    async def run(
        self, opening: OpeningDataset, storage: Storage, num_shards: int, *, refresh: bool
    ) -> list[Arrays]:
        """A probe's findings in the first shards, for `Format.assemble`; empty without a probe.

        Args:
            opening: the dataset.
            storage: its shards.
            num_shards: how many of them are probed, from the first on.
            refresh: probe the shards even if a result was kept.

        Raises:
            CorruptSample: the shards are nothing that the format stores.
            ShardMissing, NotAllowed, StorageUnavailable: they cannot be read.
        """
        probe, shards = opening.format.inspection, storage.shards[:num_shards]
        if not isinstance(probe, Probe):
            return []
        settings = opening.config.storage
        if len(shards) <= _MAX_UNKEPT_SHARDS and storage.local_file(0):
            return [await self._run(probe.run(shards), storage, settings, {})]
        key = _key_of_all(opening.location, shards, "all shards' headers", probe.version)
        check = partial(_check_probe, probe, shards)
        arrays = None if refresh else await self._sidecars.load(key, None, check)
        if arrays is None or not await self._is_current(arrays, storage, settings):
            seen: _Seen = {}
            arrays = await self._run(probe.run(shards), storage, settings, seen)
            stamps = [
                (suffix, max(files) + 1, _stamp([files[shard] for shard in sorted(files)]))
                for suffix, files in seen.items()
            ]
            beside = {_BESIDE: np.array(json.dumps(stamps))}
            await self._sidecars.try_to_save(key, None, {**arrays, **beside})
        return [_without_stamps(arrays)]

    async def _is_current(
        self, arrays: Arrays, storage: Storage, settings: Mapping[str, Any]
    ) -> bool:
        """Whether the files next to the shards are those that a kept probe has read."""
        for suffix, count, stamp in _stamps(arrays):
            beside = await self._opener.open_beside(storage, range(count), suffix, settings)
            if stamp != _stamp(beside.shards if beside else [None]):
                return False
        return _BESIDE in arrays

    async def _run(
        self,
        steps: ProbeSteps,
        storage: Storage,
        settings: Mapping[str, Any],
        seen: "_Seen",
    ) -> Arrays:
        """Answer requests until the probe returns; the probe itself computes in a thread.

        `seen` takes the files next to the shards, as they were listed before they were read.
        """
        response: ProbeResponse | None = None
        while True:
            request = await compute(_advance, steps, response)
            if not isinstance(request, ProbeRequest):
                return request
            response = await self._answer(request, storage, settings, seen)

    async def _answer(
        self,
        request: ProbeRequest,
        storage: Storage,
        settings: Mapping[str, Any],
        seen: "_Seen",
    ) -> ProbeResponse | None:
        if not request.suffix:
            return await _read(storage, request.shard, request)
        shards = list(dict.fromkeys(request.shard))
        beside = await self._opener.open_beside(storage, shards, request.suffix, settings)
        files = seen.setdefault(request.suffix, {})
        for number, file in zip(
            shards, beside.shards if beside else [None] * len(shards), strict=True
        ):
            files.setdefault(number, file)
        if beside is not None:
            return await _read(beside, [shards.index(shard) for shard in request.shard], request)
        if request.is_optional:
            return None
        names = f"{storage.shards[shards[0]].name} to {storage.shards[shards[-1]].name}"
        raise ShardMissing(
            f"not each of the shards {names} has its {request.suffix} file next to it; restore the "
            "missing ones"
        )


def _check_probe(probe: Probe, shards: Sequence[Shard], arrays: Arrays) -> None:
    if any(not 0 < count <= len(shards) for _, count, _ in _stamps(arrays)):
        raise ValueError("it has files of more shards than there are")
    probe.check(_without_stamps(arrays), shards)


def _stamps(arrays: Arrays) -> list[tuple[str, int, str]]:
    """Of each kind of files that a kept probe has read: suffix, number of shards, and stamp.

    Raises:
        ValueError: they are none.
    """
    if _BESIDE not in arrays:
        return []
    return _STAMPS.decode(str(arrays[_BESIDE]))


def _without_stamps(arrays: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if name != _BESIDE}


# By suffix, the files next to the shards with these numbers; None where there is none.
_Seen = dict[str, dict[int, Shard | None]]


def _stamp(files: Sequence[Shard | None]) -> str:
    """A digest of how files are listed; empty if one is absent."""
    found = [(file.size_bytes, file.version) for file in files if file]
    return _digest_of(found) if len(found) == len(files) else ""


def _advance(steps: ProbeSteps, response: ProbeResponse | None) -> ProbeRequest | Arrays:
    """The probe's next request, or its result."""
    try:
        return steps.send(response)
    except StopIteration as end:
        arrays: Arrays = end.value
        return arrays


async def _read(storage: Storage, files: Sequence[int], request: ProbeRequest) -> ProbeResponse:
    """Read all ranges of a request, cut off at the ends of their files."""
    sizes = [storage.shards[file].size_bytes for file in files]
    starts = [min(start, size) for start, size in zip(request.start, sizes, strict=True)]
    stops = [min(stop, size) for stop, size in zip(request.stop, sizes, strict=True)]
    return ProbeResponse(await read_ranges(storage, files, starts, stops), sizes)


def _key_of_all(location: str, shards: Sequence[Shard], name: str, version: str) -> SidecarKey:
    """The key of the one sidecar of all shards, by a digest of how they were listed."""
    num_bytes = sum(shard.size_bytes for shard in shards)
    listed = [(shard.name, shard.size_bytes, shard.version) for shard in shards]
    return SidecarKey(location, name, num_bytes, _digest_of(listed), version)


def _digest_of(listed: Sequence[tuple[object, ...]]) -> str:
    """A digest of how files are listed."""
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=16).hexdigest()


class IndexProgress(Struct, frozen=True):
    """One more shard of a dataset has its index.

    The last progress of a dataset also has the results for the whole dataset.

    Attributes:
        num_done: shards so far.
        num_shards: of the dataset.
        num_samples: in the scanned shards so far; at last, in the dataset.
        shard: the one just done.
        reused: whether its sidecar was fresh, or it is unchanged and nothing is scanned.
        change: its difference from the last index.
        fingerprint: at last, of the dataset.
        fingerprint_before: at last, of the dataset as it was; empty if it was never indexed.
        removed: at last, the shards that the dataset no longer has.
        was_appended: at last, whether the dataset as it was is the first shards of what it is now,
            and cursors of it fit because of `append`.
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
    was_appended: bool = False

    def after(self, name: str, indexed: IndexedShard) -> "IndexProgress":
        """The progress after one more shard, which has this name."""
        return IndexProgress(
            self.num_done + 1,
            self.num_shards,
            self.num_samples + indexed.num_samples,
            name,
            indexed.reused,
            indexed.change or "indexed",
        )

    def finished(
        self, dataset: Dataset, previous: PreviousIndex, names: Set[str], *, was_appended: bool
    ) -> "IndexProgress":
        """The last progress, of a dataset whose shards have these names.

        An earlier index may know a compressed shard by its name, or by that of the unpacked one.
        """
        names = names | {unpacked_name(name) for name in names if is_compressed(name)}
        return replace(
            self,
            num_samples=dataset.num_samples,
            fingerprint=dataset.fingerprint,
            fingerprint_before=previous.fingerprint,
            removed=tuple(sorted(previous.shards.keys() - names)),
            was_appended=was_appended,
        )
