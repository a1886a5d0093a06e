"""Reads batch groups whose samples are transformed before they lie in the slot.

A batch group is cut into portions of consecutive samples. The stored fields of a portion are read
into an exchange, which is shared with one worker process; the process writes what it makes behind
them, and a thread copies that, and the fields that pass, into the slot. Portions are read and
transformed beside each other. So no process that runs code of others has an arena mapped.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.chunks.exchange import Exchange, pages
from gyre_daemon.datasets.formats import Extents, indexed_fields, stored_fields
from gyre_daemon.errors import CorruptSample
from gyre_daemon.fetching.batch_group import NOTHING_AHEAD, Ahead, Fetch
from gyre_daemon.fetching.fetch import Fetcher
from gyre_daemon.fetching.layout import GroupLayout, LayoutMaker, write_own_tensors
from gyre_daemon.memory.arena import Slot
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.fair import FairExecutor, Flow
from gyre_daemon.storage.delays import Delays
from gyre_daemon.transforms.declared import TransformedDataset
from gyre_daemon.transforms.messages import ENCODER, Input, Output, Portion
from gyre_daemon.transforms.transform import Cost
from gyre_daemon.transforms.workers import SampleFailed

# Samples that one process is given at once, and the bytes of their stored and made fields together.
# With more, a batch is spread over fewer processes; with less, each sample costs more beside its
# transforms: a portion takes about 1 ms of the daemon.
_MAX_SAMPLES: dict[Cost, int] = {"light": 512, "heavy": 16, "slow": 1}
_MAX_PORTION_BYTES = 16 << 20
# How fast the estimate of a sample's processor time follows what is measured.
_FOLLOWS = 0.2
_FIRST_GUESS_S: dict[Cost, float] = {"light": 1e-5, "heavy": 1e-3, "slow": 1e-2}
# Samples that killed or stopped a process. A stream does not try them again, in no epoch: each
# would cost it one more deadline.
_MAX_GIVEN_UP = 1024


@dataclass(frozen=True, slots=True)
class _Staging:
    """Memory of an exchange that stored fields are read into; see `Place`.

    Attributes:
        owner: all memory of the exchange, which stays as long as anything refers to this.
        memory: the part that they get.
        address: of its first byte.
        key: that of no arena, so that no copy worker has it mapped.
    """

    owner: npt.NDArray[np.uint8]
    memory: memoryview
    address: int
    key: int = 0

    @property
    def arena(self) -> "_Staging":
        return self

    def lease(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class _Portion:
    """n consecutive samples of a batch group, which are read and transformed together.

    Attributes:
        plan: of the group.
        begin: the first of them, counted over the batches of the group.
        sample_ids: int64 [n].
        epochs: int64 [n].
        extents: where they are stored.
        destinations: int64 [n, F, 2], first byte and end of each field in the slot.
    """

    plan: GroupPlan
    begin: int
    sample_ids: Int64Array
    epochs: Int64Array
    extents: Extents
    destinations: Int64Array

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def alone(self) -> GroupPlan:
        """These samples as if they were a batch."""
        plan = self.plan
        return GroupPlan(plan.first_step, self.sample_ids[None], None, plan.epochs[:1])

    def runs(self) -> Iterator[tuple[int, int]]:
        """The samples `[first, stop)` of each batch, in which the fields are contiguous."""
        size = self.plan.sample_ids.shape[1]
        first = 0
        while first < len(self):
            stop = min(len(self), first + size - (self.begin + first) % size)
            yield first, stop
            first = stop


class TransformingFetcher:
    """Fills slots with batches of a dataset whose samples are transformed; see `Fetcher`."""

    def __init__(
        self,
        dataset: TransformedDataset,
        threads: FairExecutor,
        seed: int,
        epochs: Callable[[int, int], Int64Array],
    ) -> None:
        """Read nothing yet.

        Args:
            dataset: what is read.
            threads: the daemon's.
            seed: of the job.
            epochs: takes the first step and the number of the steps of a batch group, and returns
                the epoch of each of its samples, int64 [K, B].
        """
        self._dataset, self._threads = dataset, threads
        self._seed, self._epochs = seed, epochs
        self._reader = Fetcher(dataset.source, threads)
        self._layouts = LayoutMaker(dataset.fields)
        self._staged = LayoutMaker(dataset.source.fields)
        self._stored = [spec.name for spec in stored_fields(dataset.source.fields)]
        own = [spec.name for spec in stored_fields(dataset.fields)]
        # the columns of the stored fields that pass, as they are in the slot and in the source
        self._passed = [
            (column, self._stored.index(name))
            for column, name in enumerate(own)
            if column >= len(dataset.made)
        ]
        self._indexed = [spec.name for spec in indexed_fields(dataset.source.fields)]
        self._sample_s = _FIRST_GUESS_S[dataset.cost]
        self._given_up: dict[int, SampleFailed] = {}

    def prepare(self, plan: GroupPlan, num_together: int) -> list[Fetch]:
        """See `Fetcher.prepare`."""
        extents = self._dataset.index.locate(plan.sample_ids.reshape(-1))
        size, fetches = plan.sample_ids.shape[1], []
        for begin in range(0, len(plan), num_together):
            some = plan[begin : begin + num_together]
            its = extents.part(slice(begin * size, (begin + len(some)) * size))
            sizes = np.zeros((len(its.shard), len(self._dataset.made) + len(self._passed)), int)
            for column, stored in self._passed:
                sizes[:, column] = its.tensor_bytes[:, stored]
            fetches.append(Fetch(some, its, self._layouts.make(some, sizes)))
        return fetches

    async def fill(
        self,
        fetch: Fetch,
        slot: Slot,
        flow: Flow,
        ahead: Ahead = NOTHING_AHEAD,
        delays: Delays | None = None,
    ) -> None:
        """Read and transform a batch group into its slot; see `Fetcher.fill`.

        Raises:
            CorruptSample: names shard, sample, offset, transform and reason.
            Overloaded: no process can be started.
        """
        delays = delays or Delays()
        began = time.monotonic()
        plan, destinations = fetch.plan, fetch.layout.destinations
        epochs = self._epochs(plan.first_step, len(plan)).reshape(-1)
        work = partial(self._write_own, fetch, slot)
        await self._threads.run(flow, 0, plan.first_step, work)
        async with asyncio.TaskGroup() as tasks:
            for begin, end in self._portions(fetch):
                some = slice(begin, end)
                extents, ids = fetch.extents.part(some), plan.sample_ids.reshape(-1)[some]
                part = _Portion(plan, begin, ids, epochs[some], extents, destinations[some])
                tasks.create_task(self._fill_portion(part, slot, flow, ahead, delays))
        if delays.num_requests:
            delays.storage_s = delays.read_s
        delays.finish_s = time.monotonic() - began - delays.read_s

    def _write_own(self, fetch: Fetch, slot: Slot) -> None:
        with slot.arena.lease():
            indexed = dict(zip(self._indexed, fetch.extents.indexed, strict=True))
            write_own_tensors(fetch.plan, fetch.layout, slot.memory, indexed)

    def _portions(self, fetch: Fetch) -> Iterator[tuple[int, int]]:
        """The samples of a batch group, cut into portions."""
        made = sum(spec.element_bytes for spec in self._dataset.made)
        num_bytes = (np.maximum(fetch.extents.size, fetch.extents.tensor_bytes)).sum(1) + made
        ends, begin = np.cumsum(num_bytes), 0
        while begin < len(ends):
            limit = _MAX_PORTION_BYTES + (int(ends[begin - 1]) if begin else 0)
            fitting = int(np.searchsorted(ends, limit, side="right"))
            end = max(begin + 1, min(fitting, begin + _MAX_SAMPLES[self._dataset.cost]))
            yield begin, end
            begin = end

    async def _fill_portion(
        self, part: _Portion, slot: Slot, flow: Flow, ahead: Ahead, delays: Delays
    ) -> None:
        for number, sample_id in enumerate(part.sample_ids.tolist() if self._given_up else ()):
            if sample_id in self._given_up:
                raise self._corrupt(part, number, self._given_up[sample_id])
        began = time.monotonic()
        staged = self._staged.make(part.alone, part.extents.tensor_bytes)
        outputs, end = self._outputs(len(part), staged)
        request = ENCODER.encode(self._request(part, staged, outputs))
        urgency = part.plan.first_step
        async with self._dataset.pool.room.hold(end + len(request), flow, urgency) as exchange:
            exchange.memory[end : end + len(request)] = np.frombuffer(request, np.uint8)
            memory = exchange.memory[: staged.num_bytes]
            staging = _Staging(exchange.memory, memory.data, memory.ctypes.data)
            own = Delays()
            fetch = Fetch(part.alone, part.extents, staged)
            await self._reader.fill(fetch, staging, flow, ahead, own)
            delays.add_requests(own)
            delays.read_s = max(delays.read_s, time.monotonic() - began)
            where = range(end, end + len(request))
            await self._transform(part, exchange, where, flow, urgency)
            work = partial(self._copy, part, slot, exchange.memory, staged, outputs)
            await self._threads.run(flow, end, urgency, work)

    async def _transform(
        self, part: _Portion, exchange: Exchange, request: range, flow: Flow, urgency: int
    ) -> None:
        num, cost_s = len(part), self._sample_s * len(part)
        try:
            cpu_s = await self._dataset.pool.workers.transform(
                exchange, request, num, flow, cost_s, urgency
            )
        except SampleFailed as error:
            if error.is_costly and len(self._given_up) < _MAX_GIVEN_UP:
                self._given_up[int(part.sample_ids[error.number])] = error
            raise self._corrupt(part, error.number, error) from error
        self._sample_s += _FOLLOWS * (cpu_s / num - self._sample_s)

    def _outputs(self, num: int, staged: GroupLayout) -> tuple[list[Output], int]:
        """Where the made fields of n samples go in the exchange, and where they end."""
        outputs, end = [], pages(staged.num_bytes)
        for spec in self._dataset.made:
            outputs.append(Output(spec.name, spec.dtype.str, spec.shape, end))
            end = pages(end + num * spec.element_bytes)
        return outputs, end

    def _request(self, part: _Portion, staged: GroupLayout, outputs: list[Output]) -> Portion:
        source, (batch,) = self._dataset.source.fields, staged.batches
        begins = {spec.name: spec.offset_bytes for spec in batch.tensors}
        inputs = []
        for spec in source:
            if spec.name not in self._dataset.read:
                continue
            if spec.ragged:
                places = batch.destinations[:, self._stored.index(spec.name)]
                offsets, sizes = places[:, 0], places[:, 1] - places[:, 0]
            else:
                sizes = np.full(len(part), spec.element_bytes)
                offsets = begins[spec.name] + np.arange(len(part)) * spec.element_bytes
            columns = offsets.astype("<i8").tobytes(), sizes.astype("<i8").tobytes()
            inputs.append(Input(spec.name, spec.dtype.str, spec.shape, spec.ragged, *columns))
        ids, epochs = part.sample_ids.tobytes(), part.epochs.tobytes()
        return Portion(self._dataset.recipe, self._seed, ids, epochs, inputs, outputs)

    def _copy(
        self,
        part: _Portion,
        slot: Slot,
        memory: npt.NDArray[np.uint8],
        staged: GroupLayout,
        outputs: list[Output],
    ) -> None:
        """Copy made and passing fields into the slot; runs in a thread."""
        with slot.arena.lease():
            into = np.frombuffer(slot.memory, np.uint8)
            stored = staged.destinations
            for first, stop in part.runs():
                begins, ends = part.destinations[first, :, 0], part.destinations[stop - 1, :, 1]
                for column, (spec, output) in enumerate(
                    zip(self._dataset.made, outputs, strict=True)
                ):
                    begin = output.offset + first * spec.element_bytes
                    end = output.offset + stop * spec.element_bytes
                    into[begins[column] : ends[column]] = memory[begin:end]
                for column, source in self._passed:
                    begin, end = stored[first, source, 0], stored[stop - 1, source, 1]
                    into[begins[column] : ends[column]] = memory[begin:end]

    def _corrupt(self, part: _Portion, number: int, failure: SampleFailed) -> CorruptSample:
        """The error for a sample that was refused."""
        dataset, stored = self._dataset, [*self._dataset.read, *self._stored]
        column = next(self._stored.index(name) for name in stored if name in self._stored)
        sample_id = int(part.sample_ids[number])
        offset = int(part.extents.start[number, column])
        shard = dataset.storage.shards[int(part.extents.shard[number])].name
        by = failure.transform or " or ".join(dict.fromkeys(dataset.transform_names))
        return CorruptSample(
            f"sample {sample_id} of dataset `{dataset.name}` (shard {shard}, byte {offset}) cannot "
            f"be transformed: {by}: {failure.reason}",
            {
                "dataset": dataset.name,
                "shard": shard,
                "sample_id": sample_id,
                "offset": offset,
                "transform": by,
                "reason": failure.reason,
            },
        )
