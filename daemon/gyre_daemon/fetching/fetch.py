"""Reads the samples of batch groups into slots, in whatever order their bytes arrive.

All reads of a batch group are in flight at once, and each lands in its own place of the slot.

Reads wait on the event loop; checks and decoding run in threads. This module alone decides where
each of these runs. There is no object per sample: the reads of a batch group are arrays, and only
fields that must be checked or converted are visited one by one.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.codecs import first_unknown_id, unknown_id
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import indexed_fields, stored_fields
from gyre_daemon.errors import CorruptSample
from gyre_daemon.fetching.batch_group import NOTHING_AHEAD, Ahead, Fetch, Place, packed_fetches
from gyre_daemon.fetching.layout import GroupLayout, LayoutMaker, write_own_tensors
from gyre_daemon.fetching.packed import locate_packed, write_packed
from gyre_daemon.fetching.samples import Samples, Scratch, StoredField
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.fair import Claims, FairExecutor, Flow
from gyre_daemon.storage.base import Draws, Reads
from gyre_daemon.storage.delays import Delays

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
        size, fetches = plan.sample_ids.shape[1], []
        extents = self._dataset.index.locate(plan.sample_ids.reshape(-1))
        for begin in range(0, len(plan), num_together):
            some = plan[begin : begin + num_together]
            its = extents.part(slice(begin * size, (begin + len(some)) * size))
            fetches.append(Fetch(some, its, self._layouts.make(some, its.tensor_bytes)))
        return fetches

    async def fill(
        self,
        fetch: Fetch,
        slot: Place,
        flow: Flow,
        ahead: Ahead = NOTHING_AHEAD,
        delays: Delays | None = None,
    ) -> GroupLayout:
        """Read a batch group into its slot.

        The bytes are the same in whatever order the samples arrive.

        Args:
            fetch: a batch group that `prepare` has laid out.
            slot: at least `fetch.layout.num_bytes` long; the caller holds a lease of its arena.
            flow: the job that reads; its earlier steps are more urgent.
            ahead: later reads of the job, for the cache.
            delays: records how long each part of the work took.

        Returns:
            Where the batches lie.

        Raises:
            CorruptSample: names shard, sample, offset and reason.
            ShardMissing, NotAllowed, StorageUnavailable: from the storage, possibly as the first
                member of an exception group.
        """
        claims = Claims(flow, fetch.plan.first_step)
        await self.fill_for(claims, fetch, slot, ahead, delays or Delays())
        return fetch.layout

    async def fill_for(
        self,
        claims: Claims,
        fetch: Fetch,
        slot: Place,
        ahead: Ahead,
        delays: Delays,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """The same, at the first turns of the jobs that need it; more may come to need it.

        Args:
            claims: the jobs.
            fetch: as for `fill`.
            slot: as for `fill`.
            ahead: as for `fill`.
            delays: as for `fill`.
            arrived: called with the number of each sample of the group once its bytes are there;
                only while `is_arriving`. A read for each sample costs the event loop some 0.1 ms.
        """
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
        self, fetch: Fetch, slot: Place, parts: Sequence[tuple[Samples, list[Scratch]]]
    ) -> None:
        """Check and decode; runs in a thread, which continues if the caller is cancelled."""
        with slot.arena.lease():
            if (packed := self._dataset.packed) and fetch.rows:
                write_packed(packed, fetch.rows, fetch.plan, fetch.layout, slot.memory)
            for samples, scratches in parts:
                for column, (field, scratch) in enumerate(zip(self.stored, scratches, strict=True)):
                    if self._specs[column].codec == "ids":
                        self._check_ids(samples, column)
                    elif field.finishes:
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
        (_, codec), *others = field.forms
        if codec.check_all is None or others or samples.lacking(column) is not None:
            return False
        begins = samples.target[:, column] - samples.slot.address
        ends = begins + samples.reserved[:, column]
        try:
            for first, stop in _runs(begins, ends):
                begin, end = int(begins[first]), int(ends[stop - 1])
                codec.check_all(samples.slot.memory[begin:end], begins[first:stop] - begin)
        except ValueError:
            return False  # one by one, so that the error names the sample
        return True

    def _check_ids(self, samples: Samples, column: int) -> None:
        """Check token ids against the vocabulary, adjacent samples of a batch at once."""
        spec, memory = self._specs[column], samples.slot.memory
        offsets, sizes = np.array(samples.offsets(column)), samples.reserved[:, column]
        ends = offsets + sizes
        for first, stop in _runs(offsets, ends):
            begin, end = int(offsets[first]), int(ends[stop - 1])
            unknown = first_unknown_id(spec, memory[begin:end])
            if unknown is not None:
                place = begin + unknown * spec.dtype.itemsize
                sample = first + int(np.searchsorted(ends[first:stop], place, side="right"))
                position = (place - int(offsets[sample])) // spec.dtype.itemsize
                its = memory[int(offsets[sample]) : int(ends[sample])]
                raise self.corrupt(samples, sample, column, unknown_id(spec, its, position))

    def corrupt(self, samples: Samples, sample: int, column: int, reason: str) -> CorruptSample:
        """The error for one field of one sample."""
        dataset, spec = self._dataset, self._specs[column]
        sample_id, start = int(samples.sample_ids[sample]), int(samples.start[sample, column])
        shard, offset = dataset.storage.shards[int(samples.shard[sample])].place_of(start)
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
        num_bytes = samples.stored[sample, column]
        spec, _ = list(self.stored[column].of_each(samples))[sample]
        return self.corrupt(
            samples, sample, column, f"its {num_bytes} bytes cannot be read as {spec.codec}"
        )


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
        slot: Place,
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

        The part with the first sample also writes the tensors that are not read from storage, such
        as `sample_id`; packed sequences get theirs at last, in a thread.
        """
        fetch = self._fetch
        if not which.start and fetch.rows is None:
            names = self._fetcher.indexed_names
            indexed = dict(zip(names, fetch.extents.indexed, strict=True))
            write_own_tensors(fetch.plan, fetch.layout, self._slot.memory, indexed)
        samples = Samples.of(fetch.ids, fetch.extents, fetch.layout, self._slot, which)
        pieces: list[_Columns] = []
        everyone = np.arange(len(samples.shard))
        scratches = [
            self._add_reads(samples, column, everyone, pieces)
            for column in range(len(self._fetcher.stored))
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
            self._claims,
            self._draws_of(which, sample),
        )

    def _draws_of(self, which: slice, sample: _Integers) -> Draws | None:
        """The seed and epoch of each read, where bytes depend on them."""
        if not self._fetcher.is_drawn:
            return None
        draws = self._fetch.draws or Draws.first(len(self))
        return draws.part(which).part(sample)

    def _add_reads(
        self, samples: Samples, column: int, everyone: _Integers, pieces: list[_Columns]
    ) -> Scratch:
        """Append the reads of one field: those into scratch memory, then those into the slot."""
        field = self._fetcher.stored[column]
        start, stored = samples.start[:, column], samples.stored[:, column]
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
