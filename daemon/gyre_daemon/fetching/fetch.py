"""Reads the samples of batch groups into slots, in whatever order their bytes arrive.

All reads of a batch group are in flight at once, and each lands in its own place of the slot.

Reads wait on the event loop; checks and decoding run in threads. This module alone decides where
each of these runs. There is no object per sample: the reads of a batch group are arrays, and only
fields that must be checked or converted are visited one by one.
"""

import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.codecs import CODECS, Finish, first_unknown_id, unknown_id
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import Extents, indexed_fields, stored_fields
from gyre_daemon.errors import CorruptSample
from gyre_daemon.fetching.layout import GroupLayout, LayoutMaker, write_own_tensors
from gyre_daemon.memory.arena import Slot
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.fair import FairExecutor, Flow
from gyre_daemon.storage.base import NextUse, Reads
from gyre_daemon.storage.delays import Delays

_Integers = npt.NDArray[np.int64]
_Columns = tuple[_Integers, _Integers, _Integers, _Integers]  # start, size, target, sample


@dataclass(frozen=True, slots=True)
class Fetch:
    """A batch group that is laid out and not yet read.

    Attributes:
        plan: the sample ids of its batches.
        extents: where the samples lie in storage, batch after batch.
        layout: where the samples go in the slot.
    """

    plan: GroupPlan
    extents: Extents
    layout: GroupLayout

    def part(self, begin: int, end: int) -> "Fetch":
        """The batches `[begin, end)` of the group; they keep their places in the slot."""
        size = self.plan.sample_ids.shape[1]
        extents = self.extents.part(slice(begin * size, end * size))
        return Fetch(self.plan[begin:end], extents, self.layout.part(begin, end))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BatchGroup:
    """The batches of successive steps, complete and never changed again.

    Attributes:
        plan: the sample ids of the batches.
        layout: where the batches and their tensors lie in the slot.
        slot: the memory that the group owns.
    """

    plan: GroupPlan
    layout: GroupLayout
    slot: Slot

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


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a cache is told about the later reads of a job; see `Reads`.

    Attributes:
        block_bytes: the approximate size of the blocks of the order; 0 lets the cache choose.
        next_use: says in how many samples the job reads each of some blocks; None if unknown.
    """

    block_bytes: int = 0
    next_use: NextUse | None = None


NOTHING_AHEAD = Ahead()


@dataclass(frozen=True, slots=True)
class _Samples:
    """n consecutive samples of a batch group with F stored fields, across its batches.

    Attributes:
        sample_ids: int64 [n].
        slot: the memory that the samples go to.
        shard: int64 [n], the number of each sample's shard.
        start: int64 [n, F], the byte of the shard at which each stored field begins.
        stored: int64 [n, F], the sizes of the stored fields in bytes.
        target: int64 [n, F], the addresses of the fields in the slot.
        reserved: int64 [n, F], the bytes reserved for each field in the slot.
        absent: bool [n, F], which samples lack which fields; None if no field is optional.
    """

    sample_ids: _Integers
    slot: Slot
    shard: _Integers
    start: _Integers
    stored: _Integers
    target: _Integers
    reserved: _Integers
    absent: npt.NDArray[np.bool_] | None

    @classmethod
    def of(cls, fetch: Fetch, slot: Slot, some: slice) -> "_Samples":
        destinations, extents = fetch.layout.destinations[some], fetch.extents.part(some)
        return cls(
            fetch.plan.sample_ids.reshape(-1)[some],
            slot,
            extents.shard,
            extents.start,
            extents.size,
            destinations[:, :, 0] + slot.address,
            destinations[:, :, 1] - destinations[:, :, 0],
            extents.absent,
        )

    def lacking(self, column: int) -> npt.NDArray[np.bool_] | None:
        """Bool [n], which samples lack a field; None if none does."""
        if self.absent is None or not self.absent[:, column].any():
            return None
        return self.absent[:, column]

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


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory for stored bytes of one field that are not part of its tensor, such as a header.

    Attributes:
        memory: uint8.
        ends: int64 [n + 1]; sample i has the bytes `[ends[i], ends[i + 1])` of the memory.
    """

    memory: npt.NDArray[np.uint8]
    ends: _Integers


_NO_MEMORY = np.empty(0, np.uint8)


class Fetcher:
    """Fills slots with batches of one dataset."""

    def __init__(self, dataset: Dataset, workers: FairExecutor) -> None:
        self._dataset = dataset
        self._workers = workers
        stored = stored_fields(dataset.fields)
        self.codecs = [CODECS[spec.codec] for spec in stored]
        self.indexed_names = [spec.name for spec in indexed_fields(dataset.fields)]
        self._finishes = any(CODECS[spec.codec].finish or spec.codec == "ids" for spec in stored)
        self._layouts = LayoutMaker(dataset.fields)

    def prepare(self, plan: GroupPlan, num_together: int) -> list[Fetch]:
        """Lay out batches in groups of `num_together`: only arithmetic on the index, no I/O."""
        extents = self._dataset.index.locate(plan.sample_ids.reshape(-1))
        size, fetches = plan.sample_ids.shape[1], []
        for begin in range(0, len(plan), num_together):
            some = plan[begin : begin + num_together]
            its = extents.part(slice(begin * size, (begin + len(some)) * size))
            fetches.append(Fetch(some, its, self._layouts.make(some, its.tensor_bytes)))
        return fetches

    async def fill(
        self,
        fetch: Fetch,
        slot: Slot,
        flow: Flow,
        ahead: Ahead = NOTHING_AHEAD,
        delays: Delays | None = None,
    ) -> BatchGroup:
        """Read a batch group into its slot.

        The bytes are the same in whatever order the samples arrive.

        Args:
            fetch: a batch group that `prepare` has laid out.
            slot: at least `fetch.layout.num_bytes` long; the caller holds a lease of its arena.
            flow: the job that reads; its earlier steps are more urgent.
            ahead: what the job will read later, for the cache.
            delays: records how long each part of the work took.

        Raises:
            CorruptSample: names shard, sample, offset and reason.
            ShardMissing, NotAllowed, StorageUnavailable: from the storage, possibly as the first
                member of an exception group.
        """
        delays = delays or Delays()
        began = time.monotonic()
        plan = _GroupReads(self, fetch, slot, flow, ahead, delays)
        await self._dataset.storage.read(plan)
        done = time.monotonic()
        delays.read_s += done - began
        if delays.num_requests:
            delays.storage_s = delays.read_s
        if self._finishes:
            work = partial(self._finish, slot, plan.parts)
            await self._workers.run(flow, plan.num_bytes, plan.urgency, work)
            delays.finish_s += time.monotonic() - done
        return BatchGroup(fetch.plan, fetch.layout, slot)

    def _finish(self, slot: Slot, parts: Sequence[tuple[_Samples, list[_Scratch]]]) -> None:
        """Check and decode; runs in a thread, which continues if the caller is cancelled."""
        with slot.arena.lease():
            for samples, scratches in parts:
                for column, (codec, scratch) in enumerate(zip(self.codecs, scratches, strict=True)):
                    if codec.finish:
                        self._finish_column(samples, column, scratch, codec.finish)
                    elif self._dataset.fields[column].codec == "ids":
                        self._check_ids(samples, column)

    def _finish_column(
        self, samples: _Samples, column: int, scratch: _Scratch, finish: Finish
    ) -> None:
        spec = self._dataset.fields[column]
        memory, ends = scratch.memory.data, scratch.ends.tolist()
        lacking, sizes = samples.lacking(column), samples.reserved[:, column].tolist()
        for sample, begin in enumerate(samples.offsets(column)):
            if lacking is not None and lacking[sample]:
                continue
            stored = memory[ends[sample] : ends[sample + 1]]
            try:
                finish(spec, stored, samples.slot.memory[begin : begin + sizes[sample]])
            except ValueError as error:
                raise self.corrupt(samples, sample, column, str(error)) from error

    def _check_ids(self, samples: _Samples, column: int) -> None:
        """Check token ids against the vocabulary, adjacent samples of a batch at once."""
        spec, size = self._dataset.fields[column], int(samples.reserved[0, column])
        offsets, memory = np.array(samples.offsets(column)), samples.slot.memory
        runs = [0, *(np.flatnonzero(np.diff(offsets) != size) + 1).tolist(), len(offsets)]
        for first, stop in itertools.pairwise(runs):
            begin, end = int(offsets[first]), int(offsets[stop - 1]) + size
            unknown = first_unknown_id(spec, memory[begin:end])
            if unknown is not None:
                row, position = divmod(unknown, size // spec.dtype.itemsize)
                sample = memory[begin + row * size : begin + (row + 1) * size]
                reason = unknown_id(spec, sample, position)
                raise self.corrupt(samples, first + row, column, reason)

    def corrupt(self, samples: _Samples, sample: int, column: int, reason: str) -> CorruptSample:
        """The error for one field of one sample."""
        dataset, spec = self._dataset, self._dataset.fields[column]
        sample_id, offset = int(samples.sample_ids[sample]), int(samples.start[sample, column])
        shard = dataset.storage.shards[int(samples.shard[sample])].name
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

    def misfit(self, samples: _Samples, sample: int, column: int) -> CorruptSample:
        """The error for stored bytes that cannot be a field of this kind."""
        num_bytes, codec = samples.stored[sample, column], self._dataset.fields[column].codec
        return self.corrupt(samples, sample, column, f"{num_bytes} bytes are no {codec} here")


class _GroupReads:
    """The reads of a batch group; a `ReadPlan` of its samples.

    Attributes:
        parts: the samples of each part that was asked for so far, with their scratch memory.
    """

    def __init__(
        self, fetcher: Fetcher, fetch: Fetch, slot: Slot, flow: Flow, ahead: Ahead, delays: Delays
    ) -> None:
        self.parts: list[tuple[_Samples, list[_Scratch]]] = []
        self.num_bytes = fetch.layout.num_bytes
        self.flow = flow
        self.urgency = fetch.plan.first_step
        self.delays: Delays | None = delays
        self._fetcher = fetcher
        self._fetch = fetch
        self._slot = slot
        self._ahead = ahead

    def __len__(self) -> int:
        return self._fetch.plan.sample_ids.size

    def lease(self) -> AbstractContextManager[None]:
        return self._slot.arena.lease()

    def part(self, which: slice) -> Reads:
        """Compute the reads of some samples.

        The part with the first sample also writes the tensors that are not read from storage, such
        as `sample_id`.
        """
        fetch = self._fetch
        if not which.start:
            names = self._fetcher.indexed_names
            indexed = dict(zip(names, fetch.extents.indexed, strict=True))
            write_own_tensors(fetch.plan, fetch.layout, self._slot.memory, indexed)
        samples = _Samples.of(fetch, self._slot, which)
        pieces: list[_Columns] = []
        everyone = np.arange(len(samples.shard))
        scratches = [
            self._add_reads(samples, column, everyone, pieces)
            for column in range(len(self._fetcher.codecs))
        ]
        self.parts.append((samples, scratches))
        start, size, target, sample = _in_order(pieces)
        return Reads(
            samples.shard if sample is everyone else samples.shard[sample],
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
        )

    def _add_reads(
        self, samples: _Samples, column: int, everyone: _Integers, pieces: list[_Columns]
    ) -> _Scratch:
        """Append the reads of one field: those into scratch memory, then those into the slot."""
        codec = self._fetcher.codecs[column]
        start, stored = samples.start[:, column], samples.stored[:, column]
        target, reserved = samples.target[:, column], samples.reserved[:, column]
        misfits, lacking = codec.misfits(stored, reserved), samples.lacking(column)
        if lacking is not None:
            misfits &= ~lacking
            samples.clear(column, lacking)
        if misfits.any():
            raise self._fetcher.misfit(samples, int(np.argmax(misfits)), column)
        if codec.scratch_bytes is None:
            if stored.any():
                pieces.append((start, stored, target, everyone))
            return _Scratch(_NO_MEMORY, np.zeros(len(stored) + 1, np.int64))
        before = codec.scratch_bytes(stored, reserved)
        if lacking is not None:
            before = np.where(lacking, 0, before)
        ends = np.concatenate(([0], np.cumsum(before)))
        scratch = _Scratch(np.empty(int(ends[-1]), np.uint8), ends)
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
