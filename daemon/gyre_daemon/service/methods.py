"""The methods of the protocol, and the two directions of a session's control stream."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import grpc
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from gyre_daemon.access.policy import Policy, Principal
from gyre_daemon.config import DaemonConfig, DatasetConfig
from gyre_daemon.datasets.codecs import LengthHistogram, length_histograms
from gyre_daemon.datasets.cost import estimate_costs
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.errors import Draining, GyreError, InvalidRequest, LeaseExpired, NotAllowed
from gyre_daemon.fetching.columns import Measurer, unheld
from gyre_daemon.fetching.prefetch import RangeReader
from gyre_daemon.monitoring.metrics import WindowTimes
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import compute
from gyre_daemon.service import replies, requests
from gyre_daemon.service.guard import Callers, Context, audited_refusals
from gyre_daemon.service.replies import Checkup
from gyre_daemon.service.resolver import LongCalls, Resolver
from gyre_daemon.sessions.session import LeftArenas, Sent, Session
from gyre_daemon.sessions.table import SessionTable, spreads_of, take_census
from gyre_daemon.storage.location import parse_location, shown_uri
from gyre_daemon.storage.mounts import MOUNTS, Mount
from gyre_daemon.transforms.declared import Transforms
from gyre_daemon.transforms.recipes import check_media
from gyre_daemon.workers.copy_workers import CopyWorkers

# Batches in one message: about 20 bytes each where one layout serves all, about 300 otherwise.
# These limits keep a message below 20 KiB; with lower ones, small batches cost more messages.
_MAX_ALIKE, _MAX_UNLIKE = (512, 64)
_GOODBYE_RETRY_S = 1.0


def handle(session: Session, request: pb.StreamRequest) -> None:
    """Act on a client's message; every message renews the lease.

    Raises:
        InvalidRequest: a second `attach`, or an empty message.
    """
    session.renew(request.num_taken)
    if request.read_until:
        session.read_until(request.read_until)
    match request.WhichOneof("event"):
        case "credit":
            for step in request.credit.released_steps:
                session.release(step)
            session.add_credit(request.credit.num_batches, request.credit.waited_s)
        case "release":
            for step in request.release.steps:
                session.release(step)
        case "unmapped":
            session.unmapped(request.unmapped.arenas)
        case "heartbeat":
            pass
        case _:
            raise InvalidRequest(
                "a message after the first must be `credit`, `release`, `unmapped` or `heartbeat`"
            )


async def responses(
    session: Session, listening: asyncio.Task[None], lease_s: float
) -> AsyncIterator[pb.StreamResponse]:
    """The messages to the client: batches as they become ready, heartbeats, the end of the stream.

    An idle stream sends four heartbeats in the time of the lease. `listening` handles the client's
    messages; it is done when the client has ended its stream.

    Raises:
        GyreError: a step failed, or the session was ended.
    """
    times = session.totals.times
    try:
        while True:
            try:
                async with asyncio.timeout(lease_s / 4):
                    news = await session.next_news(max_batches(session))
            except TimeoutError:
                before, times = times, session.totals.times
                yield pb.StreamResponse(heartbeat=_heartbeat(times - before, session.held_up_by))
                continue
            if isinstance(news, LeftArenas):
                yield pb.StreamResponse(arenas_left=pb.ArenasLeft(arenas=news.numbers))
                continue
            if news is None:
                yield pb.StreamResponse(end_of_stream=pb.EndOfStream())
                break
            yield batches(session, news)
    except Draining as reason:
        yield pb.StreamResponse(
            goodbye=pb.Goodbye(reason=str(reason), retry_after_s=_GOODBYE_RETRY_S)
        )
    except GyreError:
        if listening.done():
            listening.result()  # raises where the client sent a bad message
            return
        raise
    await listening  # the client reads the rest of its payload and hangs up


def _heartbeat(times: WindowTimes, held_up_by: str) -> pb.Heartbeat:
    """A heartbeat with the longest wait of the next batch since the last heartbeat."""
    if held_up_by:
        return pb.Heartbeat(waiting_for=held_up_by)
    waits = {
        "the storage": times.wait_storage_s,
        "a processor": times.wait_processor_s,
        "credit": times.wait_trainer_s,
    }
    longest = max(waits, key=lambda name: waits[name])
    return pb.Heartbeat(waiting_for=longest if waits[longest] else "")


def max_batches(session: Session) -> int:
    """The most batches that one message may hold."""
    return _MAX_ALIKE if session.request.dataset.has_equal_samples else _MAX_UNLIKE


def batches(session: Session, first: Sent) -> pb.StreamResponse:
    """One message with all batches that can be sent now, up to the first that failed."""
    sent, num_left = [first], max_batches(session) - len(first.group.plan)
    while num_left > 0 and session.head_is_whole:
        more = session.ready_group(num_left)
        if more is None:
            break
        sent.append(more)
        num_left -= len(more.group.plan)
    return replies.from_groups(sent, session)


SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Loader"].full_name
# With its frame, a chunk is a message of at most 1 MiB, as the protocol says.
_CHUNK_BYTES = (1 << 20) - 16
# Calls of one user on one dataset at once. Those that index or check it come one after the other,
# and whoever opens it for the first time waits for those before. Each that reads samples has some
# batches in memory, outside of any budget.
_MAX_LONG_CALLS, _MAX_RANGE_CALLS = 2, 16


class LoaderService(pb_grpc.LoaderServicer):
    """The service that one daemon offers; the guard answers its errors."""

    def __init__(
        self,
        catalog: Catalog,
        sessions: SessionTable,
        callers: Callers,
        policy: Policy,
        copy_workers: CopyWorkers,
        transforms: Transforms,
        measurer: Measurer,
        config: DaemonConfig,
        drain: Callable[[], float],
    ) -> None:
        """Serve the datasets of a catalog.

        `drain` lets the daemon stop, and returns the seconds until it does at the latest.
        """
        self._catalog = catalog
        self._sessions = sessions
        self._callers = callers
        self._policy = policy
        self._copy_workers = copy_workers
        self._opener = Resolver(
            catalog, sessions, policy, transforms, measurer, config.prefetch_batches
        )
        self._long_calls = LongCalls(_MAX_LONG_CALLS, "index or check")
        self._range_calls = LongCalls(_MAX_RANGE_CALLS, "read parts of", policy.is_admin)
        self._threads = measurer.threads
        self._checkup = Checkup(config, sessions)
        self._drain = drain
        self._started = time.monotonic()

    async def ListDatasets(
        self, request: pb.ListDatasetsRequest, context: Context
    ) -> pb.ListDatasetsResponse:
        """List the configured datasets that the caller may read."""
        caller = self._callers.identify(context)
        response = pb.ListDatasetsResponse()
        for name in self._policy.readable(caller):
            config = self._catalog.datasets[name]
            response.datasets.add(
                name=name,
                format=config.format,
                uri=shown_uri(config.uri),
                open=self._catalog.is_open(name),
            )
        return response

    async def DescribeDataset(
        self, request: pb.DescribeDatasetRequest, context: Context
    ) -> pb.DatasetDescription:
        """Describe one dataset; opens it."""
        caller = self._callers.identify(context)
        name, config = self._opener.resolve(request.dataset, caller)
        declared = requests.declared(request)
        dataset = await self._opener.open_dataset(
            name, config, declared, caller, needs_lengths=request.lengths
        )
        lengths: Sequence[LengthHistogram] = ()
        if request.lengths:
            histograms = partial(length_histograms, dataset.sized, dataset.served)
            lengths = await self._sessions.compute(caller.name, histograms)
        return replies.from_dataset(dataset, lengths)

    async def IndexDataset(
        self, request: pb.IndexDatasetRequest, context: Context
    ) -> AsyncIterator[pb.IndexProgress]:
        """Build the missing parts of an index."""
        caller = self._callers.identify(context)
        calls = self._range_calls if request.HasField("shards") else self._long_calls
        async with contextlib.aclosing(self._opener.index(caller, request, calls)) as indexing:
            async for progress in indexing:
                yield progress

    async def LintDataset(
        self, request: pb.LintDatasetRequest, context: Context
    ) -> AsyncIterator[pb.LintProgress]:
        """Check every shard and every sample."""
        caller = self._callers.identify(context)
        name, config = self._opener.resolve_stored(request.dataset, caller)
        calls = self._range_calls if request.HasField("shards") else self._long_calls
        with calls.one(caller, name):
            checking = self._catalog.lint(name, config, check_media, requests.to_shards(request))
            async with contextlib.aclosing(unheld(checking)) as linting:
                async for progress in linting:
                    yield replies.from_lint_progress(progress)

    async def ReadSamples(
        self, request: pb.ReadSamplesRequest, context: Context
    ) -> AsyncIterator[pb.SamplesChunk]:
        """Send a range of samples in the order of their ids."""
        caller = self._callers.identify(context)
        name, config = self._opener.resolve(request.dataset, caller)
        declared = requests.declared(request)
        with self._range_calls.one(caller, name):
            dataset = await self._opener.open_dataset(
                name, config, declared, caller, is_measured=False
            )
            description = replies.from_dataset(dataset)
            yield pb.SamplesChunk(description=description, transforms=dataset.transforms)
            reading = RangeReader(dataset, self._threads).read(request.first, request.stop)
            async with contextlib.aclosing(reading) as batches:
                async for layout, memory in batches:
                    chunk = pb.SamplesChunk(layout=replies.from_layout(layout))
                    size = _CHUNK_BYTES - chunk.ByteSize()
                    for begin in range(0, layout.num_bytes, size):
                        chunk.data = memory[begin : min(begin + size, layout.num_bytes)].tobytes()
                        yield chunk
                        chunk = pb.SamplesChunk()

    async def PlanStep(self, request: pb.PlanStepRequest, context: Context) -> pb.PlanStepResponse:
        """Compute the sample ids of one step."""
        return await self._opener.plan_step(self._callers.identify(context), request)

    async def LocateStep(
        self, request: pb.LocateStepRequest, context: Context
    ) -> pb.LocateStepResponse:
        """Find where the samples of one step of a job are stored."""
        return await self._opener.locate_step(self._callers.identify(context), request)

    async def PlanCost(self, request: pb.PlanCostRequest, context: Context) -> pb.PlanCostResponse:
        """Estimate the cost of each order."""
        caller = self._callers.identify(context)
        dataset = await self._catalog.open(*self._opener.resolve_stored(request.dataset, caller))
        if dataset.packed:
            raise InvalidRequest(
                "the costs of a packed dataset are not estimated; ask without `pack` for those of "
                "reading its documents"
            )
        question = requests.to_cost_question(request, dataset)
        estimate = partial(estimate_costs, dataset.index, question)
        report = await self._sessions.compute(caller.name, estimate)
        return replies.from_cost_report(report, question, dataset)

    async def PlanMixture(
        self, request: pb.PlanMixtureRequest, context: Context
    ) -> pb.PlanMixtureResponse:
        """Count the samples of each source of a mixture."""
        return await self._opener.plan_mixture(self._callers.identify(context), request)

    async def ChangeWeights(self, request: bytes, context: Context) -> bytes:
        """Refuse a call of earlier clients, and say how weights change now."""
        raise InvalidRequest(
            "the weights of a running job do not change: end it, and resume it with "
            "Loader(weights=...)"
        )

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.SessionOpened:
        """Open a session, which begins to fetch at once."""
        owner, peer = self._callers.identify(context), self._callers.peer(context)
        with audited_refusals(owner, request, self._policy):
            session = await self._opener.open(owner, request)
        wants_arenas = request.transport == pb.TRANSPORT_ARENA
        give_up = partial(self._give_up, session.session_id, owner)
        if peer and wants_arenas and session.share_arenas(peer, give_up):
            facts = {"session": session.handle, "pid": owner.pid, "uid": owner.uid}
            log_event("arena shared", facts)
        wanted = session.request
        return pb.SessionOpened(
            session_id=session.session_id,
            first_step=session.first_step,
            num_samples=wanted.num_samples,
            fingerprint=wanted.cursor.fingerprint,
            cursor=session.cursor_at(session.first_step),
            lease_s=self._sessions.resources.lease_s,
            max_queued_batches=session.max_queued,
            arena_bytes=session.arena_bytes if session.shares_arena else 0,
            max_kept_batches=session.num_kept,
            fields=replies.from_fields(wanted.dataset.served),
            stages=replies.from_stages(session),
            transforms=wanted.dataset.transforms,
            skip_steps=replies.from_skipped(wanted.order.skipped),
            order_version=wanted.cursor.algorithm,
            iteration_stop=session.peer.read_until or 0,
        )

    async def Stream(
        self, request_iterator: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        """Run a session's control stream; the session ends with it."""
        caller = self._callers.identify(context)
        first = await anext(request_iterator, pb.StreamRequest())
        if first.WhichOneof("event") != "attach":
            raise InvalidRequest("the first message of a stream must be `attach`")
        session = self._sessions.get(first.attach.session_id, caller)
        session.attach()
        listening = asyncio.create_task(self._listen(session, request_iterator))
        try:
            async for response in responses(session, listening, self._sessions.resources.lease_s):
                yield response
        finally:
            listening.cancel()
            self._close(session.session_id)

    async def ReadPayload(  # type: ignore[override]  # frames, not messages: see `register`
        self, request: pb.ReadPayloadRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Send the payload of inline batches, as serialized PayloadChunk messages."""
        caller = self._callers.identify(context)
        payloads = self._sessions.get(request.session_id, caller).payloads
        while num_bytes := await payloads.next():
            for begin in range(0, num_bytes, _CHUNK_BYTES):
                part = payloads.part(begin, _CHUNK_BYTES)
                if part is None:
                    return
                yield _chunk(part)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        """End a session of the caller; a session that does not exist counts as ended."""
        caller = self._callers.identify(context)
        with contextlib.suppress(LeaseExpired):
            self._close(self._sessions.get(request.session_id, caller).session_id)
        return pb.CloseSessionResponse()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.DaemonStatus:
        """Report the state of the daemon, and of the sessions that the caller may see."""
        caller = self._callers.identify(context)
        now = time.monotonic()
        census = take_census(self._sessions)
        status = replies.from_census(census, has_cache=self._catalog.has_cache)
        if request.check:
            status.checkup.CopyFrom(pb.Checkup(problems=self._checkup.problems(census)))
        status.pid = os.getpid()
        status.uptime_s = now - self._started
        status.num_copy_workers = len(self._copy_workers.pids)
        status.endpoints.extend(replies.from_endpoint(e, now) for e in self._catalog.endpoints)
        status.mounts.extend(map(replies.from_mount, MOUNTS))
        sessions, is_admin = list(self._sessions), self._policy.is_admin(caller)
        shown = [each for each in sessions if is_admin or each.request.owner.name == caller.name]
        status.sessions.extend(map(replies.from_session, shown))
        spreads = await spreads_of(shown, self._sessions, caller.name)  # of the steps above
        for state, spread in zip(status.sessions, spreads, strict=True):
            if spread is not None:
                state.spread = spread
        status.num_hidden_sessions = len(sessions) - len(shown)
        measured = [
            each
            for each in self._opener.measurings
            if is_admin or self._policy.may_read(caller, each.dataset)
        ]
        status.measurings.extend(map(replies.from_measuring, measured))
        if not self._policy.sees_all(caller):
            replies.hide_others(status)
        return status

    async def ExplainStep(
        self, request: pb.ExplainStepRequest, context: Context
    ) -> pb.ExplainStepResponse:
        """Report the timings of the batches of one step, as far as the caller's jobs read them."""
        caller = self._callers.identify(context)
        name, config = self._opener.resolve(request.dataset, caller)
        resources = self._sessions.resources
        reader = None if self._policy.is_admin(caller) else caller.name
        found = resources.timings.find(name, request.step, request.job, reader)
        mounts = await self._hanging(config)
        if not found and not mounts:
            whose = "that were read" if reader is None else "that your jobs read"
            raise InvalidRequest(
                f"no batch of step {request.step} of `{name}` is among the last "
                f"{whose}: it was not read yet, or too long ago"
            )
        return pb.ExplainStepResponse(
            timings=[replies.from_timing(each, resources.clock(), reader) for each in found],
            mounts=map(replies.from_mount, mounts),
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Let the daemon stop, if an operator asks for it."""
        caller = self._callers.identify(context)
        facts = {"user": caller.name, "pid": caller.pid}
        if not self._policy.is_admin(caller):
            log_event("drain refused", facts)
            raise NotAllowed(
                f"{caller.name} is no operator of this daemon. Ask one of those that `admin` in "
                "its configuration names, by default its own user and root."
            )
        log_event("drain asked", facts)
        return pb.DrainResponse(num_sessions=len(list(self._sessions)), timeout_s=self._drain())

    async def _hanging(self, config: DatasetConfig) -> list[Mount]:
        """The mounts of a dataset that hang now."""
        hanging = [mount for mount in MOUNTS if mount.hangs_since_s is not None]
        if not hanging:
            return []
        names = config.mixture.sources if config.mixture else ()
        uris = [self._catalog.datasets[name].uri for name in names] or [config.uri]
        # a location may name 100,000 shards
        locations = [await compute(parse_location, uri) for uri in uris]
        paths = [path for its in locations if its.scheme == "file" for path in its.paths]
        return [mount for mount in hanging if any(MOUNTS.at(path) is mount for path in paths)]

    async def _listen(self, session: Session, messages: AsyncIterator[pb.StreamRequest]) -> None:
        """Act on the client's messages until it ends the stream."""
        pause_s = self._sessions.resources.limits.pace(session.request.owner.name)
        try:
            async for message in messages:
                handle(session, message)
                if left_s := pause_s(message.ByteSize()):
                    await asyncio.sleep(left_s)
        finally:
            self._close(session.session_id)

    def _give_up(self, session_id: str, owner: Principal) -> None:
        """End a session whose client has gone, if no control stream would end it."""
        with contextlib.suppress(LeaseExpired):
            if not self._sessions.get(session_id, owner).attached:
                self._sessions.close(
                    session_id, GyreError("the client has gone before it read anything")
                )

    def _close(self, session_id: str) -> None:
        self._sessions.close(session_id, GyreError("the client ended its stream"))


def register(service: LoaderService, server: grpc.aio.Server) -> None:
    """Add the service to a server; ReadPayload bypasses the protobuf codec."""
    payload = grpc.unary_stream_rpc_method_handler(
        service.ReadPayload,
        request_deserializer=pb.ReadPayloadRequest.FromString,
        response_serializer=None,
    )
    pb_grpc.add_LoaderServicer_to_server(service, server)
    changes = grpc.unary_unary_rpc_method_handler(service.ChangeWeights, bytes, bytes)
    handlers = {"ReadPayload": payload, "ChangeWeights": changes}
    server.add_registered_method_handlers(SERVICE_NAME, handlers)  # type: ignore[attr-defined]


def _chunk(data: memoryview) -> bytes:
    """The bytes of PayloadChunk(data=data), with one copy fewer than protobuf makes."""
    return b"".join((b"\x0a", _varint(len(data)), data))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
