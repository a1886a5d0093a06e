"""From a request to an open session, an index or a plan, as far as its caller may have it."""

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
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
from gyre_daemon.errors import InvalidRequest, NotAllowed, Overloaded, UnknownDataset
from gyre_daemon.fetching.columns import Measurer, Measuring, unheld
from gyre_daemon.fetching.dataset_opener import DatasetOpener
from gyre_daemon.fetching.layout import PackedRows, rows_of
from gyre_daemon.order.balance import CostRule, padding
from gyre_daemon.order.cursor import (
    Cursor,
    check_transforms,
    decode_cursor,
    skipping,
    with_weights,
)
from gyre_daemon.order.mixture import MixturePlanner, check_ranks, planner_for
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import Order
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.service import replies, requests
from gyre_daemon.service.guard import audit_hidden
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.session_request import Resumption, SessionRequest
from gyre_daemon.sessions.table import SessionTable
from gyre_daemon.transforms.declared import Transforms

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
    """An untransformed dataset with shards in a mixture, where its ids begin at `first_id`."""

    name: str
    dataset: Dataset
    first_id: int


class LongCalls:
    """Calls that read whole datasets, by user and dataset."""

    def __init__(
        self, most: int, doing: str, exempt: Callable[[Principal], bool] | None = None
    ) -> None:
        """Allow a user `most` calls at once on one dataset; `doing` is a verb, for messages."""
        self._most, self._doing, self._exempt = most, doing, exempt
        self._num: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def one(self, caller: Principal, dataset: str) -> Iterator[None]:
        """Count a call inside the block; raises Overloaded if the caller may have no more."""
        key = caller.name, dataset
        is_exempt = self._exempt is not None and self._exempt(caller)
        if self._num[key] >= self._most and not is_exempt:
            raise Overloaded(
                f"{caller.name} has {self._most} calls that {self._doing} `{dataset:.200}`, and "
                "may have no more; wait until one is over, or end it",
                {"who": caller.name, "limit_calls": self._most},
            )
        self._num[key] += 1
        try:
            yield
        finally:
            self._num[key] -= 1
            self._num += Counter()  # forgets those who have none


class Resolver(DatasetOpener):
    """Finds datasets, opens sessions and answers questions of callers, by the policy."""

    def __init__(
        self,
        catalog: Catalog,
        sessions: SessionTable,
        policy: Policy,
        transforms: Transforms,
        measurer: Measurer,
        prefetch_batches: int,
    ) -> None:
        """Open nothing yet; sessions that ask for no window get `prefetch_batches`, if not 0."""
        super().__init__(catalog, transforms, measurer)
        self._sessions = sessions
        self._policy = policy
        self._prefetch_batches = prefetch_batches

    async def open(self, owner: Principal, request: pb.OpenSessionRequest) -> Session:
        """Open a session, which begins to fetch at once.

        Raises:
            NotAllowed: the owner may not read the dataset with this job.
            GyreError: as `resolve`, `Catalog.open` and `SessionTable.open`.
        """
        order, reader = requests.to_order(request.order), requests.to_reader(request.reader)
        name, config = self._find(request.dataset, owner)
        self._policy.check_job(owner, name, reader.job)
        declared = requests.declared(request)
        needs_lengths = request.order.HasField("balance") or request.order.HasField("bucket")
        dataset = await self.open_dataset(
            name, config, declared, owner, needs_lengths=needs_lengths
        )
        order = requests.fitted(order, request.order, dataset, request.cursor)
        stored = dataset if dataset.packed else dataset.stored
        cursor = await Resumption(self._catalog, name, config, stored).cursor(
            order,
            request.cursor,
            dataset.transforms,
            grow=request.grow,
            changed_transforms=request.changed_transforms,
        )
        cursor = skipping(cursor, requests.to_skipped(request))
        cursor = with_weights(cursor, request.weights, dataset.name)
        order = cursor.order
        session = await self._sessions.open(
            SessionRequest(
                owner,
                dataset,
                order,
                reader,
                request.num_epochs,
                cursor,
                request.prefetch_batches or self._prefetch_batches,
                request.step if request.HasField("step") else None,
                self._policy.is_admin(owner),
                requests.to_balance(request.order, reader.world_size),
                request.iteration_epochs,
                config
                if declared is None
                else replace(config, transforms=tuple(requests.to_transforms(declared))),
            )
        )
        try:
            self._policy.check_session(owner, dataset.name, reader.job)
        except NotAllowed as reason:  # a reload has changed the rules meanwhile
            self._sessions.close(session.session_id, reason)
            raise
        return session

    async def open_dataset(
        self,
        name: str,
        config: DatasetConfig,
        declared: pb.TransformList | None,
        caller: Principal,
        *,
        needs_lengths: bool = True,
        is_measured: bool = True,
    ) -> Dataset:
        """See `made`.

        The transforms are those that the caller declares, or None for those of the definition.

        Raises:
            Overloaded: the caller declares too many different ones; or as `made`.
            GyreError: as `made`.
        """
        if declared is not None and declared.transforms and not self._policy.is_admin(caller):
            chain = name.encode() + b"\0" + declared.SerializeToString(deterministic=True)
            self._sessions.resources.limits.count_chain(caller.name, chain)
        tables = config.transforms if declared is None else requests.to_transforms(declared)
        return await self.made(
            name,
            config,
            tables,
            by_client=declared is not None,
            needs_lengths=needs_lengths,
            is_measured=is_measured,
        )

    def resolve(self, ref: pb.DatasetRef, caller: Principal) -> tuple[str, DatasetConfig]:
        """The dataset that a request names; one that its caller may not read does not exist.

        Raises:
            UnknownDataset: the caller may read no dataset of this name.
            NotAllowed: the caller may not define a dataset.
            InvalidRequest: the request names none, or defines one that makes no sense.
        """
        try:
            return self._find(ref, caller)
        except UnknownDataset:
            audit_hidden(caller, ref.name, self._policy)
            raise

    def resolve_stored(self, ref: pb.DatasetRef, caller: Principal) -> tuple[str, DatasetConfig]:
        """See `resolve`, for calls about shards: a mixture has none."""
        name, config = self.resolve(ref, caller)
        if config.mixture:
            raise InvalidRequest(
                f"`{name}` is a mixture and has no shards; name one of its sources: "
                f"{', '.join(config.mixture.sources)}"
            )
        return name, config

    async def index(
        self, caller: Principal, request: pb.IndexDatasetRequest, calls: "LongCalls"
    ) -> AsyncGenerator[pb.IndexProgress, None]:
        """Index the shards, then read the columns of the filter, then measure samples.

        Raises:
            Overloaded: see `LongCalls.one`.
            GyreError: as `resolve_stored`, `Catalog.index`, `finding` and `measuring`.
        """
        name, config = self.resolve_stored(request.dataset, caller)
        with calls.one(caller, name):
            async with contextlib.aclosing(
                self._index_progress(name, config, request)
            ) as all_of_it:
                async for progress in all_of_it:
                    yield progress

    async def _index_progress(
        self, name: str, config: DatasetConfig, request: pb.IndexDatasetRequest
    ) -> AsyncGenerator[pb.IndexProgress, None]:
        chosen = requests.to_shards(request)
        indexing = self._catalog.index(
            name, config, with_checksums=request.checksums, shards=chosen
        )
        async with contextlib.aclosing(unheld(indexing)) as told:
            async for progress in told:
                yield replies.like(
                    pb.IndexProgress,
                    progress,
                    shards_done=progress.num_done,
                    change=pb.ShardChange.Value(f"SHARD_CHANGE_{progress.change.upper()}"),
                )
        declared = requests.declared(request)
        by_client = declared is not None
        tables = config.transforms if declared is None else requests.to_transforms(declared)
        if chosen is not None:
            if request.measure:
                measured = self.measuring(name, config, tables, chosen, by_client=by_client)
                async for measuring in measured:
                    yield _from_measuring(measuring)
            return
        finding = self.finding(name, config, tables, by_client=by_client)
        async with contextlib.aclosing(finding) as found:
            async for each in found:
                yield _from_reading(each) if each.name else _from_measuring(each)

    async def plan_step(
        self, caller: Principal, request: pb.PlanStepRequest
    ) -> pb.PlanStepResponse:
        """The sample ids of one step, and its properties that are known before a read.

        Raises:
            InvalidRequest: the order, the ranks or the stages make no sense, or an answer has no
                room for the step.
            GyreError: as `resolve` and `open_dataset`.
        """
        order, world_size = requests.to_order(request.order), request.world_size or 1
        check_ranks(order, request.rank, world_size)
        rule = requests.to_balance(request.order, world_size)
        dataset = await self._open_for_step(caller, request, order, rule)
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
        return await self._sessions.compute(caller.name, work)

    async def _open_for_step(
        self, caller: Principal, request: pb.PlanStepRequest, order: Order, rule: CostRule | None
    ) -> Dataset:
        """The dataset; with its transforms only where they may decide, because of measuring."""
        name, config = self.resolve(request.dataset, caller)
        declared = requests.declared(request)
        # transformed lengths may decide the order, and refused samples are replaced
        may_decide = config.pack or rule or order.bucket or config.on_corrupt == "replace"
        if declared is not None or may_decide:
            return await self.open_dataset(name, config, declared, caller)
        return await self._catalog.open(name, config)

    async def plan_mixture(
        self, caller: Principal, request: pb.PlanMixtureRequest
    ) -> pb.PlanMixtureResponse:
        """The samples of each source of a mixture up to some steps.

        Raises:
            InvalidRequest: it is no mixture, or the request makes no sense.
            GyreError: as `resolve`, `Catalog.open` and `open_dataset`.
        """
        name, config = self.resolve(request.dataset, caller)
        if config.pack:  # lengths decide the order
            dataset = await self.open_dataset(name, config, None, caller)
        else:
            dataset = await self._catalog.open(name, config)
        mixture = dataset.mixture
        if mixture is None:
            raise InvalidRequest(f"`{name}` is no mixture; it has no sources")
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
            GyreError: as `resolve` and `open_dataset`.
        """
        name, config = self.resolve(request.dataset, caller)
        dataset = await self.open_dataset(name, config, requests.declared(request), caller)
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
        sources = [*_with_shards(dataset.stored, "", 0)]
        work = partial(_located, dataset, cursor, request, sources)
        return await self._sessions.compute(caller.name, work)

    def _find(self, ref: pb.DatasetRef, caller: Principal) -> tuple[str, DatasetConfig]:
        """The dataset that a request names, packed as it says."""
        name, config = self._find_documents(ref, caller)
        self._policy.check_sources(caller, name)
        if ref.HasField("pack"):
            config = replace(config, pack=requests.to_pack(ref.pack))
            if not self._policy.is_admin(caller):
                way = name.encode() + b"\0" + ref.pack.SerializeToString(deterministic=True)
                self._sessions.resources.limits.count_chain(caller.name, way)
        return name, config

    def _find_documents(self, ref: pb.DatasetRef, caller: Principal) -> tuple[str, DatasetConfig]:
        match ref.WhichOneof("ref"):
            case "name":
                return self._catalog.resolve(ref.name, self._policy.readable(caller))
            case "ad_hoc":
                name, config = self._catalog.resolve_ad_hoc(requests.to_ad_hoc(ref.ad_hoc))
                if not self._policy.is_admin(caller):
                    raise NotAllowed("only the owner of a private daemon may define datasets")
                return name, config
            case "session":
                return self._of_session(ref.session, caller)
        raise InvalidRequest("the request names no dataset")

    def _of_session(self, handle: str, caller: Principal) -> tuple[str, DatasetConfig]:
        """The dataset of an open session that the caller sees in the status."""
        for session in self._sessions:
            asked, is_admin = session.request, self._policy.is_admin(caller)
            if session.handle == handle and (is_admin or asked.owner.name == caller.name):
                self._policy.check_session(caller, asked.dataset.name, asked.reader.job)
                assert asked.definition
                return asked.dataset.name, asked.definition
        raise UnknownDataset(f"no session is named {handle[:20]!r}; it has ended")


def _with_shards(dataset: Dataset, prefix: str, first_id: int) -> Iterator[Source]:
    """The datasets with shards of their own, in the order of a mixture's ids."""
    if not dataset.sources:
        yield Source(prefix, dataset, first_id)
    for name, source in dataset.sources.items():
        path = f"{prefix}/{name}" if prefix else name
        yield from _with_shards(source.stored, path, first_id)
        first_id += source.index.num_samples


def _from_reading(reading: Measuring) -> pb.IndexProgress:
    """The progress after more shards of a column were read."""
    column = pb.ColumnProgress(
        name=reading.name, shards_done=reading.num_done, num_reused=reading.num_reused
    )
    return pb.IndexProgress(num_shards=reading.num_shards, column=column)


def _from_measuring(measuring: Measuring) -> pb.IndexProgress:
    """The progress after more shards were measured."""
    measured = pb.MeasuringProgress(
        shards_done=measuring.num_done,
        num_reused=measuring.num_reused,
        shard=measuring.shard,
    )
    return pb.IndexProgress(num_shards=measuring.num_shards, measured=measured)


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
        dataset, own_ids = sources[number].dataset, ids[which] - firsts[number]
        index, stored_ids = dataset.index, own_ids
        extents = index.locate(own_ids)
        while isinstance(index, View):
            stored_ids, index = index.stored_ids(stored_ids), index.unfiltered
        is_decoded = chunks_of(index) is not None  # then no byte of the shard is the sample's
        offsets = extents.start.min(axis=1, initial=_FAR)
        rows = stored_ids - shard_bounds(index, len(dataset.shards))[extents.shard]
        sizes = extents.size.sum(axis=1)
        for place, row in enumerate(which.tolist()):
            sample, name = found[row], dataset.shards[int(extents.shard[place])].name
            sample.sample_id, sample.source = int(own_ids[place]), number
            sample.shard = shards.setdefault((number, name), len(shards))
            sample.row, sample.num_bytes = int(rows[place]), int(sizes[place])
            if not is_decoded:
                sample.offset = int(offsets[place])
    answer.shards.extend(name for _, name in shards)
    return found
