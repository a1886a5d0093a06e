"""Questions about a job's steps: which samples and sources each has, and where they are stored."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from gyre_protos.v1 import loader_pb2 as pb
from msgspec import Struct

from gyre_daemon.access.policy import Policy, Principal
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.dataset import Dataset, balance_of, bucket_lengths, shard_bounds
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from gyre_daemon.datasets.formats.concat import View
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.fetching.layout import PackedRows, rows_of
from gyre_daemon.order.balance import CostRule, padding
from gyre_daemon.order.cursor import Cursor, check_transforms, decode_cursor
from gyre_daemon.order.mixture import Mixture, MixturePlanner, check_ranks, planner_for
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import Order
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.service import replies, requests
from gyre_daemon.service.resolver import SessionOpener
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.session_request import Resumption
from gyre_daemon.sessions.table import SessionTable

# Sample ids in one answer. Ten times as many would exceed the 4 MiB of a gRPC client.
_MAX_PLANNED_SAMPLES = 100_000
_MAX_POSITION = 1 << 62
_MAX_STEPS = 1000
_MAX_STEP = 1 << 40
# Samples in one answer, each some 40 bytes: a gRPC client takes 4 MiB.
_MAX_LOCATED = 50_000
_THOSE_OF_THE_RUN = (
    "give those of the run, with the versions that they had: `gyre rewind --transforms FILE` takes "
    "the list of its Loader(transform=...)"
)
_FAR = 1 << 62  # beyond any shard


class Source(Struct, frozen=True):
    """A dataset with shards of its own, as part of a mixture.

    Attributes:
        name: in the mixture; empty for any other dataset.
        dataset: the dataset, without transforms.
        first_id: the mixture's id of its first sample.
    """

    name: str
    dataset: Dataset
    first_id: int


class Located(Struct, frozen=True):
    """Where n samples of one dataset are stored.

    Attributes:
        sample_ids: int64 [n], in the dataset.
        shards: the names of their shards.
        rows: int64 [n], how many samples stand before each in its shard, also those that a filter
            leaves out.
        offsets: int64 [n], the first byte in the shard; None where chunks of it are decoded.
        num_bytes: int64 [n], of all stored fields.
    """

    sample_ids: Int64Array
    shards: list[str]
    rows: Int64Array
    offsets: Int64Array | None
    num_bytes: Int64Array


class StepQuestions:
    """Answers the methods `PlanStep`, `PlanMixture` and `LocateStep`."""

    def __init__(
        self, catalog: Catalog, opener: SessionOpener, sessions: SessionTable, policy: Policy
    ) -> None:
        self._catalog, self._opener = catalog, opener
        self._sessions, self._policy = sessions, policy

    async def plan_step(
        self, caller: Principal, request: pb.PlanStepRequest
    ) -> pb.PlanStepResponse:
        """The sample ids of one step, and its properties that are known before a read.

        Raises:
            InvalidRequest: the order, the ranks or the stages make no sense, or an answer has no
                room for the step.
            GyreError: as `SessionOpener.resolve` and `open_dataset`.
        """
        order, world_size = requests.to_order(request.order), request.world_size or 1
        check_ranks(order, request.rank, world_size)
        rule = requests.to_balance(request.order, world_size)
        dataset = await self._open(caller, request, order, rule)
        order = requests.fitted(order, request.order, dataset)
        if order.global_batch_size // world_size > _MAX_PLANNED_SAMPLES:
            raise InvalidRequest(
                f"an answer holds at most {_MAX_PLANNED_SAMPLES} sample ids; "
                "ask for the part of one rank"
            )
        if request.step * order.global_batch_size > _MAX_POSITION:
            raise InvalidRequest(
                f"step {request.step} is beyond any training; positions end at 2**62"
            )
        work = partial(_planned, dataset, order, rule, request)
        return await self._opener.compute(caller, work)

    async def _open(
        self, caller: Principal, request: pb.PlanStepRequest, order: Order, rule: CostRule | None
    ) -> Dataset:
        """The dataset; with its transforms only where they may decide, because of measuring."""
        name, config = self._opener.resolve(request.dataset, caller)
        declared = requests.declared(request)
        # transformed lengths may decide the order, and refused samples are replaced
        may_decide = config.pack or rule or order.bucket or config.on_corrupt == "replace"
        if declared is not None or may_decide:
            return await self._opener.open_dataset(name, config, declared, caller)
        return await self._catalog.open(name, config)

    async def plan_mixture(
        self, caller: Principal, request: pb.PlanMixtureRequest
    ) -> pb.PlanMixtureResponse:
        """See the method `PlanMixture`.

        Raises:
            InvalidRequest: it is no mixture, or the request makes no sense.
        """
        dataset = await self._opener.open_ordered(request.dataset, caller)
        mixture = _mixture_of(dataset)
        order = requests.to_order(request.order)
        if len(request.steps) > _MAX_STEPS or max(request.steps, default=0) > _MAX_STEP:
            raise InvalidRequest(f"at most {_MAX_STEPS} steps up to 2**40 are planned at once")
        phases = mixture.phases
        given: tuple[int, ...] = ()
        if request.job:
            session = self._running(caller, dataset, request.job)
            state = session.request.cursor.mixture
            assert state
            order, phases, given = session.request.order, state.phases, state.given

        def counts() -> list[list[int]]:
            planner = planner_for(order, mixture, phases=phases)
            assert isinstance(planner, MixturePlanner)
            size = order.global_batch_size
            return [planner.quotas.counts(step * size) for step in request.steps]

        counted = await self._sessions.compute(caller.name, counts)
        return pb.PlanMixtureResponse(
            sources=[
                pb.MixtureSource(name=each.name, num_samples=each.ordered.num_samples)
                for each in mixture.sources
            ],
            phases=[
                pb.MixturePhase(
                    first_step=phase.first_step,
                    shares=[weight / sum(phase.weights) for weight in phase.weights],
                    given=phase.first_step in given,
                )
                for phase in phases
            ],
            counts=[pb.SourceCounts(num_samples=each) for each in counted],
        )

    def _running(self, caller: Principal, dataset: Dataset, job: str) -> Session:
        """A session of the job that reads a mixture, of the caller's or, for operators, of any."""
        found = {
            (its.owner.name, its.reader.job): session
            for session in self._sessions
            if (its := session.request).dataset.name == dataset.name
            and its.reader.job == job
            and (its.owner.name == caller.name or self._policy.is_admin(caller))
        }
        if len(found) != 1:
            names = ", ".join(sorted(f"{name} of {user}" for user, name in found)) or "none"
            raise InvalidRequest(
                f"no one job of yours named {job!r:.100} reads the mixture `{dataset.name}` now, "
                f"but {names:.500}"
            )
        return next(iter(found.values()))

    async def locate_step(
        self, caller: Principal, request: pb.LocateStepRequest
    ) -> pb.LocateStepResponse:
        """Plan the step of a cursor's job, and look its samples up in the index; reads none.

        Raises:
            CursorRejected: the cursor is of other data, or of samples that were transformed
                otherwise, where that matters or the request says how they were.
            InvalidRequest: the step is beyond any training, or has too many samples for an answer;
                or as `requests.check_blocks`.
            GyreError: as `SessionOpener.resolve` and `open_dataset`.
        """
        name, config = self._opener.resolve(request.dataset, caller)
        dataset = await self._opener.open_dataset(name, config, requests.declared(request), caller)
        stored = dataset if dataset.packed else dataset.stored
        cursor = decode_cursor(request.cursor)
        if cursor.order.mode == "block":  # whoever made the cursor chose them
            requests.check_blocks(cursor.order.io_block_bytes, cursor.order.window_blocks)
        if request.HasField("transforms") or dataset.packed or cursor.order.bucket:
            check_transforms(cursor, dataset.transforms, _THOSE_OF_THE_RUN)
        cursor = await Resumption(self._catalog, name, config, stored).cursor(
            cursor.order, request.cursor, dataset.transforms, grow=False, changed_transforms=True
        )
        if max(request.step, request.batch) > _MAX_STEP:
            raise InvalidRequest("only steps up to 2**40 are looked at")
        sources = [*self._sources(name, config, dataset.stored, "", 0)]
        work = partial(_located, dataset, cursor, request, sources)
        return await self._opener.compute(caller, work)

    def _sources(
        self, name: str, config: DatasetConfig, dataset: Dataset, prefix: str, first_id: int
    ) -> Iterator[Source]:
        """The datasets with shards of their own, in the order of a mixture's ids."""
        if not config.mixture:
            yield Source(prefix, dataset, first_id)
            return
        for each in config.mixture.sources:
            source = self._catalog.source_of(name, each)
            assert source  # the mixture is open
            path = f"{prefix}/{each}" if prefix else each
            its = self._catalog.datasets[each]
            yield from self._sources(each, its, source.stored, path, first_id)
            first_id += source.index.num_samples


def _planned(
    dataset: Dataset, order: Order, rule: CostRule | None, request: pb.PlanStepRequest
) -> pb.PlanStepResponse:
    lengths_of = bucket_lengths(dataset, order)
    stages, balance = (
        requests.to_stages(request.stages),
        balance_of(dataset, rule) if rule else None,
    )
    rest = stages, balance, (), lengths_of
    planner = planner_for(order, dataset.ordered, dataset.corrupt, *rest)
    batch = planner.batch(request.step, request.rank, request.world_size or 1)
    answer = pb.PlanStepResponse(
        sample_ids=batch.sample_ids.tolist(),
        mask=[] if batch.mask is None else batch.mask.tolist(),
        first_position=request.step * order.global_batch_size,
        epoch=batch.epoch,
        spread=planner.spread(request.step, request.world_size or 1),
        transforms=dataset.transforms,
    )
    if lengths_of:
        alone = replace(order, bucket=None)
        without = planner_for(alone, dataset.ordered, dataset.corrupt, *rest)
        answer.padding = padding(lengths_of(planner.batch(request.step).sample_ids))
        answer.padding_without = padding(lengths_of(without.batch(request.step).sample_ids))
    return answer


def _mixture_of(dataset: Dataset) -> Mixture:
    if dataset.mixture is None:
        raise InvalidRequest(f"`{dataset.name}` is no mixture; it has no sources")
    return dataset.mixture


def _located(
    dataset: Dataset, cursor: Cursor, request: pb.LocateStepRequest, sources: list[Source]
) -> pb.LocateStepResponse:
    order = cursor.order
    phases = cursor.mixture.phases if cursor.mixture else ()
    lengths_of = bucket_lengths(dataset, order)
    ordered, corrupt = dataset.ordered, dataset.corrupt
    planner = planner_for(order, ordered, corrupt, cursor.stages, None, phases, lengths_of)
    by_step = request.WhichOneof("at") == "step"
    batch = order.batch_of(request.step) if by_step else request.batch
    answer = pb.LocateStepResponse(
        batch=batch, step=order.step_of(batch), transforms=dataset.transforms
    )
    answer.sources.extend(source.name for source in sources if source.name)
    answer.order.CopyFrom(replies.from_order(order))
    if skipped := replies.from_skipped(order.skipped):
        answer.skip_steps.CopyFrom(skipped)
    if by_step and answer.step != request.step:
        answer.step, answer.skipped = request.step, True
        return answer
    if order.global_batch_size > _MAX_LOCATED:
        raise InvalidRequest(f"a step of more than {_MAX_LOCATED} samples is not looked up")
    plan = planner.batches(batch, 1, 0, 1)
    answer.epoch = int(plan.epochs[0])
    rows = rows_of(dataset.packed, plan) if dataset.packed else _alone(plan)
    if len(rows.documents) > _MAX_LOCATED:
        raise InvalidRequest(f"a step of more than {_MAX_LOCATED} documents is not looked up")
    samples = _samples(rows.documents, sources, answer)
    if dataset.packed:
        begins = np.zeros_like(rows.lengths) if rows.begins is None else rows.begins
        for sample, begin, length in zip(samples, begins, rows.lengths, strict=True):
            sample.first_token, sample.num_tokens = int(begin), int(length)
    counts = [True] * order.global_batch_size if plan.mask is None else plan.mask[0].tolist()
    for row, sample_id in enumerate(plan.sample_ids[0].tolist()):
        its = samples[rows.which(row, row + 1)]
        answer.rows.add(sample_id=sample_id, padding=not counts[row], samples=its)
    return answer


def _alone(plan: GroupPlan) -> PackedRows:
    """Rows of one sample each."""
    ids = plan.sample_ids.reshape(-1)
    ones = np.ones_like(ids)
    return PackedRows(ids, ones, np.zeros_like(ids), np.arange(len(ids) + 1), ones)


def _samples(
    ids: Int64Array, sources: list[Source], answer: pb.LocateStepResponse
) -> list[pb.LocatedSample]:
    """Where samples are stored; the names of shards are added to the answer."""
    firsts = [source.first_id for source in sources]
    source_of = np.searchsorted(firsts, ids, side="right") - 1
    found = [pb.LocatedSample() for _ in ids]
    shards: dict[tuple[int, str], int] = {}
    for number in np.unique(source_of).tolist():
        which = np.flatnonzero(source_of == number)
        its = located(sources[number].dataset, ids[which] - firsts[number])
        for place, row in enumerate(which.tolist()):
            shard = shards.setdefault((number, its.shards[place]), len(shards))
            found[row].sample_id = int(its.sample_ids[place])
            found[row].shard, found[row].source = shard, number
            found[row].row = int(its.rows[place])
            found[row].num_bytes = int(its.num_bytes[place])
            if its.offsets is not None:
                found[row].offset = int(its.offsets[place])
    answer.shards.extend(name for _, name in shards)
    return found


def located(dataset: Dataset, sample_ids: Int64Array) -> Located:
    """Look samples of a dataset with shards of its own up in its index; int64 [n]."""
    index, ids = dataset.index, sample_ids
    extents = index.locate(ids)
    while isinstance(index, View):
        ids, index = index.stored_ids(ids), index.unfiltered
    is_decoded = chunks_of(index) is not None
    offsets = None if is_decoded else extents.start.min(axis=1, initial=_FAR)
    bounds = shard_bounds(index, len(dataset.shards))
    return Located(
        sample_ids,
        [dataset.shards[shard].name for shard in extents.shard.tolist()],
        ids - bounds[extents.shard],
        offsets,
        extents.size.sum(axis=1),
    )
