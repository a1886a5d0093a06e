"""Fetch unordered, place ordered: all reads of a batch are in flight at once, and each lands in its own place.

Reading waits on the event loop, checking and decoding compute in threads, and this file is the one place that decides which.
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from gyre_daemon.arena import Slot
from gyre_daemon.batch import Batch, BatchLayout, make_layout, write_own_tensors
from gyre_daemon.dataset import Dataset
from gyre_daemon.errors import CorruptSample
from gyre_daemon.formats import Extents
from gyre_daemon.plan import BatchPlan
from gyre_daemon.storage import Read
from gyre_daemon.transform import CODECS, Placement

_MAX_GAP_BYTES = 4096  # reading over a gap is cheaper than another request


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


@dataclass(slots=True)
class _Filling:
    """A fetch under way."""

    fetch: Fetch
    payload: memoryview
    reads: list[Read] = field(default_factory=list)
    pieces: list[list[tuple[int, int, Placement]]] = field(default_factory=list)  # of each read: sample, field, placement


class Fetcher:
    """Fills batch buffers from one dataset."""

    def __init__(self, dataset: Dataset, executor: Executor) -> None:
        self._dataset = dataset
        self._executor = executor
        self._codecs = [CODECS[spec.codec] for spec in dataset.fields]
        self._finishes = any(codec.finishes for codec in self._codecs)

    def prepare(self, plan: BatchPlan) -> Fetch:
        """Lay out a batch: arithmetic on the index, no I/O."""
        extents = self._dataset.index.locate(plan.sample_ids)
        return Fetch(plan, extents, make_layout(plan, self._dataset.fields, extents.size))

    async def fill(self, fetch: Fetch, slot: Slot) -> Batch:
        """Read a batch into a slot; the batch is the same bytes whatever the order in which its samples arrive.

        Args:
            fetch: from `prepare`.
            slot: at least `fetch.layout.num_bytes` long; the caller keeps it.

        Raises:
            CorruptSample: names shard, sample, offset and reason.
            ShardMissing, NotAllowed, StorageUnavailable: from the storage, as the first member of an exception group.
        """
        filling = _Filling(fetch, slot.memory[: fetch.layout.num_bytes])
        write_own_tensors(fetch.plan, fetch.layout, filling.payload)
        self._place(filling)
        waiting: list[int] = []
        async with asyncio.TaskGroup() as group:

            def arrived(reads: Sequence[int]) -> None:
                if self._finishes and not waiting:  # what arrives until the task runs is finished with it, in one thread job
                    group.create_task(self._finish(filling, waiting))
                waiting.extend(reads)

            await self._dataset.storage.read(filling.reads, arrived)
        return Batch(fetch.plan, fetch.layout, filling.payload)

    async def _finish(self, filling: _Filling, waiting: list[int]) -> None:
        reads = waiting.copy()
        waiting.clear()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._finish_all, filling, reads)

    def _finish_all(self, filling: _Filling, reads: Sequence[int]) -> None:
        for read in reads:
            for sample, column, placement in filling.pieces[read]:
                try:
                    self._codecs[column].finish(self._dataset.fields[column], placement)
                except ValueError as error:
                    raise self._corrupt(filling.fetch, sample, column, error) from error

    def _place(self, filling: _Filling) -> None:
        """Turn every sample into reads whose targets are its places."""
        for sample in range(len(filling.fetch.plan.sample_ids)):
            for columns in self._neighbours(filling.fetch.extents, sample):
                self._add_read(filling, sample, columns)

    def _add_read(self, filling: _Filling, sample: int, columns: Sequence[int]) -> None:
        """One read for fields that lie close together in the shard, in the order of their offsets."""
        extents = filling.fetch.extents
        targets: list[memoryview] = []
        pieces: list[tuple[int, int, Placement]] = []
        end = start = int(extents.start[sample, columns[0]])
        for column in columns:
            gap = int(extents.start[sample, column]) - end
            if gap:
                targets.append(memoryview(bytearray(gap)))
            begin, stop = filling.fetch.layout.places[sample, column].tolist()
            size = int(extents.size[sample, column])
            codec = self._codecs[column]
            try:
                placement = codec.put(self._dataset.fields[column], filling.payload[begin:stop], size)
            except ValueError as error:
                raise self._corrupt(filling.fetch, sample, column, error) from error
            targets.extend(target for target in codec.targets(placement) if target.nbytes)
            pieces.append((sample, column, placement))
            end += gap + size
        filling.reads.append(Read(int(extents.shard[sample]), start, tuple(targets)))
        filling.pieces.append(pieces)

    def _neighbours(self, extents: Extents, sample: int) -> Iterator[Sequence[int]]:
        """The fields of a sample, grouped where one request can bring several."""
        starts, sizes = extents.start[sample], extents.size[sample]
        if len(starts) == 1:
            yield (0,)
            return
        group: list[int] = []
        for column in sorted(range(len(starts)), key=lambda column: int(starts[column])):
            if group and not 0 <= starts[column] - (starts[group[-1]] + sizes[group[-1]]) <= _MAX_GAP_BYTES:
                yield group
                group = []
            group.append(column)
        yield group

    def _corrupt(self, fetch: Fetch, sample: int, column: int, reason: ValueError) -> CorruptSample:
        shard = self._dataset.storage.shards[int(fetch.extents.shard[sample])].name
        sample_id, offset = int(fetch.plan.sample_ids[sample]), int(fetch.extents.start[sample, column])
        return CorruptSample(
            f"sample {sample_id} of dataset `{self._dataset.name}` (shard {shard}, byte {offset}) is corrupt: field "
            f"{self._dataset.fields[column].name}: {reason}",
            {"dataset": self._dataset.name, "shard": shard, "sample_id": sample_id, "offset": offset, "reason": reason},
        )
