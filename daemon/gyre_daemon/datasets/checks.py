"""Checks every sample of a dataset, in processes that may be killed, and keeps the findings.

A shard is checked once for each version of it: its damage is kept in a sidecar. Fields of plain
bytes have nothing that could be wrong, and are not read. Decoded shards are read chunk by chunk,
past chunks that cannot be decoded. Corrupt samples that others replace are limited in number, and
reported.
"""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gyre_protos.text import printable
from msgspec import Struct
from msgspec.structs import asdict, replace

from gyre_daemon.datasets.dataset import shard_bounds
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.formats.chunk_index import Chunks
from gyre_daemon.datasets.made_shards import DecodeRows, Decoders, MadeStorage
from gyre_daemon.datasets.scanning import Scanner
from gyre_daemon.datasets.shard_worker import (
    CheckMedia,
    Damage,
    ShardFields,
    checkable,
    from_arrays,
    media_of,
    to_arrays,
)
from gyre_daemon.datasets.sidecars import InFolder, SidecarKey, SidecarStore
from gyre_daemon.errors import CorruptSample, Overloaded, first_error
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.reads import Reads, Storage
from gyre_daemon.workers.compute_workers import ComputeWorkers

_PIECE_BYTES = 4 << 20
DAMAGE_SUFFIX = ".gyre-damage"
# Shards checked at once; each takes a core while it is read.
_MAX_PROCESSES = 8
# Lines of a report, and characters of a text in it: 10 MiB at most. Beyond it, the last line says
# how many samples it leaves out.
MAX_LINES, _MAX_CHARS = 10_000, 500
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class DecodedShards(MadeStorage):
    """Decoded shards as streams, in which chunks that cannot be decoded are zeros.

    Attributes:
        failures: by chunk, why it cannot be decoded.
        identity: see `Chunks.identity`.
    """

    def __init__(
        self, source: Storage, chunks: Chunks, index: SampleIndex, decoders: Decoders
    ) -> None:
        """Decode nothing yet; see `decoded_shards`."""
        recipe = DecodeRows(source, chunks, index.digest(), decoders)
        super().__init__(recipe, decoders.threads, source)
        self.failures: dict[int, CorruptSample] = {}
        self.identity, self._chunks = chunks.identity, chunks
        self._table = index.blocks(0)
        self._turn = asyncio.Lock()  # one chunk is in memory at a time

    async def stream(self, shard: int) -> AsyncIterator[bytes]:
        """Decode all chunks of a shard, one after the other."""
        for chunk in np.flatnonzero(self._chunks.shard == shard).tolist():
            async with self._turn:
                memory = np.zeros(int(self._chunks.chunk_bytes[chunk]), np.uint8)
                try:
                    await self.read(Reads.into([memory], [shard], [int(self._chunks.base[chunk])]))
                except* CorruptSample as errors:
                    error = first_error(errors)
                    assert isinstance(error, CorruptSample)
                    self.failures[chunk] = error
                for begin in range(0, len(memory), _PIECE_BYTES):
                    yield memory[begin : begin + _PIECE_BYTES].tobytes()

    async def drain(self, shard: int) -> None:
        """Decode all chunks of a shard."""
        async for _ in self.stream(shard):
            pass

    def failures_of(self, shard: int) -> list[CorruptSample]:
        """Why chunks of a shard cannot be decoded, in their order."""
        return [self.failures[chunk] for chunk in self._failed(shard)]

    def failed_samples(self, shard: int, first_sample: int) -> list[Damage]:
        """All samples of chunks that cannot be decoded, by their numbers in the shard."""
        found = []
        for chunk in self._failed(shard):
            error, offset = self.failures[chunk], self._chunks.pieces(chunk)[-1][0]
            reason = str(error.facts.get("reason", error))
            first, stop = self._table.first_sample(np.array([chunk, chunk + 1])) - first_sample
            found += [Damage(sample, offset, reason) for sample in range(int(first), int(stop))]
        return found

    def as_stored(self, shard: int, first_sample: int, damages: Sequence[Damage]) -> list[Damage]:
        """The damages of a decoded shard, by the bytes of the stored one, with `failed_samples`.

        Args:
            shard: that was read whole.
            first_sample: the id of its first sample.
            damages: found in its decoded bytes.
        """
        found = {each.sample: each for each in self.failed_samples(shard, first_sample)}
        chunks = np.flatnonzero(self._chunks.shard == shard)
        for each in damages:
            place = np.searchsorted(self._chunks.base[chunks], each.offset, side="right") - 1
            offset = self._chunks.pieces(int(chunks[place]))[-1][0]
            found.setdefault(each.sample, replace(each, offset=offset))
        return [found[sample] for sample in sorted(found)]

    def _failed(self, shard: int) -> list[int]:
        return [chunk for chunk in sorted(self.failures) if self._chunks.shard[chunk] == shard]


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
        media: how many images and sounds were decoded, under an empty text, and how many not, by
            the reason.
    """

    number: int
    first_sample: int
    num_samples: int
    num_bytes: int
    damages: Sequence[Damage]
    failure: CorruptSample | None = None
    media: Mapping[str, int] = field(default_factory=dict)


class SampleChecker:
    """Checks the samples of a daemon's datasets."""

    def __init__(self, sidecars: SidecarStore, processes: ComputeWorkers) -> None:
        """Start no process yet.

        Args:
            sidecars: any kind; damage is kept in the same folders.
            processes: that scan.
        """
        self._sidecars = sidecars.sibling(DAMAGE_SUFFIX)
        self._processes = processes

    async def run(
        self,
        location: str,
        storage: Storage,
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
        scanner = Scanner(self._processes)
        try:
            for number in numbers:
                results.put_nowait(await self._checked(work, number, scanner))
        except Exception as error:
            results.put_nowait(error)
        finally:
            scanner.kill()

    async def _checked(self, work: "_Work", number: int, scanner: Scanner) -> CheckedShard:
        """The findings in a shard, of before or of now."""
        fields, num_samples = await compute(work.fields_of, number), work.num_samples(number)
        result = partial(CheckedShard, number, int(work.bounds[number]), num_samples)
        if fields is None and not (work.decoded and num_samples):
            return result(0, ())
        key, local = work.key(number, fields), work.storage.local_file(number)
        check = partial(_check, num_samples)
        arrays = None if work.refresh else await self._sidecars.load(key, local, check)
        if arrays is None:
            arrays = to_arrays(())
            try:
                if fields is not None:
                    arrays = await scanner.scan(fields.run, work.storage, number)
                elif work.decoded:
                    await work.decoded.drain(number)
            except CorruptSample as failure:
                return result(0, (), failure)
            arrays, is_certain = work.as_stored(number, arrays)
            if is_certain:
                await self._sidecars.try_to_save(key, local, arrays)
        damages = from_arrays(arrays, num_samples)
        if fields is None:
            return result(0, damages)
        is_read = [not spec.media_type.startswith("video/") for spec in fields.specs]
        num_bytes = int(fields.size[:, is_read].sum())
        return result(num_bytes, damages, media=media_of(arrays) if work.check_media else {})


class _Work(Struct, frozen=True):
    """One run over a dataset; `bounds` has the first sample id of each shard, and N."""

    location: str
    storage: Storage
    index: SampleIndex
    known: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    fields: Sequence[FieldSpec]
    check_media: CheckMedia | None
    refresh: bool

    @property
    def decoded(self) -> DecodedShards | None:
        return self.storage if isinstance(self.storage, DecodedShards) else None

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

    def as_stored(self, number: int, arrays: Arrays) -> tuple[Arrays, bool]:
        """The findings of a check, by the bytes of the stored shard, and if another finds the same.

        That is not known where a process was lost that decoded the shard.
        """
        if not self.decoded:
            return arrays, True
        damages = from_arrays(arrays, self.num_samples(number))
        found = self.decoded.as_stored(number, int(self.bounds[number]), damages)
        failures = self.decoded.failures_of(number)
        is_certain = not any("was_lost" in each.facts for each in failures)
        return {**arrays, **to_arrays(found)}, is_certain

    def key(self, number: int, fields: ShardFields | None) -> SidecarKey:
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
            for spec in (fields.specs if fields else ())
        ]
        digest.update(json.dumps(named).encode())
        if fields:
            for array in (fields.start, fields.size, fields.reserved, fields.skipped):
                digest.update(array.tobytes())
        else:
            digest.update(self.index.digest())
        shard = self.storage.shards[number]
        version = "damage/1"
        if self.decoded:
            digest.update(self.decoded.identity)
            version = "chunks/3"
        kind = f"{version} {digest.hexdigest()}"
        return SidecarKey(self.location, shard.name, shard.size_bytes, shard.version, kind)


def _check(num_samples: int, arrays: Arrays) -> None:
    """Refuse stored damage that cannot be this shard's."""
    from_arrays(arrays, num_samples)


class CorruptRecord(Struct, frozen=True):
    """One corrupt sample.

    Attributes:
        shard: the name of its shard, or of its file where samples are single files.
        offset: the byte of that at which it, or its corrupt field, begins.
        sample_id: its id in the dataset.
        reason: the problem.
    """

    shard: str
    offset: int
    sample_id: int
    reason: str


class CorruptReports:
    """The folder of all reports: a file for each dataset, for the daemon's user alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def write(self, name: str, identity: str, corrupt: Sequence[CorruptRecord]) -> Path:
        """Write a dataset's report, whole or not at all, and return its path.

        It is JSON Lines: `shard`, `offset`, `sample_id` and `reason` of each corrupt sample, in the
        order of their ids and in visible ASCII. A dataset without any has no report.

        Args:
            name: of the dataset.
            identity: distinguishes it from others of this name.
            corrupt: its corrupt samples.

        Raises:
            Overloaded: it cannot be written.
        """
        digest = hashlib.blake2b(f"{name}\n{identity}".encode(), digest_size=8).hexdigest()
        stem = f"{name}-{digest}" if _PLAIN.fullmatch(name) else digest
        path = self._folder / f"{stem}.jsonl"
        try:
            await MOUNTS.answered(self._folder, _write, path, corrupt)
        except OSError as error:
            raise Overloaded(
                f"the report of corrupt samples cannot be written to {path}: "
                f"{error.strerror or error}; free some space, or set `report_dir`",
                {"path": path, "reason": error.strerror or "unknown"},
            ) from error
        return path


def _write(path: Path, corrupt: Sequence[CorruptRecord]) -> None:
    if corrupt:
        InFolder(path.parent, path.name).write(b"".join(_lines(corrupt)))
    else:
        path.unlink(missing_ok=True)


def check_limit(
    name: str,
    corrupt: Sequence[CorruptRecord],
    num_samples: int,
    max_corrupt: float,
    num_more: int = 0,
) -> None:
    """Refuse a dataset with too many corrupt samples.

    Args:
        name: of the dataset.
        corrupt: its corrupt samples.
        num_samples: N.
        max_corrupt: how many there may be; a fraction of N if it is no integer. Half of all is the
            most in any case, since each good sample stands in for one other at most.
        num_more: corrupt samples that were found before.

    Raises:
        CorruptSample: there are more; names the first.
    """
    limit = max_corrupt if isinstance(max_corrupt, int) else int(max_corrupt * num_samples)
    limit = min(limit, num_samples // 2)
    num = len(corrupt) + num_more
    if num <= limit:
        return
    first = corrupt[0]
    raise CorruptSample(
        f"dataset `{name}` has {num} corrupt samples of {num_samples}, and max_corrupt = "
        f"{max_corrupt} allows {limit}; the first is sample {first.sample_id} (shard "
        f"{first.shard}, byte {first.offset}): {first.reason}. Repair the shards, or raise "
        "max_corrupt.",
        {
            "dataset": name,
            "num_corrupt": num,
            "limit": limit,
            **asdict(first),
        },
    )


def _lines(corrupt: Sequence[CorruptRecord]) -> list[bytes]:
    lines = []
    for each in corrupt[:MAX_LINES]:
        texts = {
            key: printable(getattr(each, key)[:_MAX_CHARS])[:_MAX_CHARS]
            for key in ("shard", "reason")
        }
        lines.append(json.dumps(asdict(each) | texts))
    if len(corrupt) > MAX_LINES:
        lines.append(json.dumps({"num_left_out": len(corrupt) - MAX_LINES}))
    return [f"{line}\n".encode() for line in lines]
