"""Reads the samples of batch groups into slots, in whatever order their bytes arrive.

All reads of a batch group are in flight at once, and each lands in its own place of the slot.

Reads wait on the event loop; checks and decoding run in threads. This module alone decides where
each of these runs. There is no object per sample: the reads of a batch group are arrays, and only
fields that must be checked or converted are visited one by one.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from gyre_daemon.datasets.codecs import CODECS, Codec, misfit_reason
from gyre_daemon.datasets.dataset import Dataset, Packed
from gyre_daemon.datasets.formats import Extents, FieldSpec, indexed_fields, stored_fields
from gyre_daemon.errors import CorruptSample
from gyre_daemon.fetching.layout import (
    GroupLayout,
    LayoutMaker,
    PackedRows,
    lay_out_packed,
    locate_packed,
    write_own_tensors,
    write_packed,
)
from gyre_daemon.memory.arenas import Slot
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.threads import Claims, FairExecutor
from gyre_daemon.storage.reads import Delays, Draws, NextUse, Reads, WritableArena


class TargetMemory(Protocol):
    """Memory that a batch group is read into, such as a slot."""

    @property
    def memory(self) -> memoryview:
        """All of it, writable."""

    @property
    def address(self) -> int:
        """The address of its first byte."""

    @property
    def arena(self) -> WritableArena:
        """The owner of the memory."""


class Fetch(Struct, frozen=True):
    """A batch group, laid out and not yet read.

    Attributes:
        plan: the sample ids of its batches.
        extents: where the samples lie in storage, batch after batch; where sequences are packed,
            their documents.
        layout: where the samples go in the slot.
        rows: the parts of each sequence, where the dataset is packed.
        draws: of all that is read, where that depends on chance; None for those of seed 0.
    """

    plan: GroupPlan
    extents: Extents
    layout: GroupLayout
    rows: PackedRows | None = None
    draws: Draws | None = None

    @property
    def ids(self) -> Int64Array:
        """Int64 [n], the samples to read, or the documents of packed sequences."""
        return self.plan.sample_ids.reshape(-1) if self.rows is None else self.rows.documents

    def part(self, begin: int, end: int) -> "Fetch":
        """The batches `[begin, end)` of the group; they keep their places in the slot."""
        size = self.plan.sample_ids.shape[1]
        which, rows = slice(begin * size, end * size), None
        if self.rows is not None:
            which = self.rows.which(begin * size, end * size)
            rows = self.rows.part(begin * size, end * size)
        plan, layout = self.plan[begin:end], self.layout.part(begin, end)
        draws = self.draws and self.draws.part(which)
        return Fetch(plan, self.extents.part(which), layout, rows, draws)

    def drawn(self, seed: int, epochs: Int64Array) -> "Fetch":
        """The same, with the job's seed and the epoch of each sample, int64 [K, B]."""
        epochs = epochs.reshape(-1)
        if self.rows is not None:
            epochs = np.repeat(epochs, np.diff(self.rows.bounds))
        return replace(self, draws=Draws(seed, epochs))


def plain_fetches(
    plan: GroupPlan,
    num_together: int,
    extents: Extents,
    sizes: Int64Array,
    layouts: LayoutMaker,
) -> list[Fetch]:
    """Lay out batches of samples in groups of `num_together`.

    Args:
        plan: the sample ids of the batches.
        num_together: the batches of a group.
        extents: where the samples lie in storage.
        sizes: see `LayoutMaker.make`.
        layouts: of the dataset.
    """
    size, fetches = plan.sample_ids.shape[1], []
    for begin in range(0, len(plan), num_together):
        some = plan[begin : begin + num_together]
        which = slice(begin * size, (begin + len(some)) * size)
        layout = layouts.make(some, sizes[which])
        fetches.append(Fetch(some, extents.part(which), layout))
    return fetches


def packed_fetches(
    packed: Packed, plan: GroupPlan, num_together: int, rows: PackedRows, extents: Extents
) -> list[Fetch]:
    """Lay out batches of packed sequences in groups of `num_together`.

    Args:
        packed: how the sequences are packed.
        plan: the sample ids of the batches.
        num_together: the batches of a group.
        rows: the parts of all samples of the plan.
        extents: where the parts of their documents lie in storage.
    """
    size, fetches = plan.sample_ids.shape[1], []
    for begin in range(0, len(plan), num_together):
        some = plan[begin : begin + num_together]
        first, end = begin * size, (begin + len(some)) * size
        its, located = rows.part(first, end), extents.part(rows.which(first, end))
        fetches.append(Fetch(some, located, lay_out_packed(packed, its, some), its))
    return fetches


class BatchGroup(Struct, frozen=True, eq=False, weakref=True):
    """The batches of successive steps, complete but for those that failed, and never changed again.

    Attributes:
        plan: the sample ids of the batches.
        layout: where the batches and their tensors lie in the slot.
        slot: the memory that the group owns.
        errors: why a batch failed, by its step.
    """

    plan: GroupPlan
    layout: GroupLayout
    slot: Slot
    errors: Mapping[int, Exception] = {}

    def good(self, steps: range) -> range:
        """These steps up to the first that failed; empty where that is the first of all."""
        if not self.errors:
            return steps
        return next((range(steps.start, step) for step in steps if step in self.errors), steps)

    def part(self, steps: range) -> "BatchGroup":
        """The batches of some of its steps; their bytes stay where they are."""
        if len(steps) == len(self.plan):
            return self
        begin, end = steps.start - self.plan.first_step, steps.stop - self.plan.first_step
        return BatchGroup(self.plan[begin:end], self.layout.part(begin, end), self.slot)

    @property
    def num_bytes(self) -> int:
        """The bytes of all batches, without the padding between them."""
        return sum(batch.num_bytes for batch in self.layout.batches)

    @property
    def payloads(self) -> list[memoryview]:
        """The bytes of each batch, as views of the slot."""
        pairs = zip(self.layout.batches, self.layout.offsets.tolist(), strict=True)
        return [self.slot.memory[offset : offset + batch.num_bytes] for batch, offset in pairs]


class Ahead(Struct, frozen=True):
    """Tells a cache about the later reads of a job; see `Reads`.

    Attributes:
        block_bytes: the approximate size of the blocks of the order; 0 lets the cache choose.
        next_use: says in how many samples the job reads each of some blocks; None if unknown.
    """

    block_bytes: int = 0
    next_use: NextUse | None = None


NOTHING_AHEAD = Ahead()


class Samples(Struct, frozen=True):
    """n consecutive samples of a batch group with F stored fields, across its batches.

    Attributes:
        sample_ids: int64 [n].
        slot: the memory that the samples go to.
        extents: where they lie in storage.
        target: int64 [n, F], the addresses of the fields in the slot.
        reserved: int64 [n, F], the bytes reserved for each field in the slot.
    """

    sample_ids: Int64Array
    slot: TargetMemory
    extents: Extents
    target: Int64Array
    reserved: Int64Array

    @classmethod
    def of(cls, fetch: Fetch, slot: TargetMemory, some: slice) -> "Samples":
        """Some samples of a laid out batch group."""
        destinations = fetch.layout.destinations[some]
        target = destinations[:, :, 0] + slot.address
        reserved = destinations[:, :, 1] - destinations[:, :, 0]
        return cls(fetch.ids[some], slot, fetch.extents.part(some), target, reserved)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def lacking(self, column: int) -> npt.NDArray[np.bool_] | None:
        """Bool [n], which samples lack a field; None if none does."""
        absent = self.extents.absent
        if absent is None or not absent[:, column].any():
            return None
        return absent[:, column]

    def offsets(self, column: int) -> list[int]:
        """Where a field's bytes begin in the slot, for each sample."""
        offsets: list[int] = (self.target[:, column] - self.slot.address).tolist()
        return offsets

    def clear(self, column: int, lacking: npt.NDArray[np.bool_]) -> None:
        """Write zeros for samples that lack a field."""
        offsets, sizes = self.offsets(column), self.reserved[:, column].tolist()
        for sample in np.flatnonzero(lacking).tolist():
            begin, size = offsets[sample], sizes[sample]
            self.slot.memory[begin : begin + size] = bytes(size)


class Scratch(Struct, frozen=True):
    """Memory for stored bytes of one field that are not part of its tensor, such as a header.

    Attributes:
        memory: uint8.
        ends: int64 [n + 1]; sample i has the bytes `[ends[i], ends[i + 1])` of the memory.
    """

    memory: npt.NDArray[np.uint8]
    ends: Int64Array


class StoredField(Struct, frozen=True):
    """The place of a stored field in its shards.

    Attributes:
        forms: the field as each schema stores it, with its codec; one if all store it alike.
    """

    forms: Sequence[tuple[FieldSpec, Codec]]

    @classmethod
    def of(cls, spec: FieldSpec) -> "StoredField":
        """From the field of a dataset."""
        forms = [spec.form(number) for number in range(max(1, len(spec.forms)))]
        return cls([(form, CODECS[form.codec]) for form in forms])

    @property
    def finishes(self) -> bool:
        """Whether bytes must be checked or converted once they are there."""
        return any(codec.finish for _, codec in self.forms)

    def misfits(self, samples: Samples, column: int) -> npt.NDArray[np.bool_]:
        """Bool [n], which samples cannot be such a field; see `Codec.misfits`."""
        stored, reserved = samples.extents.size[:, column], samples.reserved[:, column]
        found = np.zeros(len(stored), np.bool_)
        for codec, some in self._by_schema(samples):
            found[some] = codec.misfits(stored[some], reserved[some])
        return found

    def scratch_bytes(self, samples: Samples, column: int) -> Int64Array | None:
        """Int64 [n], see `Codec.scratch_bytes`; None if none has any."""
        if not any(codec.scratch_bytes for _, codec in self.forms):
            return None
        stored, reserved = samples.extents.size[:, column], samples.reserved[:, column]
        found = np.zeros(len(stored), np.int64)
        for codec, some in self._by_schema(samples):
            if codec.scratch_bytes:
                found[some] = codec.scratch_bytes(stored[some], reserved[some])
        return found

    def of_each(self, samples: Samples) -> Iterable[tuple[FieldSpec, Codec]]:
        """How each sample stores the field."""
        if len(self.forms) == 1:
            return itertools.repeat(self.forms[0], len(samples))
        assert samples.extents.schema is not None
        return (self.forms[number] for number in samples.extents.schema.tolist())

    def _by_schema(self, samples: Samples) -> Iterator[tuple[Codec, slice | Int64Array]]:
        """The samples of each schema, and how these store the field."""
        if len(self.forms) == 1:
            yield self.forms[0][1], slice(None)
            return
        schema = samples.extents.schema
        assert schema is not None
        for number in np.unique(schema).tolist():
            yield self.forms[number][1], np.flatnonzero(schema == number)


MAX_KEPT = 4096  # batch groups: some minutes of a busy daemon, in about 1 MiB


class BatchTiming(Struct, frozen=True):
    """The record of the batches of steps `[first_step, stop_step)`, which were read together.

    Attributes:
        dataset: the name of the dataset.
        job: the job for which they were read: that of the shared stream's owner.
        user: whose job it is.
        readers: the users whose sessions read them from the shared stream; one that joins it later
            is added when it takes them.
        rank: the rank whose part of the global batches they are.
        world_size: the number of ranks.
        first_step: the first step.
        stop_step: the step after the last.
        begun_at: when they were begun, on the daemon's clock.
        total_s: the seconds from then until they were complete.
        is_awaited: whether a trainer had nothing to read when they were complete.
        delays: the waits of their reads.
        error: why one of them failed; empty if none did.
    """

    dataset: str
    job: str
    user: str
    readers: set[str]
    rank: int
    world_size: int
    first_step: int
    stop_step: int
    begun_at: float
    total_s: float
    is_awaited: bool
    delays: Delays
    error: str


class BatchTimings:
    """The timings of the last batch groups of all shared streams."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._kept: deque[BatchTiming] = deque(maxlen=max_kept)

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def add(self, timing: BatchTiming) -> None:
        """Keep one more; where there are too many, the oldest goes."""
        self._kept.append(timing)

    def find(
        self, dataset: str, step: int, job: str = "", reader: str | None = None
    ) -> Sequence[BatchTiming]:
        """The timings of a step, the newest first.

        Args:
            dataset: its name.
            step: one of those that were read together.
            job: of this job only; empty for all.
            reader: count this user's sessions alone; None for all users.
        """
        return [
            each
            for each in reversed(self._kept)
            if each.dataset == dataset
            and each.first_step <= step < each.stop_step
            and job in ("", each.job)
            and (reader is None or reader in each.readers)
        ]


_Integers = npt.NDArray[np.int64]
_Columns = tuple[_Integers, _Integers, _Integers, _Integers]  # start, size, target, sample


_NO_MEMORY = np.empty(0, np.uint8)


class Fetcher:
    """Fills slots with batches of one dataset."""

    def __init__(self, dataset: Dataset, workers: FairExecutor) -> None:
        self._dataset = dataset
        self._workers = workers
        packed = dataset.packed
        self._specs = [*packed.read.values()] if packed else stored_fields(dataset.fields)
        self.stored = [StoredField.of(spec) for spec in self._specs]
        self.indexed_names = [spec.name for spec in indexed_fields(dataset.fields)]
        self.is_drawn = bool(dataset.drawing)
        self._finishes = packed is not None or any(field.finishes for field in self.stored)
        self._layouts = LayoutMaker(dataset.served)

    @property
    def is_arriving(self) -> bool:
        """Whether samples arrive one by one, as responses do, and are complete when they do."""
        return not (self._finishes or self._dataset.storage.is_node_local)

    def prepare(self, plan: GroupPlan, num_together: int) -> list[Fetch]:
        """Lay out batches in groups of `num_together`: only arithmetic on the index, no I/O."""
        if packed := self._dataset.packed:
            rows, located = locate_packed(self._dataset.index, packed, plan)
            return packed_fetches(packed, plan, num_together, rows, located)
        extents = self._dataset.index.locate(plan.sample_ids.reshape(-1))
        return plain_fetches(plan, num_together, extents, extents.tensor_bytes, self._layouts)

    async def fill(
        self,
        fetch: Fetch,
        slot: TargetMemory,
        claims: Claims,
        ahead: Ahead = NOTHING_AHEAD,
        delays: Delays | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> GroupLayout:
        """Read a batch group into its slot.

        The bytes are the same in whatever order the samples arrive.

        Args:
            fetch: a batch group that `prepare` has laid out.
            slot: at least `fetch.layout.num_bytes` long; the caller holds a lease of its arena.
            claims: the jobs that need it, at whose first turn it is read; more may come.
            ahead: later reads of the job, for the cache.
            delays: records how long each part of the work took.
            arrived: called with the number of each sample of the group once its bytes are there;
                only while `is_arriving`. A read for each sample costs the event loop some 0.1 ms.

        Returns:
            Where the batches lie.

        Raises:
            CorruptSample: names shard, sample, offset and reason.
            ShardMissing, NotAllowed, StorageUnavailable: from the storage, possibly as the first
                member of an exception group.
        """
        delays = delays or Delays()
        began = time.monotonic()
        plan = _GroupReads(self, fetch, slot, claims, ahead, delays)
        if arrived:
            await self._read_singly(plan, arrived)
        else:
            await self._dataset.storage.read(plan)
        done = time.monotonic()
        delays.read_s += done - began
        if delays.num_requests:
            delays.storage_s = delays.read_s
        if self._finishes:
            work = partial(self._finish, fetch, slot, plan.parts)
            await self._workers.run_of(claims, plan.num_bytes, work)
            delays.finish_s += time.monotonic() - done
        return fetch.layout

    async def _read_singly(self, plan: "_GroupReads", arrived: Callable[[int], None]) -> None:
        reads = plan.part(slice(None))
        borders = np.searchsorted(reads.sample, np.arange(len(plan) + 1)).tolist()

        async def read(number: int, its: Reads) -> None:
            if len(its):
                await self._dataset.storage.read(its)
            arrived(number)

        async with asyncio.TaskGroup() as tasks:
            for number, cut in enumerate(itertools.pairwise(borders)):
                tasks.create_task(read(number, reads.part(slice(*cut))))

    def _finish(
        self, fetch: Fetch, slot: TargetMemory, parts: Sequence[tuple[Samples, list[Scratch]]]
    ) -> None:
        """Check and decode; runs in a thread, which continues if the caller is cancelled."""
        with slot.arena.lease():
            if (packed := self._dataset.packed) and fetch.rows:
                write_packed(packed, fetch.rows, fetch.plan, fetch.layout, slot.memory)
            for samples, scratches in parts:
                for column, (field, scratch) in enumerate(zip(self.stored, scratches, strict=True)):
                    if field.finishes:
                        self._finish_column(samples, column, scratch, field)

    def _finish_column(
        self, samples: Samples, column: int, scratch: Scratch, field: StoredField
    ) -> None:
        if self._are_sound(samples, column, field):
            return
        memory, ends = scratch.memory.data, scratch.ends.tolist()
        lacking, sizes = samples.lacking(column), samples.reserved[:, column].tolist()
        pairs = zip(samples.offsets(column), field.of_each(samples), strict=True)
        for sample, (begin, (spec, codec)) in enumerate(pairs):
            if codec.finish is None or (lacking is not None and lacking[sample]):
                continue
            stored = memory[ends[sample] : ends[sample + 1]]
            try:
                codec.finish(spec, stored, samples.slot.memory[begin : begin + sizes[sample]])
            except ValueError as error:
                raise self.corrupt(samples, sample, column, str(error)) from error

    def _are_sound(self, samples: Samples, column: int, field: StoredField) -> bool:
        """Whether a check of all samples at once finds nothing; False if there is none."""
        (spec, codec), *others = field.forms
        is_mixed = any(other is not codec for _, other in others)
        if codec.check_all is None or is_mixed or samples.lacking(column) is not None:
            return False
        begins = samples.target[:, column] - samples.slot.address
        ends = begins + samples.reserved[:, column]
        try:
            for first, stop in _runs(begins, ends):
                begin, end = int(begins[first]), int(ends[stop - 1])
                memory = samples.slot.memory[begin:end]
                codec.check_all(spec, memory, begins[first:stop] - begin)
        except ValueError:
            return False  # one by one, so that the error names the sample
        return True

    def corrupt(self, samples: Samples, sample: int, column: int, reason: str) -> CorruptSample:
        """The error for one field of one sample."""
        dataset, spec = self._dataset, self._specs[column]
        sample_id, extents = int(samples.sample_ids[sample]), samples.extents
        listed = dataset.storage.shards[int(extents.shard[sample])]
        shard, offset = listed.place_of(int(extents.start[sample, column]))
        return CorruptSample(
            f"sample {sample_id} of dataset `{dataset.name}` (shard {shard}, byte {offset}) is "
            f"corrupt: field {spec.name}: {reason}",
            {
                "dataset": dataset.name,
                "shard": shard,
                "sample_id": sample_id,
                "offset": offset,
                "reason": reason,
            },
        )

    def misfit(self, samples: Samples, sample: int, column: int) -> CorruptSample:
        """The error for stored bytes that cannot be a field of this kind."""
        num_bytes = int(samples.extents.size[sample, column])
        spec, _ = list(self.stored[column].of_each(samples))[sample]
        return self.corrupt(samples, sample, column, misfit_reason(spec, num_bytes))


def _runs(begins: Int64Array, ends: Int64Array) -> Iterator[tuple[int, int]]:
    """The samples `[first, stop)` of which each lies right behind the one before."""
    borders = [0, *(np.flatnonzero(begins[1:] != ends[:-1]) + 1).tolist(), len(begins)]
    return itertools.pairwise(borders)


class _GroupReads:
    """The reads of a batch group; a `ReadPlan` of its samples.

    Attributes:
        parts: the samples of each part that was asked for so far, with their scratch memory.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        fetch: Fetch,
        slot: TargetMemory,
        claims: Claims,
        ahead: Ahead,
        delays: Delays,
    ) -> None:
        self.parts: list[tuple[Samples, list[Scratch]]] = []
        self.num_bytes = fetch.layout.num_bytes
        self.flow, self.urgency = claims.first
        self._claims = claims
        self.delays: Delays | None = delays
        self._fetcher = fetcher
        self._fetch = fetch
        self._slot = slot
        self._ahead = ahead

    def __len__(self) -> int:
        return len(self._fetch.ids)

    def lease(self) -> AbstractContextManager[None]:
        return self._slot.arena.lease()

    def part(self, which: slice) -> Reads:
        """Compute the reads of some samples.

        The part with the first sample also writes the tensors with other sources than storage, such
        as `sample_id`; packed sequences get theirs at last, in a thread.
        """
        fetch = self._fetch
        if not which.start and fetch.rows is None:
            names = self._fetcher.indexed_names
            indexed = dict(zip(names, fetch.extents.indexed, strict=True))
            write_own_tensors(fetch.plan, fetch.layout, self._slot.memory, indexed)
        samples = Samples.of(fetch, self._slot, which)
        shard = samples.extents.shard
        pieces: list[_Columns] = []
        everyone = np.arange(len(samples))
        scratches = [
            self._add_reads(samples, column, everyone, pieces)
            for column in range(len(self._fetcher.stored))
        ]
        self.parts.append((samples, scratches))
        start, size, target, sample = _in_order(pieces)
        draws = None
        if self._fetcher.is_drawn:  # the bytes depend on seed and epoch
            draws = (fetch.draws or Draws.first(len(self))).part(which).part(sample)
        return Reads(
            shard if sample is everyone else shard[sample],
            start,
            size,
            target.view(np.uint64),
            sample,
            tuple(scratch.memory for scratch in scratches if len(scratch.memory)),
            self.flow,
            self.urgency,
            self._ahead.block_bytes,
            self._ahead.next_use,
            self.delays,
            self._slot.arena,
            self._claims,
            draws,
        )

    def _add_reads(
        self, samples: Samples, column: int, everyone: _Integers, pieces: list[_Columns]
    ) -> Scratch:
        """Append the reads of one field: those into scratch memory, then those into the slot."""
        field = self._fetcher.stored[column]
        start, stored = samples.extents.start[:, column], samples.extents.size[:, column]
        target = samples.target[:, column]
        misfits, lacking = field.misfits(samples, column), samples.lacking(column)
        if lacking is not None:
            misfits &= ~lacking
            samples.clear(column, lacking)
        if misfits.any():
            raise self._fetcher.misfit(samples, int(np.argmax(misfits)), column)
        before = field.scratch_bytes(samples, column)
        if before is None:
            if stored.any():
                pieces.append((start, stored, target, everyone))
            return Scratch(_NO_MEMORY, np.zeros(len(stored) + 1, np.int64))
        if lacking is not None:
            before = np.where(lacking, 0, before)
        ends = np.concatenate(([0], np.cumsum(before)))
        scratch = Scratch(np.empty(int(ends[-1]), np.uint8), ends)
        after = stored - before
        if ends[-1]:
            pieces.append((start, before, ends[:-1] + scratch.memory.ctypes.data, everyone))
        if after.any():
            pieces.append((start + before, after, target, everyone))
        return scratch


def _in_order(pieces: Sequence[_Columns]) -> _Columns:
    """Join the reads of several fields: starts, sizes, targets and samples, without empty reads.

    The reads of each sample are adjacent and sorted by start.
    """
    if len(pieces) == 1:
        return pieces[0]
    nothing = np.empty(0, np.int64)
    start, size, target, sample = (
        np.concatenate([nothing, *(piece[part] for piece in pieces)]) for part in range(4)
    )
    order = np.lexsort((start, sample))
    order = order[size[order] > 0]
    return start[order], size[order], target[order], sample[order]
