"""Checks every sample of a dataset, in processes that may be killed, and keeps the findings.

A shard is checked once for each version of it: its damage is kept in a sidecar. Fields of plain
bytes have nothing that could be wrong, and are not read.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.checks.damage import (
    CheckMedia,
    Damage,
    ShardFields,
    checkable,
    from_arrays,
    media_of,
)
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.scans.processes import ScanProcess, ScanProcesses
from gyre_daemon.datasets.sidecars.store import SidecarKey, SidecarStore
from gyre_daemon.errors import CorruptSample
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.local.listing import check_listed
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.opening.shard_files import opened_file
from gyre_daemon.storage.shard import Shard

DAMAGE_SUFFIX = ".gyre-damage"
# Shards checked at once; each takes a core while it is read.
_MAX_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class CheckedShard:
    """The findings in one shard.

    Attributes:
        number: of the shard.
        first_sample: the id of its first sample.
        num_samples: that it has.
        num_bytes: that were checked.
        damages: its damaged samples by their number in the shard, in rising order.
        failure: why it could not be checked; empty if it could.
        chunk_failures: why chunks of it cannot be decoded, where samples are rows of chunks.
        media: how many images and sounds were decoded, under an empty text, and how many not, by
            the reason.
    """

    number: int
    first_sample: int
    num_samples: int
    num_bytes: int
    damages: Sequence[Damage]
    failure: CorruptSample | None = None
    chunk_failures: Sequence[CorruptSample] = ()
    media: Mapping[str, int] = field(default_factory=dict)


class ShardFiles(Protocol):
    """The part of a `Storage` that a check needs."""

    @property
    def shards(self) -> Sequence[Shard]:
        """As listed."""

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`."""

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`."""


class SampleChecker:
    """Checks the samples of a daemon's datasets."""

    def __init__(self, sidecars: SidecarStore, processes: ScanProcesses) -> None:
        """Start no process yet.

        Args:
            sidecars: any kind; damage is kept in the same folders.
            processes: of which some are used.
        """
        self._sidecars = sidecars.sibling(DAMAGE_SUFFIX)
        self._processes = processes

    async def run(
        self,
        location: str,
        storage: "ShardFiles",
        index: SampleIndex,
        known: npt.NDArray[np.int64],
        fields: Sequence[FieldSpec],
        *,
        refresh: bool,
        check_media: CheckMedia | None = None,
    ) -> AsyncGenerator[CheckedShard, None]:
        """Check all shards, several at once, in whatever order they are done.

        Args:
            location: of the dataset, redacted.
            storage: its shards, uncompressed.
            index: its samples.
            known: int64 [C], ids of damaged samples, in rising order; they are not checked.
            fields: of the dataset, renamed and cast.
            refresh: check the shards even if there are findings of before.
            check_media: decodes images and sounds; None where their bytes are not looked at.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: a shard cannot be read.
        """
        bounds = await compute(shard_bounds, index, len(storage.shards))
        work = _Work(location, storage, index, known, bounds, fields, check_media, refresh=refresh)
        results: asyncio.Queue[CheckedShard | Exception] = asyncio.Queue()
        numbers = iter(range(len(storage.shards)))
        num_workers = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES, len(storage.shards))
        workers = [
            asyncio.create_task(self._check_shards(work, numbers, results))
            for _ in range(num_workers)
        ]
        try:
            for _ in storage.shards:
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _check_shards(
        self,
        work: "_Work",
        numbers: Iterator[int],
        results: "asyncio.Queue[CheckedShard | Exception]",
    ) -> None:
        process: ScanProcess | None = None
        try:
            for number in numbers:
                fields = await compute(work.fields_of, number)
                if fields is None:
                    results.put_nowait(work.result(number))
                    continue
                key = work.key(number, fields)
                arrays = None if work.refresh else await self._load(work, number, key)
                if arrays is None:
                    process = process or await self._processes.start()
                    try:
                        arrays = await _check_shard(process, work.storage, number, fields)
                    except CorruptSample as failure:
                        if process.has_died:
                            process.kill()
                            process = None
                        results.put_nowait(work.result(number, failure=failure))
                        continue
                    local = work.storage.local_file(number)
                    await self._sidecars.try_to_save(key, local, arrays)
                damages = from_arrays(arrays, work.num_samples(number))
                media = media_of(arrays) if work.check_media else {}
                is_read = [not spec.media_type.startswith("video/") for spec in fields.specs]
                num_bytes = int(fields.size[:, is_read].sum())
                results.put_nowait(work.result(number, num_bytes, damages, media=media))
        except Exception as error:
            results.put_nowait(error)
        finally:
            if process:
                process.kill()

    async def _load(self, work: "_Work", number: int, key: SidecarKey) -> Arrays | None:
        local, check = work.storage.local_file(number), partial(_check, work.num_samples(number))
        return await self._sidecars.load(key, local, check)


@dataclass(frozen=True, slots=True)
class _Work:
    """One run over a dataset; `bounds` has the first sample id of each shard, and N."""

    location: str
    storage: "ShardFiles"
    index: SampleIndex
    known: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    fields: Sequence[FieldSpec]
    check_media: CheckMedia | None
    refresh: bool

    def num_samples(self, number: int) -> int:
        return int(self.bounds[number + 1] - self.bounds[number])

    def fields_of(self, number: int) -> ShardFields | None:
        """The samples to be checked in a shard; None for nothing."""
        specs = stored_fields(self.fields)
        if not self.num_samples(number):
            return None
        first, stop = self.bounds[number : number + 2].tolist()
        schema = self.index.locate(np.array([first])).schema
        if schema is not None:
            specs = [spec.form(int(schema[0])) for spec in specs]
        columns = checkable(specs, with_media=self.check_media is not None)
        if not columns:
            return None
        extents = self.index.locate(np.arange(first, stop))
        fixed = np.array([0 if spec.ragged else spec.element_bytes for spec in specs])
        is_ragged = np.array([spec.ragged for spec in specs])
        skipped = np.zeros(extents.size.shape, np.bool_)
        if extents.absent is not None:
            skipped |= extents.absent
        begin, end = np.searchsorted(self.known, (first, stop))
        skipped[self.known[begin:end] - first] = True
        return ShardFields(
            tuple(specs[column] for column in columns),
            np.ascontiguousarray(extents.start[:, columns]),
            np.ascontiguousarray(extents.size[:, columns]),
            np.where(is_ragged, extents.tensor_bytes, fixed)[:, columns],
            np.ascontiguousarray(skipped[:, columns]),
            self.check_media,
        )

    def key(self, number: int, fields: ShardFields) -> SidecarKey:
        """Of the damage; it covers what is checked: other options of a format, other keys."""
        digest = hashlib.blake2b(digest_size=16)
        named = [
            (
                spec.name,
                spec.codec,
                str(spec.cast_from),
                spec.dtype.str,
                spec.shape,
                spec.ragged,
                spec.vocabulary,
            )
            for spec in fields.specs
        ]
        digest.update(json.dumps(named).encode())
        for array in (fields.start, fields.size, fields.reserved, fields.skipped):
            digest.update(array.tobytes())
        shard = self.storage.shards[number]
        kind = f"damage/1 {digest.hexdigest()}"
        return SidecarKey(self.location, shard.name, shard.size_bytes, shard.version, kind)

    def result(
        self,
        number: int,
        num_bytes: int = 0,
        damages: Sequence[Damage] = (),
        failure: CorruptSample | None = None,
        media: Mapping[str, int] | None = None,
    ) -> CheckedShard:
        first, num_samples = int(self.bounds[number]), self.num_samples(number)
        return CheckedShard(
            number, first, num_samples, num_bytes, damages, failure, media=media or {}
        )


def shard_bounds(index: SampleIndex, num_shards: int) -> npt.NDArray[np.int64]:
    """Int64 [S + 1]: the first sample id of each shard, and N; ids follow the order of shards."""
    low = np.zeros(num_shards + 1, np.int64)
    high = np.full(num_shards + 1, index.num_samples)
    wanted = np.arange(num_shards + 1)
    while (low < high).any():
        middle = (low + high) // 2
        inside = np.minimum(middle, index.num_samples - 1)
        is_before = (index.locate(inside).shard < wanted) & (low < high)
        low, high = np.where(is_before, middle + 1, low), np.where(is_before, high, middle)
    return low


async def _check_shard(
    process: ScanProcess, storage: ShardFiles, number: int, fields: ShardFields
) -> Arrays:
    """Have a shard checked by another process.

    Raises:
        CorruptSample: it is shorter than its index says, or was changed meanwhile.
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
    """
    listed, local = storage.shards[number], storage.local_file(number)
    if local is None:
        return await process.scan_stream(fields.run, listed.name, storage.stream(number))
    async with opened_file(local, listed.name) as file:
        arrays = await process.scan_file(fields.run, listed.name, file)
    await MOUNTS.run(local.root.folder, check_listed, local, listed)
    return arrays


def _check(num_samples: int, arrays: Arrays) -> None:
    """Refuse stored damage that cannot be this shard's."""
    from_arrays(arrays, num_samples)
