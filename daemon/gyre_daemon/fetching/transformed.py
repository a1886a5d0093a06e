"""Reads batch groups whose samples are transformed before they lie in the slot.

A batch group is cut into portions of consecutive samples, or of the documents of packed sequences.
The portions are read and transformed beside each other, and a thread copies each result,
and the fields that pass, into the slot.

Lengths that were not measured are known when all is made. Until then each sample has room for the
longest one; then the gaps are closed, so the batch is the same as with measured lengths.
"""

import asyncio
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.formats import Extents, indexed_fields, stored_fields
from gyre_daemon.fetching.fetch import NOTHING_AHEAD, Ahead, Fetch, Place, packed_fetches
from gyre_daemon.fetching.layout import (
    GroupLayout,
    LayoutMaker,
    rows_of,
    write_own_tensors,
    write_packed,
)
from gyre_daemon.fetching.portions import PortionPlan, PortionReader, ReadPortion, Staging
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.threads import Claims, FairExecutor
from gyre_daemon.storage.base import Delays, Draws
from gyre_daemon.transforms.declared import TransformedDataset

_Bytes = npt.NDArray[np.uint8]


class _Into(Struct, frozen=True):
    """Where a portion goes.

    Attributes:
        fetch: the batch group.
        begin: the portion's first sample, counted over the batches of the group.
        slot: of the group.
        told: int64 [n, R], gets the elements of each ragged output field, where these were
            not measured.
    """

    fetch: Fetch
    begin: int
    slot: Place
    told: Int64Array


class TransformingFetcher:
    """Fills slots with batches of a dataset whose samples are transformed; see `Fetcher`."""

    def __init__(
        self,
        dataset: TransformedDataset,
        threads: FairExecutor,
    ) -> None:
        """Read nothing yet.

        Args:
            dataset: its samples are read.
            threads: the daemon's.
        """
        self._dataset, self._threads = dataset, threads
        self._portions = PortionReader(dataset, threads)
        self._layouts = LayoutMaker(dataset.served)
        stored = [spec.name for spec in stored_fields(dataset.source.fields)]
        # those of documents, where they are packed
        own = [spec.name for spec in stored_fields(dataset.chosen or ())]
        # the columns of the stored fields that pass, as they are in the slot and in the source
        self._passed = [
            (column, stored.index(name))
            for column, name in enumerate(own)
            if column >= len(dataset.made)
        ]
        self._indexed = [spec.name for spec in indexed_fields(dataset.source.fields)]
        # the columns of made ragged fields, and the bytes of an element
        self._ragged = [
            (column, spec.element_bytes) for column, spec in enumerate(dataset.made) if spec.ragged
        ]

    def prepare(self, plan: GroupPlan, num_together: int) -> list[Fetch]:
        """See `Fetcher.prepare`."""
        if packed := self._dataset.packed:
            rows = rows_of(packed, plan)
            documents = self._dataset.index.locate(rows.documents)
            return packed_fetches(packed, plan, num_together, rows, documents)
        ids, size, fetches = plan.sample_ids.reshape(-1), plan.sample_ids.shape[1], []
        extents = self._dataset.index.locate(ids)
        sizes = self._sizes(self._lengths(ids), extents)
        for begin in range(0, len(plan), num_together):
            some = plan[begin : begin + num_together]
            which = slice(begin * size, (begin + len(some)) * size)
            layout = self._layouts.make(some, sizes[which])
            fetches.append(Fetch(some, extents.part(which), layout))
        return fetches

    def _lengths(self, ids: Int64Array) -> Int64Array:
        """Int64 [n, R], the elements of the ragged output fields."""
        if self._dataset.measured:
            return self._dataset.measured.lengths[ids].astype(np.int64)
        return np.empty((len(ids), 0), np.int64)

    def _sizes(self, lengths: Int64Array, extents: Extents) -> Int64Array:
        """Int64 [n, F], the bytes of the ragged fields, of those that are made and of others."""
        sizes = np.zeros((len(lengths), len(self._dataset.made) + len(self._passed)), np.int64)
        if lengths.shape[1]:
            for number, (column, element_bytes) in enumerate(self._ragged):
                sizes[:, column] = lengths[:, number] * element_bytes
        for column, stored in self._passed:
            sizes[:, column] = extents.tensor_bytes[:, stored]
        return sizes

    async def read_unmeasured(self, plan: GroupPlan, claims: Claims) -> tuple[Fetch, _Bytes]:
        """Read and transform a batch of samples whose lengths are not known before.

        A worker makes the samples and says how long each is. Those without room in the exchange
        are made again, with their lengths known.

        Args:
            plan: one batch, no larger than a portion.
            claims: the job that reads.

        Returns:
            The batch as it is laid out, and its bytes.

        Raises:
            CorruptSample: as `fill`.
            Overloaded: as `fill`.
        """
        ids = plan.sample_ids.reshape(-1)
        extents, draws = self._dataset.index.locate(ids), Draws.first(len(ids))
        whole = PortionPlan(ids, draws, extents, plan.first_step, None, keeps=True)
        async with self._portions.read(whole, claims, NOTHING_AHEAD, Delays()) as portion:
            lengths, num_kept = await self._portions.measure(portion, claims)
            layout = self._layouts.make(plan, self._sizes(lengths, extents))
            fetch = Fetch(plan, extents, layout)
            memory = np.empty(layout.num_bytes, np.uint8)
            copy = partial(self._copy_kept, portion, fetch, memory, lengths, num_kept)
            num_copied = await self._threads.run_of(claims, portion.request.start, copy)
        place, rest = Staging.of(memory), slice(num_copied, len(ids))
        for some in self._portions.cut(extents.part(rest), lengths[rest]):
            its = slice(num_copied + some.start, num_copied + some.stop)
            args = ids[its], draws.part(its), extents.part(its), plan.first_step, lengths[its]
            left, begin = PortionPlan(*args), its.start
            into = _Into(fetch, begin, place, lengths[its])
            await self._fill_portion(claims, left, into, NOTHING_AHEAD, Delays())
        self._write_own(fetch, place, lengths)
        return fetch, memory

    def _copy_kept(
        self,
        portion: ReadPortion,
        fetch: Fetch,
        into: _Bytes,
        lengths: Int64Array,
        num_kept: int,
    ) -> int:
        """Copy the first samples of a portion, out of its room; returns how many lie there."""
        memory, destinations = portion.exchange.memory, fetch.layout.destinations
        made = self._dataset.made
        elements = np.ones((len(lengths), len(made)), np.int64)
        elements[:, [column for column, spec in enumerate(made) if spec.ragged]] = lengths
        sizes = elements * [spec.element_bytes for spec in made]
        ends = portion.room.start + np.cumsum(sizes).reshape(sizes.shape)
        fitting = int(np.searchsorted(ends[:, -1], portion.room.stop, side="right"))
        num = max(0, min(num_kept, fitting))
        if not num:
            return 0
        if len(made) == 1:
            first, stop = destinations[0, 0, 0], destinations[num - 1, 0, 1]
            into[first:stop] = memory[portion.room.start : ends[num - 1, -1]]
        else:
            begins = (ends - sizes)[:num].tolist()
            for row, places in enumerate(destinations[:num, : len(made)].tolist()):
                for (at, end), begin in zip(places, begins[row], strict=True):
                    into[at:end] = memory[begin : begin + end - at]
        stored = portion.staged.destinations
        for column, source in self._passed:
            at, end = stored[0, source, 0], stored[num - 1, source, 1]
            into[destinations[0, column, 0] : destinations[num - 1, column, 1]] = memory[at:end]
        return num

    async def fill(
        self,
        fetch: Fetch,
        slot: Place,
        claims: Claims,
        ahead: Ahead = NOTHING_AHEAD,
        delays: Delays | None = None,
    ) -> GroupLayout:
        """Read and transform a batch group into its slot; see `Fetcher.fill`.

        Raises:
            CorruptSample: names shard, sample, offset, transform and reason.
            Overloaded: no process can be started.
        """
        delays = delays or Delays()
        began = time.monotonic()
        plan, ids = fetch.plan, fetch.ids
        draws = fetch.draws or Draws.first(len(ids))
        lengths = self._lengths(ids)
        told = np.zeros_like(lengths)
        async with asyncio.TaskGroup() as tasks:
            for some in self._portions.cut(fetch.extents, lengths):
                extents = fetch.extents.part(some)
                its, step = draws.part(some), plan.first_step
                part = PortionPlan(ids[some], its, extents, step, lengths[some])
                into = _Into(fetch, some.start, slot, told[some])
                tasks.create_task(self._fill_portion(claims, part, into, ahead, delays))
        work = partial(self._write_own, fetch, slot, told)
        layout = await self._threads.run_of(claims, 0, work)
        if delays.num_requests:
            delays.storage_s = delays.read_s
        delays.finish_s = time.monotonic() - began - delays.read_s
        return layout

    def _write_own(self, fetch: Fetch, slot: Place, told: Int64Array) -> GroupLayout:
        layout = fetch.layout
        with slot.arena.lease():
            if self._dataset.packed and fetch.rows:
                packed = self._dataset.packed
                write_packed(packed, fetch.rows, fetch.plan, layout, slot.memory)
                return layout
            if self._dataset.has_limits:
                layout = self._without_gaps(fetch, slot, told)
            indexed = dict(zip(self._indexed, fetch.extents.indexed, strict=True))
            write_own_tensors(fetch.plan, layout, slot.memory, indexed)
        return layout

    def _without_gaps(self, fetch: Fetch, slot: Place, told: Int64Array) -> GroupLayout:
        """Move samples together if they are shorter than their limits.

        All move to lower addresses, in the order of these, so none overwrites another.

        Args:
            fetch: the batch group.
            slot: has the fields where `fetch.layout` says.
            told: int64 [n, R], the elements of each ragged field that was made.
        """
        before = fetch.layout
        places = before.destinations
        sizes = places[:, :, 1] - places[:, :, 0]
        for number, (column, element_bytes) in enumerate(self._ragged):
            sizes[:, column] = told[:, number] * element_bytes
        layout = GroupLayout.at(before.offsets, self._layouts.make(fetch.plan, sizes).batches)
        moves = np.stack((layout.destinations[:, :, 0], places[:, :, 0], sizes), axis=2)
        into, size = np.frombuffer(slot.memory, np.uint8), fetch.plan.sample_ids.shape[1]
        for first in range(0, len(moves), size):
            of_batch = moves[first : first + size].swapaxes(0, 1)  # one field after the other
            for begin, source, num in of_batch.reshape(-1, 3).tolist():
                into[begin : begin + num] = into[source : source + num]
        return layout

    async def _fill_portion(
        self,
        claims: Claims,
        part: PortionPlan,
        into: "_Into",
        ahead: Ahead,
        delays: Delays,
    ) -> None:
        async with self._portions.transformed(part, claims, ahead, delays) as portion:
            if self._dataset.has_limits:
                into.told[:] = self._portions.lengths_of(portion)
            copy = self._copy if into.fetch.rows is None else self._copy_documents
            work = partial(copy, portion, into)
            await self._threads.run_of(claims, portion.request.start, work)

    def _copy(self, portion: ReadPortion, where: "_Into") -> None:
        """Copy made and passing fields into the slot; runs in a thread."""
        fetch, begin, slot = where.fetch, where.begin, where.slot
        with slot.arena.lease():
            into, memory = np.frombuffer(slot.memory, np.uint8), portion.exchange.memory
            destinations, stored = fetch.layout.destinations[begin:], portion.staged.destinations
            limited = self._ragged if self._dataset.has_limits else []
            for number, (column, element_bytes) in enumerate(limited):
                sizes = (where.told[:, number] * element_bytes).tolist()
                sources = portion.made[column].tolist()
                for sample, at in enumerate(destinations[: len(sizes), column, 0].tolist()):
                    source, size = sources[sample], sizes[sample]
                    into[at : at + size] = memory[source : source + size]
            alone = {column for column, _ in limited}
            for first, stop in _runs(len(portion.plan), begin, fetch.plan.sample_ids.shape[1]):
                begins, ends = destinations[first, :, 0], destinations[stop - 1, :, 1]
                for column, places in enumerate(portion.made):
                    if column not in alone:
                        made = memory[places[first] : places[stop]]
                        into[begins[column] : ends[column]] = made
                for column, source in self._passed:
                    at, end = stored[first, source, 0], stored[stop - 1, source, 1]
                    into[begins[column] : ends[column]] = memory[at:end]

    def _copy_documents(self, portion: ReadPortion, where: "_Into") -> None:
        """Copy parts of documents into their sequences; see `_copy`."""
        fetch, begin, slot = where.fetch, where.begin, where.slot
        packed, rows = self._dataset.packed, fetch.rows
        assert packed
        assert rows
        into, memory = np.frombuffer(slot.memory, np.uint8), portion.exchange.memory
        some = slice(begin, begin + len(portion.plan))
        passed = dict(self._passed)
        with slot.arena.lease():
            for number, (column, spec) in enumerate(packed.read.items()):
                if column in passed:
                    starts = portion.staged.destinations[:, passed[column], 0]
                else:
                    starts = portion.made[column][:-1]
                if rows.begins is not None:
                    starts = starts + rows.begins[some] * spec.dtype.itemsize
                places = fetch.layout.destinations[some, number].tolist()
                for (at, end), start in zip(places, starts.tolist(), strict=True):
                    into[at:end] = memory[start : start + end - at]


def _runs(num: int, begin: int, size: int) -> Iterator[tuple[int, int]]:
    """The samples `[first, stop)` of each batch, in which the fields are contiguous.

    Args:
        num: samples of a portion.
        begin: the first of them, counted over batches of equal size.
        size: of a batch.
    """
    first = 0
    while first < num:
        stop = min(num, first + size - (begin + first) % size)
        yield first, stop
        first = stop
