"""Indexes the shards of one dataset: unpacks, scans and compares each, as far as that is needed.

Several are worked on at once. Scans run in processes of their own, see `scan_processes`; what waits
for files or the disk runs in threads. All of it ends soon after nobody waits for it any more.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import Format
from gyre_daemon.datasets.formats.base import Arrays, Scan
from gyre_daemon.datasets.indexing.changes import Change, PreviousIndex, ShardChanges
from gyre_daemon.datasets.indexing.checksum_taker import ChecksumTaker
from gyre_daemon.datasets.indexing.listing import FileListing
from gyre_daemon.datasets.indexing.scan_processes import ScanProcess, ScanProcesses
from gyre_daemon.datasets.indexing.shard_files import open_file, open_shard, read_ranges, until
from gyre_daemon.datasets.indexing.unpacked import UnpackedDataset, is_compressed
from gyre_daemon.datasets.sidecars.store import SidecarKey, SidecarStore
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.local.listing import check_listed
from gyre_daemon.storage.shard import Shard

Result = TypeVar("Result")

# Shards that are unpacked or scanned at once. Each dataset has one turn of its own, so that a small
# one does not wait behind a large one; the further turns are shared. A dataset that is opened has
# at most three of them: more would take more cores from the jobs. One that an operator orders to be
# indexed has as many as there are cores.
_MAX_DATASETS, _MAX_FURTHER = 32, 3
NUM_THREADS = 2 * _MAX_DATASETS  # threads wait for files; there are no more than needed


@dataclass(frozen=True, slots=True)
class IndexedShard:
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


@dataclass(slots=True)
class OpeningDataset:
    """A dataset while its shards are being indexed.

    Attributes:
        name: for messages.
        config: its definition.
        format: its format.
        location: where it lies, without credentials.
        source: the shards as they are stored.
        scans: of each shard, its arrays if it has been scanned.
        unpacked: where compressed shards go; None if there are none.
        paths: of each shard that was unpacked, the file.
        files: the list of single files; None of other formats.
        stopped: set when nobody waits for it any more; threads that work for it end then.
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
    files: FileListing | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    damaged: dict[int, CorruptSample] | None = None

    @property
    def identity(self) -> str:
        """Distinguishes the data from other data at the same location of another endpoint."""
        endpoints = sorted(
            str(value) for key, value in self.config.storage.items() if "endpoint" in key.lower()
        )
        return " ".join([self.location, *endpoints])

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
        checksums: ChecksumTaker,
        threads: ThreadPoolExecutor,
        processes: ScanProcesses,
    ) -> None:
        """Start no process yet.

        Args:
            sidecars: for the indexes.
            checksums: tell whether a shard has changed.
            threads: `NUM_THREADS` of them, for what waits.
            processes: scan the shards.
        """
        self._sidecars = sidecars
        self._checksums = checksums
        self._threads = threads
        self._processes = processes
        self._own_turns = asyncio.Semaphore(_MAX_DATASETS)
        self._num_cores = len(os.sched_getaffinity(0))
        self._shared_turns = asyncio.Semaphore(max(2 * _MAX_FURTHER, self._num_cores))

    async def run(
        self, opening: OpeningDataset, previous: PreviousIndex | None
    ) -> AsyncGenerator[IndexedShard, None]:
        """Unpack and scan the shards of an opening, several at once, as far as that is needed.

        Args:
            opening: from `begin`.
            previous: what the dataset was before, if an operator ordered the index: then each shard
                is compared with it, and an index that cannot be stored is an error. None otherwise.

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
        results: asyncio.Queue[IndexedShard | Exception] = asyncio.Queue()
        shards = iter(range(len(opening.scans)))
        work = partial(self._index_shards, opening, changes, shards, results)
        num_further = max(_MAX_FURTHER, self._num_cores - 1) if previous else _MAX_FURTHER
        workers = [asyncio.create_task(work(self._own_turns, is_own=True))] + [
            asyncio.create_task(work(self._shared_turns, is_own=False))
            for _ in range(min(num_further, len(opening.scans) - 1))
        ]
        try:
            for _ in range(len(opening.scans)):
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
            changes: compares each shard with what it was; None for no comparison.
            shards: their numbers; several workers take from it.
            results: takes what was found, or why a shard failed.
            turns: it waits for one of these, and takes a shard only then.
            is_own: whether it keeps its turn for all shards.
        """
        with contextlib.ExitStack() as cleanup:
            scanner = _Scanner(self._processes)
            cleanup.callback(scanner.kill)
            try:
                async with turns if is_own else contextlib.nullcontext():
                    while True:
                        async with contextlib.nullcontext() if is_own else turns:
                            if (shard := next(shards, None)) is None:
                                return
                            try:
                                found = await self._index_shard(opening, shard, changes, scanner)
                            except CorruptSample as error:
                                if opening.damaged is None:
                                    raise
                                scanner.kill()  # it may have died
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
        scanner: "_Scanner",
    ) -> IndexedShard:
        """Unpack a shard if it is compressed, and load or make its index.

        Sidecars are read and written in other threads than those that unpack.
        """
        listed, local = opening.source.shards[shard], opening.source.local_file(shard)
        loop = asyncio.get_running_loop()
        if opening.unpacked and is_packed(listed):
            opening.paths[shard] = await self._in_thread(
                _unpack, opening, opening.unpacked, shard, loop
            )
        found: tuple[Arrays, bool] | None = None
        if opening.scan:
            key = SidecarKey(
                opening.location,
                listed.name,
                listed.size_bytes,
                listed.version,
                opening.scan.version,
            )
            check = partial(_check, opening, opening.scan, shard)
        if opening.scan and opening.damaged is None:
            found = await asyncio.to_thread(self._sidecars.load_latest, key, local, check)
        is_fresh = opening.scan is None or (found is not None and found[1])
        change: Change | None = None
        if changes:
            was_indexed = found is not None
            change = await self._in_thread(
                changes.of, shard, was_indexed, is_fresh, opening.stopped
            )
        reused = is_fresh and change in (None, "kept")
        if opening.scan is None:
            return IndexedShard(shard, 0, reused, change)
        if found and is_fresh:
            arrays = found[0]
        else:
            arrays = await self._scan(opening, opening.scan, shard, scanner)
            # an index that an operator ordered must be stored
            save = self._sidecars.save if changes else self._sidecars.try_to_save
            await asyncio.to_thread(save, key, local, arrays)
        opening.scans[shard] = arrays
        return IndexedShard(shard, opening.scan.num_samples(arrays), reused, change)

    async def _scan(
        self, opening: OpeningDataset, scan: Scan, shard: int, scanner: "_Scanner"
    ) -> Arrays:
        """Have a shard scanned by another process.

        Raises:
            CorruptSample: it is damaged, or a local one was changed meanwhile.
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
        """
        listed, stored = opening.source.shards[shard], opening.source.local_file(shard)
        process, local = await scanner.process(), opening.paths.get(shard, stored)
        if local is None and scan.seeks:

            async def read(start: int, stop: int) -> bytes:
                return (await read_ranges(opening.source, [shard], [start], [stop]))[0]

            return await process.scan_ranges(scan.run, listed.name, listed.size_bytes, read)
        if local is None:
            return await process.scan_stream(scan.run, listed.name, opening.source.stream(shard))
        with contextlib.ExitStack() as opened:
            file = await self._in_thread(opened.enter_context, open_file(local, listed.name))
            arrays = await process.scan_file(scan.run, listed.name, file)
        if local is stored:
            await self._in_thread(check_listed, local, listed)
        return arrays

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


class _Scanner:
    """The process of one worker, started when its first shard is scanned."""

    def __init__(self, processes: ScanProcesses) -> None:
        self._processes = processes
        self._process: ScanProcess | None = None

    async def process(self) -> ScanProcess:
        self._process = self._process or await self._processes.start()
        return self._process

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process = None


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
