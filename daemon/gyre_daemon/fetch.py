"""Fetch unordered, place ordered: all reads of a batch are in flight at once, and each lands in its own place.

Reading waits on the event loop, checking and decoding compute in threads, and this file is the one place that decides which.
There is no object per sample: a batch's reads are arrays, and only fields that must be checked or converted are looked at one
by one.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.arena import Slot
from gyre_daemon.batch import BatchLayout, LayoutMaker, write_own_tensors
from gyre_daemon.dataset import Dataset
from gyre_daemon.errors import CorruptSample
from gyre_daemon.formats import Extents
from gyre_daemon.plan import BatchPlan
from gyre_daemon.storage import Reads
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
class _Scratch:
    """Memory for the stored bytes of one field that are no part of its tensor.

    Attributes:
        memory: uint8.
        ends: int64 [B + 1], sample i has `[ends[i], ends[i + 1])` of it.
    """

    memory: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]


class Fetcher:
    """Fills batch buffers from one dataset."""

    def __init__(self, dataset: Dataset, executor: Executor) -> None:
        self._dataset = dataset
        self._executor = executor
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

    async def fill(self, fetches: Sequence[tuple[Fetch, Slot]]) -> list[Batch]:
        """Read batches into their slots; a batch is the same bytes whatever the order in which its samples arrive.

        Args:
            fetches: from `prepare`, each with a slot at least `layout.num_bytes` long, which the caller keeps.

        Raises:
            CorruptSample: names shard, sample, offset and reason.
            ShardMissing, NotAllowed, StorageUnavailable: from the storage, maybe as the first member of an exception group.
        """
        reads: list[Reads] = []
        scratches: list[list[_Scratch]] = []
        for fetch, slot in fetches:
            write_own_tensors(fetch.plan, fetch.layout, slot.memory)
            placed, scratch = self._place(fetch, slot)
            reads.append(placed)
            scratches.append(scratch)
        await self._dataset.storage.read(reads[0] if len(reads) == 1 else Reads.concatenate(reads))
        if self._finishes:
            loop = asyncio.get_running_loop()
            for (fetch, slot), scratch in zip(fetches, scratches, strict=True):
                await loop.run_in_executor(self._executor, self._finish, fetch, slot, scratch)
        return [Batch(fetch.plan, fetch.layout, slot) for fetch, slot in fetches]

    def _place(self, fetch: Fetch, slot: Slot) -> tuple[Reads, list[_Scratch]]:
        """The reads of a batch: of each field, first what goes to scratch memory, then what goes to its place."""
        places, stored = fetch.layout.places, fetch.extents.size
        pieces: list[_Columns] = []
        scratches: list[_Scratch] = []
        everyone = np.arange(len(stored))
        for column, codec in enumerate(self._codecs):
            placed = places[:, column, 1] - places[:, column, 0]
            misfits = codec.misfits(stored[:, column], placed)
            if misfits.any():
                first = int(np.argmax(misfits))
                reason = f"{stored[first, column]} bytes are no {self._dataset.fields[column].codec} of this dataset"
                raise self._corrupt(fetch, first, column, reason)
            before = codec.scratch_bytes(stored[:, column], placed)
            ends = np.concatenate(([0], np.cumsum(before)))
            scratch = _Scratch(np.empty(int(ends[-1]), np.uint8), ends)
            scratches.append(scratch)
            start, after = fetch.extents.start[:, column], stored[:, column] - before
            if ends[-1]:
                pieces.append((start, before, ends[:-1] + scratch.memory.ctypes.data, everyone))
            if after.any():
                pieces.append((start + before, after, places[:, column, 0] + slot.address, everyone))
        start, size, target, sample = _in_order(pieces)
        memory = (slot.memory, *(scratch.memory for scratch in scratches))
        return Reads(fetch.extents.shard[sample], start, size, target.astype(np.uint64), sample, memory), scratches

    def _finish(self, fetch: Fetch, slot: Slot, scratches: Sequence[_Scratch]) -> None:
        for column, codec in enumerate(self._codecs):
            if not codec.finishes:
                continue
            spec, scratch = self._dataset.fields[column], scratches[column]
            memory, ends = scratch.memory.data, scratch.ends.tolist()
            for sample, (begin, end) in enumerate(fetch.layout.places[:, column].tolist()):
                try:
                    codec.finish(spec, memory[ends[sample] : ends[sample + 1]], slot.memory[begin:end])
                except ValueError as error:
                    raise self._corrupt(fetch, sample, column, str(error)) from error

    def _corrupt(self, fetch: Fetch, sample: int, column: int, reason: str) -> CorruptSample:
        shard = self._dataset.storage.shards[int(fetch.extents.shard[sample])].name
        sample_id, offset = int(fetch.plan.sample_ids[sample]), int(fetch.extents.start[sample, column])
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
