"""Fetch unordered, place ordered: all reads of a batch are in flight at once, and each lands in its own place.

Reading waits on the event loop, checking and decoding compute in threads, and this file is the one place that decides which.
There is no object per sample: a batch's reads are arrays, and only fields that must be checked or converted are looked at one
by one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from gyre_daemon.arena import Slot
from gyre_daemon.batch import BatchLayout, LayoutMaker, write_own_tensors
from gyre_daemon.dataset import Dataset
from gyre_daemon.errors import CorruptSample
from gyre_daemon.fair import FairExecutor, Flow
from gyre_daemon.formats import Extents
from gyre_daemon.plan import BatchPlan
from gyre_daemon.storage import Delays, NextUse, Reads
from gyre_daemon.transform import CODECS

_Integers = npt.NDArray[np.int64]
_Columns = tuple[_Integers, _Integers, _Integers, _Integers]  # start, size, target, sample


@dataclass(frozen=True, slots=True)
class Fetch:
    """A batch that is laid out and not yet read.

    Attributes:
        plan: its samples.
        extents: where they lie in storage.
        layout: where they go.
    """

    plan: BatchPlan
    extents: Extents
    layout: BatchLayout


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's batch, whole and never changed again.

    Attributes:
        plan: which samples it has.
        layout: where they lie.
        slot: the memory, of which the first `layout.num_bytes` are the batch.
    """

    plan: BatchPlan
    layout: BatchLayout
    slot: Slot

    @property
    def payload(self) -> memoryview:
        """The batch's bytes."""
        return self.slot.memory[: self.layout.num_bytes]


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a cache may know of a job's future: see `Reads`."""

    block_bytes: int = 0
    next_use: NextUse | None = None


NOTHING_AHEAD = Ahead()


@dataclass(frozen=True, slots=True)
class _Bulk:
    """Batches that are filled together, seen as one long batch of n samples.

    Attributes:
        fetches: the batches, each with its slot.
        shard: int64 [n].
        start: int64 [n, F], of the stored bytes.
        stored: int64 [n, F], their sizes.
        place: int64 [n, F], addresses of the samples' places.
        placed: int64 [n, F], the sizes of the places.
    """

    fetches: Sequence[tuple[Fetch, Slot]]
    shard: _Integers
    start: _Integers
    stored: _Integers
    place: _Integers
    placed: _Integers

    @classmethod
    def of(cls, fetches: Sequence[tuple[Fetch, Slot]]) -> "_Bulk":
        addresses = np.repeat([slot.address for _, slot in fetches], [len(fetch.plan.sample_ids) for fetch, _ in fetches])
        places = np.concatenate([fetch.layout.places for fetch, _ in fetches])
        extents = [fetch.extents for fetch, _ in fetches]
        return cls(
            fetches,
            np.concatenate([each.shard for each in extents]),
            np.concatenate([each.start for each in extents]),
            np.concatenate([each.size for each in extents]),
            places[:, :, 0] + addresses[:, None],
            places[:, :, 1] - places[:, :, 0],
        )


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory for the stored bytes of one field that are no part of its tensor.

    Attributes:
        memory: uint8.
        ends: int64 [n + 1], sample i has `[ends[i], ends[i + 1])` of it.
    """

    memory: npt.NDArray[np.uint8]
    ends: _Integers


class Fetcher:
    """Fills batch buffers from one dataset."""

    def __init__(self, dataset: Dataset, workers: FairExecutor) -> None:
        self._dataset = dataset
        self._workers = workers
        self._codecs = [CODECS[spec.codec] for spec in dataset.fields]
        self._finishes = any(codec.finishes for codec in self._codecs)
        self._layouts = LayoutMaker(dataset.fields)

    def prepare(self, plans: Sequence[BatchPlan]) -> list[Fetch]:
        """Lay out batches: arithmetic on the index, no I/O."""
        all_extents = self._dataset.index.locate(np.concatenate([plan.sample_ids for plan in plans]))
        fetches, begin = [], 0
        for plan in plans:
            end = begin + len(plan.sample_ids)
            extents = Extents(all_extents.shard[begin:end], all_extents.start[begin:end], all_extents.size[begin:end])
            fetches.append(Fetch(plan, extents, self._layouts.make(plan, extents.size)))
            begin = end
        return fetches

    async def fill(
        self, fetches: Sequence[tuple[Fetch, Slot]], flow: Flow, ahead: Ahead = NOTHING_AHEAD, delays: Delays | None = None
    ) -> list[Batch]:
        """Read batches into their slots; a batch is the same bytes whatever the order in which its samples arrive.

        Args:
            fetches: from `prepare`, each with a slot at least `layout.num_bytes` long, which the caller keeps.
            flow: the job for which it is done; earlier steps are more urgent.
            ahead: what the job will read after these.
            delays: told what it took.

        Raises:
            CorruptSample: names shard, sample, offset and reason.
            ShardMissing, NotAllowed, StorageUnavailable: from the storage, maybe as the first member of an exception group.
        """
        for fetch, slot in fetches:
            write_own_tensors(fetch.plan, fetch.layout, slot.memory)
        bulk = _Bulk.of(fetches)
        reads, scratches = self._place(bulk)
        urgency = fetches[0][0].plan.step
        delays = delays or Delays()
        reads = replace(
            reads, flow=flow, urgency=urgency, block_bytes=ahead.block_bytes, next_use=ahead.next_use, delays=delays
        )
        began = time.monotonic()
        await self._dataset.storage.read(reads)
        read = time.monotonic()
        delays.read_s += read - began
        if self._finishes:
            num_bytes = sum(fetch.layout.num_bytes for fetch, _ in fetches)
            await self._workers.run(flow, num_bytes, urgency, partial(self._finish, bulk, scratches))
            delays.finish_s += time.monotonic() - read
        return [Batch(fetch.plan, fetch.layout, slot) for fetch, slot in fetches]

    def _place(self, bulk: _Bulk) -> tuple[Reads, list[_Scratch]]:
        """The reads: of each field, first what goes to scratch memory, then what goes to its place."""
        pieces: list[_Columns] = []
        scratches: list[_Scratch] = []
        everyone = np.arange(len(bulk.shard))
        for column, codec in enumerate(self._codecs):
            start, stored, placed = bulk.start[:, column], bulk.stored[:, column], bulk.placed[:, column]
            misfits = codec.misfits(stored, placed)
            if misfits.any():
                first = int(np.argmax(misfits))
                raise self._corrupt(
                    bulk, first, column, f"{stored[first]} bytes are no {self._dataset.fields[column].codec} here"
                )
            before = codec.scratch_bytes(stored, placed)
            ends = np.concatenate(([0], np.cumsum(before)))
            scratch = _Scratch(np.empty(int(ends[-1]), np.uint8), ends)
            scratches.append(scratch)
            after = stored - before
            if ends[-1]:
                pieces.append((start, before, ends[:-1] + scratch.memory.ctypes.data, everyone))
            if after.any():
                pieces.append((start + before, after, bulk.place[:, column], everyone))
        start, size, target, sample = _in_order(pieces)
        memory = (*(slot.memory for _, slot in bulk.fetches), *(scratch.memory for scratch in scratches))
        return Reads(bulk.shard[sample], start, size, target.astype(np.uint64), sample, memory), scratches

    def _finish(self, bulk: _Bulk, scratches: Sequence[_Scratch]) -> None:
        for column, codec in enumerate(self._codecs):
            if not codec.finishes:
                continue
            spec, scratch = self._dataset.fields[column], scratches[column]
            memory, ends = scratch.memory.data, scratch.ends.tolist()
            sample = 0
            for fetch, slot in bulk.fetches:
                for begin, end in fetch.layout.places[:, column].tolist():
                    try:
                        codec.finish(spec, memory[ends[sample] : ends[sample + 1]], slot.memory[begin:end])
                    except ValueError as error:
                        raise self._corrupt(bulk, sample, column, str(error)) from error
                    sample += 1

    def _corrupt(self, bulk: _Bulk, sample: int, column: int, reason: str) -> CorruptSample:
        sample_id = int(np.concatenate([fetch.plan.sample_ids for fetch, _ in bulk.fetches])[sample])
        shard, offset = self._dataset.storage.shards[int(bulk.shard[sample])].name, int(bulk.start[sample, column])
        return CorruptSample(
            f"sample {sample_id} of dataset `{self._dataset.name}` (shard {shard}, byte {offset}) is corrupt: field "
            f"{self._dataset.fields[column].name}: {reason}",
            {"dataset": self._dataset.name, "shard": shard, "sample_id": sample_id, "offset": offset, "reason": reason},
        )


def _in_order(pieces: Sequence[_Columns]) -> _Columns:
    """Starts, sizes, targets and samples, joined: the reads of a sample after each other by their starts, none empty."""
    if len(pieces) == 1:
        return pieces[0]
    nothing = np.empty(0, np.int64)
    start, size, target, sample = (np.concatenate([nothing, *(piece[part] for piece in pieces)]) for part in range(4))
    order = np.lexsort((start, sample))
    order = order[size[order] > 0]
    return start[order], size[order], target[order], sample[order]
