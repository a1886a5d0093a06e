"""Datasets with transformed samples, from declarations of operators and clients, and their workers.

A worker that dies or hangs costs no sample but the one at fault.

[Note: How transformed samples are cached] The step `cache` cuts a chain in two. The transforms
before it draw no random numbers, so their output for a sample is the same for every seed, epoch and
job. This output is a record, and all records form one large made shard (`datasets.made_shards`):
reading from it runs the transforms. The node's cache is in front of it. A block of the cache is one
record if all records have one size, else a few consecutive records. The transforms behind the step
read their samples there, as from a dataset; where none follows, batches are read there.
"""

import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.dataset import Dataset, Memo
from gyre_daemon.datasets.formats import (
    Extents,
    FieldSpec,
    SampleIndex,
    indexed_fields,
    stored_fields,
)
from gyre_daemon.datasets.formats.base import is_servable
from gyre_daemon.datasets.formats.sample_table import column_of_all, located_bounds
from gyre_daemon.errors import ConfigError
from gyre_daemon.monitoring.metrics import TransformCounts
from gyre_daemon.order.permutation import (
    BlockTable,
    Int64Array,
    blocks_of_equal_samples,
    blocks_that_begin_at,
    kept_tables,
)
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import NO_JOB, Claims, Flow
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.shard import Shard
from gyre_daemon.transforms.recipes import (
    BFLOAT16,
    DESCRIBED_DECODER,
    DONE_DECODER,
    ENCODER,
    HEAD,
    MAX_PACKET_BYTES,
    RECIPE_DECODER,
    Cost,
    Described,
    Done,
    Kind,
    MadeField,
    Recipe,
    SourceField,
    Step,
    dtype_of,
    name_of,
    to_steps,
)
from gyre_daemon.workers.compute_workers import (
    ComputeServer,
    ComputeWorkers,
    Exchange,
    ExchangeRoom,
    Task,
    WorkerLost,
)

# To load a chain's classes may take that long: libraries of users import others for seconds.
_MIN_LOAD_S = 60.0
# The assumed cost of describing a chain, until it is known. If it were free, clients that
# ask for one chain after the other would keep the turns from those who read. One that takes much
# longer, as libraries are imported, counts as this at most.
_DESCRIBED_IN_S, _MOST_DESCRIBED_IN_S = 0.01, 1.0
# The most a process may allocate: some decoded images of 100 megapixels. More would let one take
# the memory of the machine.
TRANSFORM = Task(
    "gyre-transform", "gyre_daemon.transforms.worker:Transforming", 2 << 30, "transform samples"
)


class SampleFailed(Exception):
    """A sample cannot be transformed.

    Attributes:
        number: of the sample in its portion.
        transform: the name of the one that failed; empty if unknown.
        reason: in words.
        is_costly: whether to find out took a process, and perhaps its deadline.
    """

    def __init__(self, number: int, transform: str, reason: str, *, is_costly: bool) -> None:
        super().__init__(reason)
        self.number, self.transform, self.reason = number, transform, reason
        self.is_costly = is_costly


class TransformWorkers:
    """The worker processes of a daemon, which all jobs share fairly.

    Attributes:
        counts: of their work.
    """

    def __init__(
        self, server: ComputeServer, num: int, deadline_s: float, counts: TransformCounts
    ) -> None:
        """Start no process yet.

        Args:
            server: forks the processes.
            num: of processes, at most.
            deadline_s: how long one may take for a portion, or for one sample.
            counts: of their work.
        """
        self.counts = counts
        self._deadline_s = deadline_s
        self._workers = ComputeWorkers(server, TRANSFORM, num)
        self._described_in_s = _DESCRIBED_IN_S

    async def describe(self, recipe: bytes, flow: Flow) -> Described:
        """The properties of a chain, of its encoded `Recipe`.

        Raises:
            Overloaded: no process can be started.
        """
        packet = HEAD.pack(Kind.DESCRIBE, 0, 0) + recipe
        if len(packet) > MAX_PACKET_BYTES:
            return Described(f"the transforms and fields take more than {MAX_PACKET_BYTES} bytes")
        reason = ""
        for _ in range(2):  # a process may have been ended for another reason
            async with self._workers.line.turn_of(Claims(flow, 0), self._described_in_s):
                began_s = time.monotonic()
                answer, reason = await self._ask(packet, max(self._deadline_s, _MIN_LOAD_S))
                took_s = min(time.monotonic() - began_s, _MOST_DESCRIBED_IN_S)
                self._described_in_s += (took_s - self._described_in_s) / 8
            try:
                return DESCRIBED_DECODER.decode(answer or b"")
            except msgspec.MsgspecError as error:  # foreign code says which fields it makes
                reason = reason or str(error)
            if reason.startswith("it took"):
                break
        return Described(f"the transforms cannot be loaded: {reason}")

    async def work(
        self,
        kind: Kind,
        exchange: Exchange,
        request: range,
        waiting: list[int],
        claims: Claims,
        sample_s: float,
    ) -> tuple[list[Done], int]:
        """Have samples of the portion in an exchange transformed.

        Where the process dies or hangs, other ones do one sample after the other.

        Args:
            kind: `TRANSFORM` or `VERIFY`.
            exchange: has the stored fields where the portion says.
            request: the portion's bytes in the exchange.
            waiting: the numbers of the samples. More may be added until a process is free, which
                then takes all of them.
            claims: the jobs that wait.
            sample_s: the processor time that a sample will take, as far as known.

        Returns:
            The answers, and how many samples they are for.

        Raises:
            SampleFailed: a sample is refused, or kills or stops the process that tries it.
            Overloaded: no process can be started.
        """
        num_asked = len(waiting)
        async with self._workers.line.turn_of(claims, sample_s * num_asked):
            numbers, num = waiting[:], len(waiting)
            waiting.clear()
            if num > num_asked:
                self._workers.line.charge(claims.first[0], sample_s * (num - num_asked))
            done, _ = await self._transform(kind, exchange, request, numbers)
            if done is not None:
                return [done], num
            each = [await self._alone(kind, exchange, request, number) for number in numbers]
            return each, num

    def close(self) -> None:
        """End the processes that do nothing; the others end with their requests."""
        self._workers.close()

    async def _alone(self, kind: Kind, exchange: Exchange, request: range, number: int) -> Done:
        """Have one sample transformed; one that kills a process is tried once more."""
        reason = ""
        for _ in range(2):
            done, reason = await self._transform(kind, exchange, request, [number])
            if done is not None:
                return done
            if reason.startswith("it took"):
                break
        raise SampleFailed(number, "", reason, is_costly=True)

    async def _transform(
        self, kind: Kind, exchange: Exchange, request: range, numbers: Sequence[int]
    ) -> tuple[Done | None, str]:
        """The outcome for some samples; None and the reason if the process died or hung."""
        packet = HEAD.pack(kind, request.start, request.stop) + np.array(numbers, "<i4").tobytes()
        answer, reason = await self._ask(packet, self._deadline_s, exchange.file.fileno())
        with contextlib.suppress(msgspec.MsgspecError):
            done = DONE_DECODER.decode(answer or b"")
            if done.failed in numbers:
                raise SampleFailed(done.failed, done.transform, done.reason, is_costly=False)
            if done.failed < 0:
                self.counts.cpu_s += done.cpu_s
                return done, ""
        return None, reason

    async def _ask(
        self, packet: bytes, deadline_s: float, *descriptors: int
    ) -> tuple[bytes | None, str]:
        """The answer of an idle process; None and the reason if it died or hung, which ends it."""
        try:
            answer = await self._workers.ask(
                packet, descriptors, max_bytes=MAX_PACKET_BYTES, deadline_s=deadline_s
            )
        except WorkerLost as lost:
            reason = "the process that transformed it died; see the log of the kernel"
            if lost.is_hung:
                reason = f"it took longer than {deadline_s:g} s (transform_deadline_s)"
            if not self._workers.is_closed:
                self.counts.num_replaced += 1
                log_event("transform worker replaced", {"reason": reason}, logging.WARNING)
            return None, reason
        return answer, ""


STEP = "cache"
# No order has blocks of this size, so it can stand for the blocks of the cache.
RECORD_BLOCKS = 1
# Records of different sizes that begin within this many bytes are one block. Each block takes whole
# pages and separate entries in the cache, so single documents are too small. With larger
# blocks, first batches wait for records of later ones. Blocks grow with the dataset, because the
# cache keeps some arrays of all of them.
_BLOCK_BYTES, _MAX_BLOCKS = 64 << 10, 1 << 17
Lengths = npt.NDArray[np.int32]


class MeasuredIndex(SampleIndex):
    """A `SampleIndex` of transformed samples: it knows their lengths, and no place in storage.

    Attributes:
        lengths: int32 [N, R], the elements of each ragged output field.
    """

    def __init__(
        self,
        source: SampleIndex,
        source_fields: Sequence[FieldSpec],
        made: Sequence[FieldSpec],
        passed: Sequence[FieldSpec],
        lengths: Lengths,
    ) -> None:
        """Look at no sample yet."""
        self._source, self._fields, self.lengths = source, [*made, *passed], lengths
        self._made_ragged = [place for place, spec in enumerate(made) if spec.ragged]
        self._element_bytes = np.array([spec.element_bytes for spec in made], np.int64)
        names = [spec.name for spec in stored_fields(source_fields)]
        self._passed = [names.index(spec.name) for spec in stored_fields(passed)]
        self._passed_bytes = np.array(  # of those that are not ragged; -1 for the others
            [-1 if spec.ragged else spec.element_bytes for spec in stored_fields(passed)], np.int64
        )
        names = [spec.name for spec in indexed_fields(source_fields)]
        self._indexed = [names.index(spec.name) for spec in indexed_fields(passed)]
        self._bounds = located_bounds(self)

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    @property
    def fields(self) -> Sequence[FieldSpec]:
        return self._fields

    def locate(self, sample_ids: Int64Array) -> Extents:
        """The bytes of the fields; where they are stored is known to the other index alone."""
        found = self._source.locate(sample_ids)
        elements = np.ones((len(sample_ids), len(self._element_bytes)), np.int64)
        elements[:, self._made_ragged] = self.lengths[sample_ids]
        passed = found.tensor_bytes[:, self._passed]
        passed = np.where(self._passed_bytes < 0, passed, self._passed_bytes)
        sizes = np.hstack((elements * self._element_bytes, passed))
        indexed = tuple(found.indexed[column] for column in self._indexed)
        return Extents(found.shard, np.zeros_like(sizes), sizes, indexed=indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        return self._bounds(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the stored samples, so that orders are the same."""
        return self._source.blocks(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`: of the stored samples where nothing was measured."""
        if not self.lengths.shape[1]:
            return self._source.digest()
        digest = hashlib.blake2b(b"measured" + self._source.digest(), digest_size=16)
        digest.update(self.lengths.astype("<i4").data)
        return digest.digest()


class RecordIndex(SampleIndex):
    """A `SampleIndex` of the records of one dataset, back to back in one shard.

    Attributes:
        starts: int64 [N + 1], where each begins, and the end of the last.
    """

    def __init__(
        self,
        sized: SampleIndex,
        fields: Sequence[FieldSpec],
        left_out: Int64Array = NO_SAMPLES,
    ) -> None:
        """Lay out the records.

        Args:
            sized: the samples as they are made, with the sizes of the fields.
            fields: of the records.
            left_out: int64 [L], samples that are never read. Where sizes differ, their records are
                empty, so that they need not be made.
        """
        self._sized, self._fields = sized, fields
        self._differ = any(spec.ragged for spec in fields)
        self._left_out = left_out if self._differ else NO_SAMPLES
        self.starts = self._find_starts()
        self._bounds = located_bounds(self)
        self._records = kept_tables(self._cut)

    @property
    def num_samples(self) -> int:
        return self._sized.num_samples

    @property
    def fields(self) -> Sequence[FieldSpec]:
        return self._fields

    def locate(self, sample_ids: Int64Array) -> Extents:
        found = self._sized.locate(sample_ids)
        size = found.size
        if len(self._left_out):
            size = np.where(np.isin(sample_ids, self._left_out)[:, None], 0, size)
        start = self.starts[sample_ids][:, None] + np.cumsum(size, axis=1) - size
        return Extents(np.zeros(len(sample_ids), np.int64), start, size, indexed=found.indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        return self._bounds(num_samples) if self._differ else 0

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the stored samples, so that orders are the same."""
        if io_block_bytes == RECORD_BLOCKS:
            return self._records(io_block_bytes)
        return self._sized.blocks(io_block_bytes)

    def digest(self) -> bytes:
        return b"records" + self._sized.digest() + self._left_out.astype("<i8").tobytes()

    def _find_starts(self) -> Int64Array:
        if not self._differ:
            record = sum(spec.element_bytes for spec in stored_fields(self._fields))
            return np.arange(self.num_samples + 1, dtype=np.int64) * record
        ids = np.arange(self.num_samples)
        sizes = column_of_all(self._sized, ids, lambda found: found.size.sum(axis=1))
        sizes[self._left_out] = 0
        return np.concatenate(([0], np.cumsum(sizes)))

    def _cut(self, size: int) -> BlockTable:
        """The blocks of the cache; none is without bytes, unless all records are."""
        if not self._differ:
            return blocks_of_equal_samples(np.array([self.num_samples]), size, size)
        last_byte = max(int(self.starts[-1]) - 1, 0)
        block_bytes = max(_BLOCK_BYTES, last_byte // _MAX_BLOCKS + 1)
        block = np.minimum(self.starts[:-1], last_byte) // block_bytes
        begins = np.diff(block, prepend=-1, append=block[-1:] + 1)
        return blocks_that_begin_at(np.flatnonzero(begins))


def cut(steps: Sequence[Step], random: Sequence[int], drawing: Sequence[str] = ()) -> int:
    """The place of the step `cache`; -1 if there is none.

    Args:
        steps: of a chain.
        random: the places of those that may draw random numbers.
        drawing: the transforms that did so before the chain, of sources of a mixture.

    Raises:
        ConfigError: the transforms before it cannot be cached.
    """
    places = [place for place, step in enumerate(steps) if step.name == STEP]
    if not places:
        return -1
    first = places[0]
    where = f"transforms[{first}] ({STEP})"
    if len(places) > 1:
        raise ConfigError(f"transforms[{places[1]}] is a second `{STEP}`; a chain has one at most")
    if not first:
        raise ConfigError(f"{where} is the first transform, so there is nothing to cache")
    if drawing:
        raise ConfigError(
            f"{where} is behind {drawing[0]} of a source, which draws random numbers: every epoch "
            f"has others, so it would be cached in vain. Put `{STEP}` into the transforms of the "
            "sources, before those that draw."
        )
    before = [place for place in random if place < first]
    if before:
        raise ConfigError(
            f"{where} is behind transforms[{before[0]}] ({steps[before[0]].name}), which draws "
            "random numbers: every epoch has others, so it would be cached in vain. Put "
            f"`{STEP}` before it."
        )
    return first


def as_records(made: Sequence[FieldSpec], passed: Sequence[FieldSpec]) -> list[FieldSpec]:
    """The fields of records: those that transforms make, and those that pass."""
    return [
        *made,
        *(replace(each, codec="bytes", forms=(), default=b"") for each in stored_fields(passed)),
        *indexed_fields(passed),
    ]


def record_shard(index: RecordIndex, source: Dataset, recipe: bytes) -> Shard:
    """The shard of all records, whose version changes with all that they are made of."""
    digest = hashlib.blake2b(recipe, digest_size=16)
    digest.update(source.fingerprint.encode() + index.digest())
    for shard in source.shards:
        digest.update(f"{shard.name} {shard.version}\n".encode())
    is_known = all(shard.version for shard in source.shards)
    num_bytes = int(index.starts[-1])
    return Shard("transformed samples", num_bytes, digest.hexdigest() if is_known else "")


# Takes the samples as the transforms before `cache` make them, the index of their records, and the
# shard of these; returns the storage of that shard, behind the cache.
Keep = Callable[["Dataset", RecordIndex, Shard], Storage]


def records_of(prefix: Dataset, index: RecordIndex, storage: Storage) -> Dataset:
    """A dataset of the records of `prefix`, which has transformed samples with their fields."""
    values = {name: getattr(prefix, name) for name in Dataset.__dataclass_fields__}
    assert prefix.source
    values |= {
        "index": index,
        "storage": storage,
        "chosen": prefix.fields,
        "made": prefix.fields[: prefix.num_made],
        "failed": np.setdiff1d(prefix.corrupt, prefix.source.corrupt),
    }
    return Dataset(**values)


# Memory of samples being read and transformed, of all jobs; it is not part of any budget.
# Less would leave processes idle while a slow storage is read.
_MAX_BYTES_AT_ONCE = 128 << 20
# Datasets and chains before `cache` whose records are known. Another one forgets where the records
# in memory are, and has those on disk looked up again.
_MAX_KEPT = 64
# Of one field of a sample. A process may allocate twice as much; with more, each sample would end
# the process that makes it, and another one would have to start.
_MAX_MADE_BYTES = 1 << 30
# Fields of a sample whose lengths have limits get memory for the longest one. With more than this,
# lengths are measured instead: a few long samples would multiply the memory of each batch.
_MAX_LIMIT_BYTES = 256 << 10
_NOT_COUNTED = ("python", "payload")  # where a function's file is; its digest counts
_DTYPES = frozenset(np.dtype(code).str for code in "?bhiqBHIQefd")


@dataclass(frozen=True, slots=True)
class TransformPool:
    """The daemon's resources for transforms.

    Attributes:
        workers: the processes.
        room: the memory that samples have meanwhile.
    """

    workers: TransformWorkers
    room: ExchangeRoom


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransformedDataset(Dataset):
    """A dataset whose samples are transformed when they are read; `chosen` are the results.

    Attributes:
        source: the samples as they are stored.
        recipe: an encoded `Recipe`.
        made: the fields that transforms make, which come first.
        read: the names of the stored fields that they read.
        cost: of one sample.
        pool: the processes that transform them.
        engines: programs that may transform them faster, the fastest first.
        limits: the most elements of each ragged output field; 0 where that is unknown.
        measured: the lengths of the ragged output fields; None while unknown.
        has_limits: `measured` has the limits, because no length was measured.
        random: the names of transforms that may draw random numbers.
    """

    source: Dataset
    recipe: bytes
    made: Sequence[FieldSpec]
    read: Sequence[str]
    cost: Cost
    pool: TransformPool
    engines: Sequence[str] = ()
    limits: Sequence[int] = ()
    measured: MeasuredIndex | None = None
    has_limits: bool = False
    random: Sequence[str] = ()

    @property
    def sized(self) -> SampleIndex:
        """See `Dataset.sized`."""
        return self.measured or self.index

    @property
    def num_made(self) -> int:
        """See `Dataset.num_made`: fields made before `cache` and passed on since count, too."""
        names = {spec.name for spec in self.source.made}
        passed = (self.chosen or ())[len(self.made) :]
        return len(self.made) + sum(spec.name in names for spec in passed)

    @property
    def made_ragged(self) -> Sequence[FieldSpec]:
        """The fields that transforms make and whose samples differ in length."""
        return [spec for spec in self.made if spec.ragged]

    @property
    def is_read_in_groups(self) -> bool:
        """Whether several small batches are best read together: not if that takes much longer."""
        return self.source.is_read_in_groups and self.cost == "light"

    def with_lengths(self, lengths: Lengths) -> "TransformedDataset":
        """The dataset with the lengths of its samples, int32 [N, R]."""
        passed = self.fields[len(self.made) :]
        fields = self.source.fields
        index = MeasuredIndex(self.source.index, fields, self.made, passed, lengths)
        return replace(self, measured=index)

    def with_limits(self) -> "TransformedDataset | None":
        """The dataset with limits in place of lengths; None where they are unknown or large."""
        specs = self.made_ragged
        pairs = zip(specs, self.limits, strict=True)
        if not specs or not all(self.limits):
            return None
        if sum(spec.element_bytes * most for spec, most in pairs) > _MAX_LIMIT_BYTES:
            return None
        shape = self.source.index.num_samples, len(specs)
        lengths = np.broadcast_to(np.array(self.limits, np.int32), shape)
        return replace(self.with_lengths(lengths), has_limits=True)

    def sized_fully(self) -> "TransformedDataset":
        """The dataset with an index of its own fields, if none of its outputs must be measured."""
        if self.measured:
            return self
        return self.with_lengths(np.empty((self.source.index.num_samples, 0), np.int32))


# Takes the dataset of the transforms before `cache`, and whether none follows; returns it measured.
Ready = Callable[[TransformedDataset, bool], Awaitable[TransformedDataset]]


class Transforms:
    """Makes transformed datasets for a daemon."""

    def __init__(
        self,
        workers: TransformWorkers,
        installed: Collection[str],
        keep: Keep | None,
        *,
        allow_modules: bool,
    ) -> None:
        """Start no process yet.

        Args:
            workers: of the daemon.
            installed: names of other packages' transforms that the operator enables.
            keep: see `Keep`; None where the node has no cache.
            allow_modules: whether clients may name their own classes.
        """
        self._pool = TransformPool(workers, ExchangeRoom(_MAX_BYTES_AT_ONCE))
        # A transform that waits for records holds an exchange meanwhile, so records have separate
        # pools. A source of a mixture waits for its own records, and a mixture for its sources: so
        # there are two pools for each depth of nested mixtures.
        self._pools_of_records: dict[int, TransformPool] = {}
        self._installed = installed
        self._keep = keep
        self._allow_modules = allow_modules
        self._kept: Memo[Dataset] = Memo(_MAX_KEPT)

    async def apply(
        self,
        dataset: Dataset,
        declared: Sequence[Mapping[str, Any]],
        ready: Ready,
        *,
        by_client: bool,
        height: int,
    ) -> Dataset:
        """The dataset with its samples transformed: a `TransformedDataset`, or its records.

        Args:
            dataset: as it is stored.
            declared: tables with a `name` and options; at least one.
            ready: see `Ready`.
            by_client: whether a client declares them, and not the operator.
            height: the depth of nested mixtures in the dataset.

        Raises:
            ConfigError: a transform is unknown, or does not fit the dataset or its options.
            NotAllowed: a transform is not served here.
            Overloaded: no process can be started.
            GyreError: from `ready`.
        """
        steps = self._steps(declared, by_client=by_client)
        described = await self._described(dataset, steps)
        place = cut(steps, described.random, dataset.drawing)
        if place < 0:
            made = self._transformed(dataset, steps, described, self._pool)
            return replace(made, transforms=_fingerprint(declared, described))
        is_last = place + 1 == len(steps)
        prefix = await self._prefix(dataset, steps[:place], declared[:place], height)
        source = self._records(dataset, await ready(prefix, is_last))
        if is_last:
            return source
        # The whole chain without `cache`, which changes nothing, identifies the rest.
        declared = [*declared[:place], *declared[place + 1 :]]
        del described.versions[place]
        fingerprint = _fingerprint(declared, described)
        rest = steps[place + 1 :]
        made = self._transformed(source, rest, await self._described(source, rest), self._pool)
        names = tuple(step.name for step in steps)
        made = replace(made, transforms=fingerprint, transform_names=names)
        return made if made.made_ragged else made.sized_fully()

    def _steps(self, declared: Sequence[Mapping[str, Any]], *, by_client: bool) -> list[Step]:
        allow_modules = self._allow_modules
        allow_files = allow_modules or not by_client
        return to_steps(
            declared, self._installed, allow_modules=allow_modules, allow_files=allow_files
        )

    async def _described(self, dataset: Dataset, steps: Sequence[Step]) -> Described:
        return await self._describe(Recipe(list(steps), _source(dataset)))

    async def _describe(self, recipe: Recipe) -> Described:
        described = await self._pool.workers.describe(ENCODER.encode(recipe), NO_JOB)
        if described.error:
            raise ConfigError(described.error)
        return described

    async def _prefix(
        self,
        dataset: Dataset,
        steps: Sequence[Step],
        declared: Sequence[Mapping[str, Any]],
        height: int,
    ) -> TransformedDataset:
        """The dataset of the transforms before `cache`."""
        if self._keep is None:
            raise ConfigError(
                "a chain has the transform `cache`, and this daemon has no cache; set cache_memory"
            )
        described = await self._described(dataset, steps)
        prefix = self._transformed(dataset, steps, described, self._pool_at(2 * height))
        return replace(prefix, transforms=_fingerprint(declared, described))

    def _records(self, dataset: Dataset, prefix: TransformedDataset) -> Dataset:
        """Its records; the same object for the same records."""
        assert self._keep
        # samples that cannot be transformed are part of `transforms`
        key = dataset.storage, dataset.fingerprint, prefix.recipe, prefix.transforms
        found = self._kept.get(key)
        if found is None:
            fields = as_records(prefix.made, prefix.fields[len(prefix.made) :])
            prefix = replace(prefix.sized_fully(), chosen=fields)
            assert prefix.measured
            index = RecordIndex(prefix.measured, fields, prefix.corrupt)
            shard = record_shard(index, dataset, prefix.recipe)
            records = records_of(prefix, index, self._keep(prefix, index, shard))
            names = (*prefix.transform_names, STEP)
            found = self._kept.keep(replace(records, transform_names=names), key)
        return found

    def _transformed(
        self, dataset: Dataset, steps: Sequence[Step], described: Described, pool: TransformPool
    ) -> TransformedDataset:
        made = [_checked(each) for each in described.made]
        passed = [spec for spec in dataset.fields if spec.name in described.passed]
        chosen = [*made, *passed]
        _check_names(made, passed)
        values = {each.name: getattr(dataset, each.name) for each in fields(Dataset)}
        values |= {"chosen": chosen, "transform_names": tuple(step.name for step in steps)}
        values |= {"source": dataset, "made": made, "failed": NO_SAMPLES}
        return TransformedDataset(
            **values,
            recipe=ENCODER.encode(Recipe(list(steps), _source(dataset), described.versions)),
            read=described.read,
            cost=described.cost,
            pool=pool,
            engines=described.engines,
            limits=[each.max_length for each in described.made if None in each.shape],
            random=[steps[place].name for place in described.random],
        )

    def for_records(self, dataset: TransformedDataset, height: int) -> TransformedDataset:
        """The same for readers of its samples that run while jobs hold their memory."""
        return replace(dataset, pool=self._pool_at(2 * height + 1))

    def _pool_at(self, level: int) -> TransformPool:
        """A pool whose memory is held only by reads that wait for lower levels, or for none."""
        if level not in self._pools_of_records:
            room = ExchangeRoom(_MAX_BYTES_AT_ONCE)
            self._pools_of_records[level] = TransformPool(self._pool.workers, room)
        return self._pools_of_records[level]

    async def with_engine(self, dataset: TransformedDataset, engine: str) -> TransformedDataset:
        """The dataset, transformed by a faster program whose results must be verified.

        Raises:
            ConfigError: the program cannot do it.
            Overloaded: no process can be started.
        """
        recipe = msgspec.structs.replace(RECIPE_DECODER.decode(dataset.recipe), engine=engine)
        described = await self._describe(recipe)
        return replace(dataset, recipe=ENCODER.encode(recipe), cost=described.cost)

    def close(self) -> None:
        """End the processes and give back the memory."""
        self._pool.workers.close()
        self._pool.room.close()
        for pool in self._pools_of_records.values():
            pool.room.close()


def _fingerprint(declared: Sequence[Mapping[str, Any]], described: Described) -> str:
    """Tells one list of transforms from another, by options as they were written and versions."""
    tables = [
        {key: value for key, value in table.items() if (table["name"], key) != _NOT_COUNTED}
        for table in declared
    ]
    text = json.dumps([tables, described.versions], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _source(dataset: Dataset) -> list[SourceField]:
    found = []
    for spec in dataset.fields:
        shape = (None, *spec.shape) if spec.ragged else spec.shape
        found.append(SourceField(spec.name, name_of(spec.dtype), shape, spec.image))
    return found


def _checked(made: MadeField) -> FieldSpec:
    """The field that a process says it makes, which foreign code may have written."""
    if made.dtype not in _DTYPES and made.dtype != BFLOAT16:
        raise ConfigError(
            f"the transforms make {made.name!r} with the dtype {made.dtype!r}; it must be one of "
            f"{', '.join(sorted(np.dtype(each).name for each in _DTYPES))}, {BFLOAT16}"
        )
    dtype, shape = dtype_of(made.dtype), made.shape
    num_bytes = dtype.itemsize * math.prod(length or 0 for length in shape)
    if num_bytes > _MAX_MADE_BYTES:
        raise ConfigError(
            f"the transforms make {made.name!r:.100} with {num_bytes} bytes a sample; a field has "
            f"at most {_MAX_MADE_BYTES}"
        )
    is_ragged = bool(shape) and shape[0] is None
    fixed = tuple(length for length in shape[is_ragged:] if length)
    if len(fixed) != len(shape) - is_ragged:
        raise ConfigError(f"the transforms make {made.name!r} with lengths that samples differ in")
    return FieldSpec(made.name, dtype, fixed, ragged=is_ragged, codec="bytes", image=made.image)


def _check_names(made: Sequence[FieldSpec], passed: Sequence[FieldSpec]) -> None:
    if not made and not passed:
        raise ConfigError("the transforms leave no field")
    names = [spec.name for spec in (*made, *passed)]
    for name in names[: len(made)]:
        if not is_servable(name) or names.count(name) > 1:
            raise ConfigError(f"no field can have the name {name!r:.100}, which transforms make")
