"""Portions: consecutive samples whose stored fields are read together, for one transform worker.

The fields are read into an exchange, which is shared with the worker process. The process writes
its results behind them, or only says how long it would be. So no process that runs code of others
has an arena mapped.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.formats import Extents, stored_fields
from gyre_daemon.errors import CorruptSample, Overloaded
from gyre_daemon.fetching.fetch import NOTHING_AHEAD, Ahead, Fetch, Fetcher
from gyre_daemon.fetching.layout import GroupLayout, LayoutMaker
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.threads import Claims, FairExecutor
from gyre_daemon.storage.reads import Delays, Draws
from gyre_daemon.transforms.declared import SampleFailed, TransformedDataset
from gyre_daemon.transforms.recipes import (
    ENCODER,
    Cost,
    Input,
    Kind,
    Output,
    Portion,
    name_of,
)
from gyre_daemon.workers.compute_workers import Exchange, pages

# Samples that one process is given at once, and the bytes of their stored and made fields together.
# With more, a batch is spread over fewer processes; with less, each sample costs more beside its
# transforms: a portion takes about 1 ms of the daemon.
_MAX_SAMPLES: dict[Cost, int] = {"light": 512, "heavy": 16, "slow": 1}
_MAX_PORTION_BYTES = 16 << 20
# How fast the estimate of a sample's processor time follows the measurements.
_FOLLOWS = 0.2
_FIRST_GUESS_S: dict[Cost, float] = {"light": 1e-5, "heavy": 1e-3, "slow": 1e-2}
# Samples that killed or stopped a process under a seed. They are not tried again under it, in no
# epoch: each would cost one more deadline. Under other seeds, as other jobs have for a source of a
# mixture, random transforms may do well.
_MAX_GIVEN_UP = 1024
# The place of each field of a sample of unknown length, in parts of the stored bytes that are read
# for it: the ids of a text take about as much as the text, decoded sound some times of its file. A
# batch with a longer sample is made again.
_PLACE_FACTOR, _MIN_PLACE_BYTES = 8, 4 << 10


class Staging(Struct, frozen=True):
    """Memory outside of arenas that fields are read into; see `TargetMemory`.

    Attributes:
        owner: all memory around it, which stays as long as anything refers to this.
        memory: the part that they get.
        address: of its first byte.
        key: that of no arena, so that no copy worker has it mapped.
    """

    owner: npt.NDArray[np.uint8]
    memory: memoryview
    address: int
    key: int = 0

    @classmethod
    def of(cls, memory: npt.NDArray[np.uint8]) -> "Staging":
        """All of an array."""
        return cls(memory, memory.data, memory.ctypes.data)

    @property
    def arena(self) -> "Staging":
        """See `TargetMemory.arena`."""
        return self

    def lease(self) -> AbstractContextManager[None]:
        """See `WritableArena.lease`; `owner` keeps the memory."""
        return nullcontext()


class PortionPlan(Struct, frozen=True):
    """n samples, read together to be transformed or measured.

    Attributes:
        sample_ids: int64 [n].
        draws: the seed and epoch of each.
        extents: where they are stored.
        urgency: among the portions of a job the lowest goes first; the first step of a batch group.
            Those that need it may come to need it more urgently.
        lengths: int64 [n, R], for how many elements of each ragged output field there is room;
            None to measure them alone.
    """

    sample_ids: Int64Array
    draws: Draws
    extents: Extents
    urgency: int
    lengths: Int64Array | None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def part(self, some: slice) -> "PortionPlan":
        """Some of its samples."""
        lengths = None if self.lengths is None else self.lengths[some]
        ids, draws, extents = self.sample_ids[some], self.draws.part(some), self.extents.part(some)
        return PortionPlan(ids, draws, extents, self.urgency, lengths)

    @property
    def alone(self) -> GroupPlan:
        """These samples as if they were a batch."""
        return GroupPlan(self.urgency, self.sample_ids[None], None, self.draws.epochs[:1])


class ReadPortion(Struct, frozen=True):
    """A portion whose stored fields lie in an exchange.

    Attributes:
        plan: its samples.
        exchange: the memory.
        staged: where the stored fields lie in it.
        made: int64 [M, n + 1], the byte where each sample of each made field begins, and the end of
            the last.
        request: the bytes of the encoded `Portion`.
        told: the bytes where the process says how long each sample is, int32 [R, n].
        asked_at: when the memory was asked for.
    """

    plan: PortionPlan
    exchange: Exchange
    staged: GroupLayout
    made: Int64Array
    request: range
    told: range
    asked_at: float


class PortionReader:
    """Reads portions of one dataset, and has them transformed or measured."""

    def __init__(self, dataset: TransformedDataset, threads: FairExecutor) -> None:
        """Read nothing yet.

        Args:
            dataset: its samples are read.
            threads: the daemon's.
        """
        self._dataset = dataset
        self._reader = Fetcher(dataset.source, threads)
        self._layouts = LayoutMaker(dataset.source.fields)
        self._stored = [spec.name for spec in stored_fields(dataset.source.fields)]
        self._read = [column for column, name in enumerate(self._stored) if name in dataset.read]
        self._sample_s = _FIRST_GUESS_S[dataset.cost]
        self._given_up: dict[tuple[int, int], SampleFailed] = {}  # by seed and sample

    def cut(self, extents: Extents, lengths: Int64Array | None) -> Iterator[slice]:
        """Samples, cut into portions.

        Args:
            extents: where they are stored.
            lengths: as in `PortionPlan`.
        """
        num_bytes = _stored_bytes(extents).sum(1)
        for sizes in self._made_bytes(len(num_bytes), lengths):
            num_bytes = num_bytes + sizes
        return cut_by_size(num_bytes, _MAX_PORTION_BYTES, _MAX_SAMPLES[self._dataset.cost])

    @asynccontextmanager
    async def transformed(
        self,
        plan: PortionPlan,
        claims: Claims,
        ahead: Ahead = NOTHING_AHEAD,
        delays: Delays | None = None,
        kind: Kind = Kind.TRANSFORM,
    ) -> AsyncIterator[ReadPortion]:
        """Have samples read into an exchange and transformed; it is held inside the context.

        Samples that have to be waited for are transformed as they arrive: a free worker takes all
        those present. Where a sample costs microseconds, handing it over would cost more than it
        gains.

        Args:
            plan: the samples.
            claims: the jobs that need them.
            ahead: see `Fetcher.fill`.
            delays: see `Fetcher.fill`.
            kind: `TRANSFORM` or `VERIFY`.

        Raises:
            CorruptSample: a sample is refused, was given up before, or its stored bytes are
                damaged; names shard, sample, offset and transform.
            Overloaded: no process can be started.
            GyreError: as `Fetcher.fill`.
        """
        delays = delays or Delays()
        comes_whole = self._dataset.cost == "light" or not self._reader.is_arriving
        async with self._staged(plan, claims) as portion:
            if kind == Kind.VERIFY or comes_whole:
                await self._fill(portion, claims, ahead, delays)
                await self._work(kind, portion, claims, [*range(len(plan))])
                yield portion
                return
            numbers: list[int] = []
            async with asyncio.TaskGroup() as tasks:

                def arrived(number: int) -> None:
                    if not numbers:
                        work = self._work(kind, portion, claims, numbers)
                        try:
                            tasks.create_task(work)
                        except RuntimeError:  # another sample has failed
                            work.close()
                    numbers.append(number)

                await self._fill(portion, claims, ahead, delays, arrived)
            yield portion

    @asynccontextmanager
    async def _staged(self, plan: PortionPlan, claims: Claims) -> AsyncIterator[ReadPortion]:
        """Memory for a portion, with the request and without the stored fields."""
        for number, sample_id in enumerate(plan.sample_ids.tolist() if self._given_up else ()):
            if failure := self._given_up.get((plan.draws.seed, sample_id)):
                raise self._corrupt(plan, number, failure)
        asked_at = time.monotonic()
        staged = self._layouts.make(plan.alone, plan.extents.tensor_bytes)
        begin = pages(staged.num_bytes)
        told = range(begin, begin + 4 * len(plan) * len(self._dataset.made_ragged))
        outputs, made, end = self._outputs(plan, told)
        request = ENCODER.encode(self._request(plan, staged, outputs))
        where = range(end, end + len(request))
        async with self._dataset.pool.room.hold(where.stop, claims) as exchange:
            exchange.memory[where.start : where.stop] = np.frombuffer(request, np.uint8)
            yield ReadPortion(plan, exchange, staged, made, where, told, asked_at)

    async def _fill(
        self,
        portion: ReadPortion,
        claims: Claims,
        ahead: Ahead,
        delays: Delays,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """Read the stored fields."""
        plan, own = portion.plan, Delays()
        memory = portion.exchange.memory[: portion.staged.num_bytes]
        staging = Staging(portion.exchange.memory, memory.data, memory.ctypes.data)
        fetch = Fetch(plan.alone, plan.extents, portion.staged, draws=plan.draws)
        await self._reader.fill(fetch, staging, claims, ahead, own, arrived)
        delays.add_requests(own)
        delays.read_s = max(delays.read_s, time.monotonic() - portion.asked_at)

    async def _work(
        self, kind: Kind, portion: ReadPortion, claims: Claims, waiting: list[int]
    ) -> None:
        """Have samples of a portion transformed, which tells their lengths.

        `waiting` has their numbers; all that it has when a worker is free are taken out of it.
        """
        plan = portion.plan
        workers, where = self._dataset.pool.workers, (portion.exchange, portion.request)
        try:
            answers, num = await workers.work(kind, *where, waiting, claims, self._sample_s)
        except SampleFailed as error:
            if error.is_costly and len(self._given_up) < _MAX_GIVEN_UP:
                self._given_up[plan.draws.seed, int(plan.sample_ids[error.number])] = error
            raise self._corrupt(plan, error.number, error) from error
        cpu_s = sum(each.cpu_s for each in answers)
        self._sample_s += _FOLLOWS * (cpu_s / num - self._sample_s)
        if plan.lengths is not None:
            workers.counts.num_samples += num

    def told(self, portion: ReadPortion) -> Int64Array:
        """How long the samples of a transformed portion are, int64 [n, R].

        Raises:
            Overloaded: the process told something else.
        """
        shape = len(self._dataset.made_ragged), len(portion.plan)
        told = portion.exchange.memory[portion.told.start : portion.told.stop].view("<i4")
        lengths = told.reshape(shape).T.astype(np.int64)
        if (lengths < 0).any():
            raise Overloaded("a process that transforms samples gave a wrong answer; try again")
        return lengths

    def lengths_of(self, portion: ReadPortion) -> Int64Array:
        """Do as `told`, and require that samples are as long as they were, or within their limits.

        Raises:
            CorruptSample: one is not.
            Overloaded: as `told`.
        """
        plan, lengths = portion.plan, self.told(portion)
        assert plan.lengths is not None
        has_limits = self._dataset.has_limits
        wrong = lengths > plan.lengths if has_limits else lengths != plan.lengths
        if wrong.any():
            number, column = np.argwhere(wrong)[0].tolist()
            name, known = self._dataset.made_ragged[column].name, plan.lengths[number, column]
            reason = f"{name!r:.100} has {lengths[number, column]} elements, and "
            reason += (
                f"its transform declares at most {known}"
                if has_limits
                else f"{known} when it was measured; lengths must not depend on chance, and a "
                "transform that makes others than before needs a higher `version`"
            )
            failure = SampleFailed(number, "", reason, is_costly=False)
            raise self._corrupt(plan, number, failure)
        return lengths

    def guessed(self, extents: Extents) -> Int64Array:
        """Int64 [n, R], as many elements as samples of unknown lengths get room for."""
        made = self._dataset.made_ragged
        read_bytes = _stored_bytes(extents)[:, self._read].sum(1)
        most_bytes = max(_MAX_PORTION_BYTES // max(len(made), 1), _MIN_PLACE_BYTES)
        most = np.clip(_PLACE_FACTOR * read_bytes, _MIN_PLACE_BYTES, most_bytes)
        elements = [max(spec.element_bytes, 1) for spec in made]
        guessed: Int64Array = most[:, None] // np.array(elements, np.int64)
        return guessed

    def _made_bytes(self, num: int, lengths: Int64Array | None) -> Iterator[Int64Array]:
        """Of each output field, int64 [n], the bytes of each sample."""
        column = 0
        for spec in self._dataset.made:
            elements = np.ones(num, np.int64)
            if spec.ragged and lengths is not None:
                elements = lengths[:, column]
                column += 1
            yield elements * spec.element_bytes

    def _outputs(self, plan: PortionPlan, told: range) -> tuple[list[Output], Int64Array, int]:
        """Where made fields go behind `told`: for the process, in bytes, and where all end."""
        outputs: list[Output] = []
        num, end, told_at = len(plan), pages(told.stop), told.start
        made = np.zeros((len(self._dataset.made), num + 1), np.int64)
        lengths = plan.lengths
        if lengths is None:
            lengths = np.zeros((num, len(self._dataset.made_ragged)), np.int64)
        columns = zip(self._dataset.made, self._made_bytes(num, lengths), strict=True)
        for number, (spec, sizes) in enumerate(columns):
            if plan.lengths is None and not spec.ragged:
                continue
            ends = np.concatenate(([0], np.cumsum(sizes)))
            output = Output(spec.name, name_of(spec.dtype), spec.shape, end)
            if spec.ragged:
                elements = (ends // max(spec.element_bytes, 1)).astype("<i8").tobytes()
                output = msgspec.structs.replace(output, ends=elements, lengths=told_at)
                told_at += 4 * num
            outputs.append(output)
            made[number] = end + ends
            end = pages(end + int(ends[-1]))
        return outputs, made, end

    def _request(self, plan: PortionPlan, staged: GroupLayout, outputs: list[Output]) -> Portion:
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
                sizes = np.full(len(plan), spec.element_bytes)
                offsets = begins[spec.name] + np.arange(len(plan)) * spec.element_bytes
            columns = offsets.astype("<i8").tobytes(), sizes.astype("<i8").tobytes()
            inputs.append(Input(spec.name, name_of(spec.dtype), spec.shape, spec.ragged, *columns))
        ids, epochs = plan.sample_ids.tobytes(), plan.draws.epochs.tobytes()
        return Portion(self._dataset.recipe, plan.draws.seed, ids, epochs, inputs, outputs)

    def _corrupt(self, plan: PortionPlan, number: int, failure: SampleFailed) -> CorruptSample:
        """The error for a sample that was refused."""
        dataset, stored = self._dataset, [*self._dataset.read, *self._stored]
        column = next(self._stored.index(name) for name in stored if name in self._stored)
        sample_id = int(plan.sample_ids[number])
        extents = dataset.stored.index.locate(plan.sample_ids[number : number + 1])
        start = int(extents.start[0, min(column, extents.start.shape[1] - 1)])
        shard, offset = dataset.shards[int(extents.shard[0])].place_of(start)
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


def _stored_bytes(extents: Extents) -> Int64Array:
    """Int64 [n, stored fields], the bytes as they are stored or read, whichever is more."""
    found: Int64Array = np.maximum(extents.size, extents.tensor_bytes)
    return found


def cut_by_size(num_bytes: Int64Array, max_bytes: int, max_samples: int) -> Iterator[slice]:
    """Cut samples of these sizes into runs; one that is larger than `max_bytes` stands alone."""
    ends, begin = np.cumsum(num_bytes), 0
    while begin < len(ends):
        limit = max_bytes + (int(ends[begin - 1]) if begin else 0)
        fitting = int(np.searchsorted(ends, limit, side="right"))
        end = max(begin + 1, min(fitting, begin + max_samples))
        yield slice(begin, end)
        begin = end
