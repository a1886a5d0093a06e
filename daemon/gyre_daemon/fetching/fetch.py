"""Fetch unordered, place ordered: all reads of a strip are in flight at once, and each lands in its own place.

Reading waits on the event loop, checking and decoding compute in threads, and this file is the one place that decides which.
There is no object per sample: a batch's reads are arrays, and only fields that must be checked or converted are looked at one
by one.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import Extents, known_fields, stored_fields
from gyre_daemon.errors import CorruptSample
from gyre_daemon.fetching.layout import LayoutMaker, StripLayout, write_own_tensors
from gyre_daemon.fetching.transform import CODECS, first_unknown_id
from gyre_daemon.memory.arena import Arena, Slot
from gyre_daemon.order.steps import StripPlan
from gyre_daemon.runtime.fair import FairExecutor, Flow
from gyre_daemon.storage.base import NextUse, Reads
from gyre_daemon.storage.delays import Delays
from gyre_daemon.storage.local.local import LocalStorage

_Integers = npt.NDArray[np.int64]
_Columns = tuple[_Integers, _Integers, _Integers, _Integers]  # start, size, target, sample


@dataclass(frozen=True, slots=True)
class Fetch:
    """A strip of batches that is laid out and not yet read.

    Attributes:
        plan: its samples.
        extents: where they lie in storage, batch after batch.
        layout: where they go.
    """

    plan: StripPlan
    extents: Extents
    layout: StripLayout

    def part(self, begin: int, end: int) -> "Fetch":
        """Some of the batches; they go where they go in the whole."""
        size = self.plan.sample_ids.shape[1]
        extents = self.extents.part(slice(begin * size, end * size))
        return Fetch(self.plan[begin:end], extents, self.layout.part(begin, end))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Strip:
    """Successive steps' batches, whole and never changed again.

    Attributes:
        plan: which samples they have.
        layout: where they lie.
        slot: the memory.
    """

    plan: StripPlan
    layout: StripLayout
    slot: Slot

    def part(self, steps: range) -> "Strip":
        """Some of the batches, where they are."""
        if len(steps) == len(self.plan):
            return self
        begin, end = steps.start - self.plan.first_step, steps.stop - self.plan.first_step
        return Strip(self.plan[begin:end], self.layout.part(begin, end), self.slot)

    @property
    def num_bytes(self) -> int:
        """Of all its batches, without what lies between them."""
        return sum(batch.num_bytes for batch in self.layout.batches)

    @property
    def payloads(self) -> list[memoryview]:
        """Each batch's bytes."""
        pairs = zip(self.layout.batches, self.layout.offsets.tolist(), strict=True)
        return [self.slot.memory[offset : offset + batch.num_bytes] for batch, offset in pairs]


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a cache may know of a job's future: see `Reads`."""

    block_bytes: int = 0
    next_use: NextUse | None = None


NOTHING_AHEAD = Ahead()


@dataclass(frozen=True, slots=True)
class _Bulk:
    """Some or all samples of a strip, seen as one long batch of n samples.

    Attributes:
        sample_ids: int64 [n].
        slot: where they go.
        shard: int64 [n].
        start: int64 [n, F], of the stored bytes.
        stored: int64 [n, F], their sizes.
        place: int64 [n, F], addresses of the samples' places.
        placed: int64 [n, F], the sizes of the places.
        absent: bool [n, F], which samples lack which fields; None where none may.
    """

    sample_ids: _Integers
    slot: Slot
    shard: _Integers
    start: _Integers
    stored: _Integers
    place: _Integers
    placed: _Integers
    absent: npt.NDArray[np.bool_] | None

    @classmethod
    def of(cls, fetch: Fetch, slot: Slot, some: slice) -> "_Bulk":
        places, extents = fetch.layout.places[some], fetch.extents.part(some)
        sample_ids, addresses = fetch.plan.sample_ids.reshape(-1)[some], places[:, :, 0] + slot.address
        sizes = places[:, :, 1] - places[:, :, 0]
        return cls(sample_ids, slot, extents.shard, extents.start, extents.size, addresses, sizes, extents.absent)

    def lack(self, column: int) -> npt.NDArray[np.bool_] | None:
        """Which samples lack a field, bool [n]; None where none does."""
        if self.absent is None or not self.absent[:, column].any():
            return None
        return self.absent[:, column]

    def begins(self, column: int) -> list[int]:
        """Where the places of a field begin in the slot."""
        begins: list[int] = (self.place[:, column] - self.slot.address).tolist()
        return begins

    def clear_lacking(self, column: int, lacking: npt.NDArray[np.bool_]) -> None:
        """Zeros for samples that lack a field."""
        begins, sizes = self.begins(column), self.placed[:, column].tolist()
        for sample in np.flatnonzero(lacking).tolist():
            self.slot.memory[begins[sample] : begins[sample] + sizes[sample]] = bytes(sizes[sample])


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory for the stored bytes of one field that are no part of its tensor.

    Attributes:
        memory: uint8.
        ends: int64 [n + 1], sample i has `[ends[i], ends[i + 1])` of it.
    """

    memory: npt.NDArray[np.uint8]
    ends: _Integers


_NO_MEMORY = np.empty(0, np.uint8)

_Placed = tuple[_Bulk, list[_Scratch]]


class Fetcher:
    """Fills batch buffers from one dataset."""

    def __init__(self, dataset: Dataset, workers: FairExecutor) -> None:
        self._dataset = dataset
        self._workers = workers
        stored = stored_fields(dataset.fields)
        self._codecs = [CODECS[spec.codec] for spec in stored]
        self._known = [spec.name for spec in known_fields(dataset.fields)]
        self._finishes = any(CODECS[spec.codec].finishes or spec.codec == "ids" for spec in stored)
        self._layouts = LayoutMaker(dataset.fields)

    def prepare(self, plan: StripPlan, num_together: int) -> list[Fetch]:
        """Lay out batches, in strips of so many: arithmetic on the index, no I/O."""
        extents = self._dataset.index.locate(plan.sample_ids.reshape(-1))
        size, fetches = plan.sample_ids.shape[1], []
        for begin in range(0, len(plan), num_together):
            some = plan[begin : begin + num_together]
            its = extents.part(slice(begin * size, (begin + len(some)) * size))
            fetches.append(Fetch(some, its, self._layouts.make(some, its.served)))
        return fetches

    async def fill(
        self, fetch: Fetch, slot: Slot, flow: Flow, ahead: Ahead = NOTHING_AHEAD, delays: Delays | None = None
    ) -> Strip:
        """Read a strip into its slot; it is the same bytes whatever the order in which its samples arrive.

        Args:
            fetch: from `prepare`.
            slot: at least `fetch.layout.num_bytes` long; the caller holds a lease of its arena.
            flow: the job for which it is done; earlier steps are more urgent.
            ahead: what the job will read after these.
            delays: told what it took.

        Raises:
            CorruptSample: names shard, sample, offset and reason.
            ShardMissing, NotAllowed, StorageUnavailable: from the storage, maybe as the first member of an exception group.
        """
        delays = delays or Delays()
        began = time.monotonic()
        placed = await self._read(fetch, slot, flow, ahead, delays)
        read = time.monotonic()
        delays.read_s += read - began
        if delays.num_requests:
            delays.storage_s = delays.read_s
        if self._finishes:
            finish = partial(self._finish, placed)
            work = partial(_while_leased, slot.arena, finish)
            await self._workers.run(flow, fetch.layout.num_bytes, fetch.plan.first_step, work)
            delays.finish_s += time.monotonic() - read
        return Strip(fetch.plan, fetch.layout, slot)

    async def _read(self, fetch: Fetch, slot: Slot, flow: Flow, ahead: Ahead, delays: Delays) -> Sequence[_Placed]:
        """Read all stored bytes; of local files, threads work out for themselves where they are."""
        storage, urgency = self._dataset.storage, fetch.plan.first_step
        placed: list[_Placed] = []
        if isinstance(storage, LocalStorage):
            cuts = itertools.pairwise(storage.cuts(fetch.plan.sample_ids.size, fetch.layout.num_bytes))
            makes = [partial(self._make_reads, fetch, slot, slice(*cut), placed) for cut in cuts]
            delays.storage_s += await storage.read_made(makes, flow, fetch.layout.num_bytes, urgency, slot.arena.lease)
        else:
            reads = self._make_reads(fetch, slot, slice(None), placed)
            told = replace(
                reads, flow=flow, urgency=urgency, block_bytes=ahead.block_bytes, next_use=ahead.next_use, delays=delays
            )
            await storage.read(told)
        return placed

    def _make_reads(self, fetch: Fetch, slot: Slot, some: slice, placed: list[_Placed]) -> Reads:
        """Of some samples; with the first of them goes what a strip has beside its samples."""
        if not some.start:
            known = dict(zip(self._known, fetch.extents.known, strict=True))
            write_own_tensors(fetch.plan, fetch.layout, slot.memory, known)
        bulk = _Bulk.of(fetch, slot, some)
        reads, scratches = self._place(bulk)
        placed.append((bulk, scratches))
        return reads

    def _place(self, bulk: _Bulk) -> tuple[Reads, list[_Scratch]]:
        """The reads: of each field, first what goes to scratch memory, then what goes to its place."""
        pieces: list[_Columns] = []
        scratches: list[_Scratch] = []
        everyone = np.arange(len(bulk.start))
        for column, codec in enumerate(self._codecs):
            start, stored, placed = bulk.start[:, column], bulk.stored[:, column], bulk.placed[:, column]
            misfits, lacking = codec.misfits(stored, placed), bulk.lack(column)
            if lacking is not None:
                misfits &= ~lacking
                bulk.clear_lacking(column, lacking)
            if misfits.any():
                first = int(np.argmax(misfits))
                raise self._corrupt(
                    bulk, first, column, f"{stored[first]} bytes are no {self._dataset.fields[column].codec} here"
                )
            if not codec.uses_scratch:
                scratches.append(_Scratch(_NO_MEMORY, np.zeros(len(stored) + 1, np.int64)))
                if stored.any():
                    pieces.append((start, stored, bulk.place[:, column], everyone))
                continue
            before = codec.scratch_bytes(stored, placed)
            if lacking is not None:
                before = np.where(lacking, 0, before)
            ends = np.concatenate(([0], np.cumsum(before)))
            scratch = _Scratch(np.empty(int(ends[-1]), np.uint8), ends)
            scratches.append(scratch)
            after = stored - before
            if ends[-1]:
                pieces.append((start, before, ends[:-1] + scratch.memory.ctypes.data, everyone))
            if after.any():
                pieces.append((start + before, after, bulk.place[:, column], everyone))
        start, size, target, sample = _in_order(pieces)
        memory = tuple(scratch.memory for scratch in scratches if len(scratch.memory))
        shard = bulk.shard if sample is everyone else bulk.shard[sample]
        return Reads(shard, start, size, target.view(np.uint64), sample, memory, arena=bulk.slot.arena), scratches

    def _finish(self, placed: Sequence[_Placed]) -> None:
        for bulk, scratches in placed:
            for column, (codec, scratch) in enumerate(zip(self._codecs, scratches, strict=True)):
                if codec.finishes:
                    self._finish_column(bulk, column, scratch)
                elif self._dataset.fields[column].codec == "ids":
                    self._check_ids(bulk, column)

    def _finish_column(self, bulk: _Bulk, column: int, scratch: _Scratch) -> None:
        codec, spec = self._codecs[column], self._dataset.fields[column]
        memory, ends = scratch.memory.data, scratch.ends.tolist()
        lacking = bulk.lack(column)
        for sample, (begin, size) in enumerate(zip(bulk.begins(column), bulk.placed[:, column].tolist(), strict=True)):
            if lacking is not None and lacking[sample]:
                continue
            try:
                codec.finish(spec, memory[ends[sample] : ends[sample + 1]], bulk.slot.memory[begin : begin + size])
            except ValueError as error:
                raise self._corrupt(bulk, sample, column, str(error)) from error

    def _check_ids(self, bulk: _Bulk, column: int) -> None:
        """Where places follow each other, as those of a batch do, their ids are looked at together."""
        spec, size = self._dataset.fields[column], int(bulk.placed[0, column])
        begins = bulk.place[:, column] - bulk.slot.address
        runs = [0, *(np.flatnonzero(np.diff(begins) != size) + 1).tolist(), len(begins)]
        for first, stop in itertools.pairwise(runs):
            begin, end = int(begins[first]), int(begins[stop - 1]) + size
            unknown = first_unknown_id(spec, bulk.slot.memory[begin:end])
            if unknown is not None:
                row, position = divmod(unknown, size // spec.dtype.itemsize)
                value = np.frombuffer(bulk.slot.memory[begin:end], spec.dtype)[unknown]
                reason = f"id {value} at position {position} is outside the vocabulary of {spec.vocabulary} ids"
                raise self._corrupt(bulk, first + row, column, reason)

    def _corrupt(self, bulk: _Bulk, sample: int, column: int, reason: str) -> CorruptSample:
        sample_id, offset = int(bulk.sample_ids[sample]), int(bulk.start[sample, column])
        shard = self._dataset.storage.shards[int(bulk.shard[sample])].name
        return CorruptSample(
            f"sample {sample_id} of dataset `{self._dataset.name}` (shard {shard}, byte {offset}) is corrupt: field "
            f"{self._dataset.fields[column].name}: {reason}",
            {"dataset": self._dataset.name, "shard": shard, "sample_id": sample_id, "offset": offset, "reason": reason},
        )


def _while_leased(arena: Arena, compute: Callable[[], None]) -> None:
    """In a thread, which goes on where nobody waits for it any more."""
    with arena.lease():
        compute()


def _in_order(pieces: Sequence[_Columns]) -> _Columns:
    """Starts, sizes, targets and samples, joined: the reads of a sample after each other by their starts, none empty."""
    if len(pieces) == 1:
        return pieces[0]
    nothing = np.empty(0, np.int64)
    start, size, target, sample = (np.concatenate([nothing, *(piece[part] for piece in pieces)]) for part in range(4))
    order = np.lexsort((start, sample))
    order = order[size[order] > 0]
    return start[order], size[order], target[order], sample[order]
