"""From a request to an open session or an index, as far as its caller may have it."""

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.access.policy import Policy, Principal
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.datasets.indexing.changes import Change
from gyre_daemon.datasets.indexing.shards import IndexProgress
from gyre_daemon.errors import InvalidRequest, NotAllowed, Overloaded, UnknownDataset
from gyre_daemon.fetching.columns import Measurer, Measuring, unheld
from gyre_daemon.fetching.dataset_opener import DatasetOpener
from gyre_daemon.order.cursor import skipping, with_weights
from gyre_daemon.service import requests
from gyre_daemon.service.guard import audit_hidden
from gyre_daemon.service.replies import like
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.session_request import Resumption, SessionRequest
from gyre_daemon.sessions.table import Result, SessionTable
from gyre_daemon.transforms.declared import Transforms


class SessionOpener(DatasetOpener):
    """Finds datasets and opens sessions for callers, by the policy."""

    def __init__(
        self,
        catalog: Catalog,
        sessions: SessionTable,
        policy: Policy,
        transforms: Transforms,
        measurer: Measurer,
        prefetch_batches: int,
    ) -> None:
        """Open nothing yet.

        Args:
            catalog: the datasets.
            sessions: gets the sessions.
            policy: the permissions of each caller.
            transforms: makes datasets whose samples are transformed.
            measurer: finds how long these samples are.
            prefetch_batches: the window of a session that asks for none; 0 for the default.
        """
        super().__init__(catalog, transforms, measurer)
        self._sessions = sessions
        self._policy = policy
        self._prefetch_batches = prefetch_batches

    async def open(self, owner: Principal, request: pb.OpenSessionRequest) -> Session:
        """Open a session, which begins to fetch at once.

        Args:
            owner: the caller.
            request: the session that it asks for.

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
                config if declared is None else _declaring(config, declared),
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

        Args:
            name: from `resolve`.
            config: from `resolve`.
            declared: the client's transforms; None for those of the dataset's definition.
            caller: who declares them.
            needs_lengths: see `made`.
            is_measured: see `made`.

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

    async def compute(self, caller: Principal, work: Callable[[], Result]) -> Result:
        """See `SessionTable.compute`."""
        return await self._sessions.compute(caller.name, work)

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

    async def open_ordered(self, ref: pb.DatasetRef, caller: Principal) -> Dataset:
        """The dataset that a request names, as far as its order needs it.

        Transformed lengths may decide the order only where documents are packed.

        Raises:
            GyreError: as `resolve`, `Catalog.open` and `open_dataset`.
        """
        name, config = self.resolve(ref, caller)
        if config.pack:
            return await self.open_dataset(name, config, None, caller)
        return await self._catalog.open(name, config)

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


def _declaring(config: DatasetConfig, declared: pb.TransformList) -> DatasetConfig:
    """A definition with the transforms that a client declares."""
    return replace(config, transforms=tuple(requests.to_transforms(declared)))


_CHANGES: dict[Change, "pb.ShardChange.ValueType"] = {
    "indexed": pb.SHARD_CHANGE_INDEXED,
    "kept": pb.SHARD_CHANGE_KEPT,
    "restored": pb.SHARD_CHANGE_RESTORED,
    "changed": pb.SHARD_CHANGE_CHANGED,
}


Exempt = Callable[[Principal], bool]


class LongCalls:
    """Calls that read whole datasets, by user and dataset."""

    def __init__(self, most: int, doing: str, exempt: Exempt | None = None) -> None:
        """Count nothing yet.

        Args:
            most: the calls that a user may have at once on one dataset.
            doing: a verb, for messages.
            exempt: whether a caller may have any number; None where no caller may.
        """
        self._most, self._doing, self._exempt = most, doing, exempt
        self._num: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def one(self, caller: Principal, dataset: str) -> Iterator[None]:
        """Count a call inside the block.

        Raises:
            Overloaded: the caller has as many on this dataset as it may.
        """
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


class IndexService:
    """Answers the method `IndexDataset`."""

    def __init__(
        self, catalog: Catalog, opener: SessionOpener, calls: LongCalls, range_calls: LongCalls
    ) -> None:
        self._catalog, self._opener = catalog, opener
        self._calls, self._range_calls = calls, range_calls

    async def index(
        self, caller: Principal, request: pb.IndexDatasetRequest
    ) -> AsyncGenerator[pb.IndexProgress, None]:
        """Index the shards, then read the columns of the filter, then measure samples.

        Raises:
            Overloaded: see `LongCalls.one`.
            GyreError: as `SessionOpener.resolve_stored`, `Catalog.index`, `SessionOpener.finding`
                and `SessionOpener.measuring`.
        """
        name, config = self._opener.resolve_stored(request.dataset, caller)
        calls = self._range_calls if request.HasField("shards") else self._calls
        with calls.one(caller, name):
            async with contextlib.aclosing(self._progress(name, config, request)) as all_of_it:
                async for progress in all_of_it:
                    yield progress

    async def _progress(
        self, name: str, config: DatasetConfig, request: pb.IndexDatasetRequest
    ) -> AsyncGenerator[pb.IndexProgress, None]:
        chosen = requests.to_shards(request)
        indexing = self._catalog.index(
            name, config, with_checksums=request.checksums, shards=chosen
        )
        async with contextlib.aclosing(unheld(indexing)) as told:
            async for progress in told:
                yield _from_progress(progress)
        declared = requests.declared(request)
        tables = None if declared is None else requests.to_transforms(declared)
        if chosen is not None:
            if request.measure:
                async for measuring in self._opener.measuring(name, config, tables, chosen):
                    yield _from_measuring(measuring)
            return
        async with contextlib.aclosing(self._opener.finding(name, config, tables)) as finding:
            async for each in finding:
                yield _from_reading(each) if each.name else _from_measuring(each)


def _from_progress(progress: IndexProgress) -> pb.IndexProgress:
    """The progress after one more shard."""
    return like(
        pb.IndexProgress,
        progress,
        shards_done=progress.num_done,
        change=_CHANGES[progress.change],
    )


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
