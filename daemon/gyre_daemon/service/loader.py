"""The methods of the contract. Each one translates, delegates and answers; nothing is decided here."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from gyre_daemon import __version__
from gyre_daemon.config import DatasetConfig
from gyre_daemon.copiers import Copiers
from gyre_daemon.datasets.catalog import Catalog
from gyre_daemon.datasets.cost import estimate_costs
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import GyreError, InvalidRequest
from gyre_daemon.memory.sidechannel import Peer, SideChannel
from gyre_daemon.order.cursor import joined_at
from gyre_daemon.order.plan import Order, check_ranks, plan_of
from gyre_daemon.runtime.events import log_event
from gyre_daemon.service import control, convert, explain
from gyre_daemon.service.status import Context, answers_errors
from gyre_daemon.sessions.request import SessionRequest
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.table import SessionTable
from gyre_daemon.storage.location import parse_location

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Loader"].full_name
_SIDE_TOKEN = "gyre-side-token"
_MAX_PLANNED_SAMPLES = 100_000
_CHUNK_BYTES = (1 << 20) - 16  # with its frame, a message of at most 1 MiB


class LoaderService(pb_grpc.LoaderServicer):
    """One daemon's answers."""

    def __init__(
        self,
        catalog: Catalog,
        sessions: SessionTable,
        sides: Sequence[SideChannel],
        copiers: Copiers,
        prefetch_batches: int,
    ) -> None:
        self._catalog = catalog
        self._sessions = sessions
        self._sides = sides
        self._copiers = copiers
        self._prefetch_batches = prefetch_batches
        self._started = time.monotonic()

    @answers_errors
    async def ListDatasets(self, request: pb.ListDatasetsRequest, context: Context) -> pb.ListDatasetsResponse:
        """The datasets that the operator named."""
        return pb.ListDatasetsResponse(
            datasets=[
                pb.DatasetSummary(
                    name=name, format=config.format, uri=parse_location(config.uri).text, open=self._catalog.is_open(name)
                )
                for name, config in sorted(self._catalog.datasets.items())
            ]
        )

    @answers_errors
    async def DescribeDataset(self, request: pb.DescribeDatasetRequest, context: Context) -> pb.DatasetDescription:
        """One dataset, opened if it was not."""
        return convert.from_dataset(await self._catalog.open(*self._resolve(request.dataset)))

    @answers_errors
    async def IndexDataset(self, request: pb.IndexDatasetRequest, context: Context) -> AsyncIterator[pb.IndexProgress]:
        """Build what is missing of an index."""
        name, config = self._resolve(request.dataset)
        async for progress in self._catalog.index(name, config, with_checksums=request.checksums):
            yield convert.from_progress(progress)

    @answers_errors
    async def PlanStep(self, request: pb.PlanStepRequest, context: Context) -> pb.PlanStepResponse:
        """The samples of one step."""
        order, world_size = convert.to_order(request.order), request.world_size or 1
        check_ranks(order, request.rank, world_size)
        dataset = await self._catalog.open(*self._resolve(request.dataset))
        if order.global_batch_size // world_size > _MAX_PLANNED_SAMPLES:
            raise InvalidRequest(
                f"a plan of more than {_MAX_PLANNED_SAMPLES} samples is no answer; ask for one rank's part of them"
            )
        if request.step > 1 << 62 or request.step * order.global_batch_size > 1 << 62:
            raise InvalidRequest(f"step {request.step} lies beyond any training; positions end at 2**62")
        plan = await asyncio.to_thread(plan_of, order, dataset.index)
        batch = plan.batch(request.step, request.rank, world_size)
        return pb.PlanStepResponse(
            sample_ids=batch.sample_ids.tolist(),
            mask=[] if batch.mask is None else batch.mask.tolist(),
            first_position=request.step * order.global_batch_size,
            epoch=batch.epoch,
        )

    @answers_errors
    async def PlanCost(self, request: pb.PlanCostRequest, context: Context) -> pb.PlanCostResponse:
        """What each order would cost."""
        dataset = await self._catalog.open(*self._resolve(request.dataset))
        question = convert.to_cost_question(request, dataset)
        report = await asyncio.to_thread(estimate_costs, dataset.index, question)
        return convert.from_cost_report(report, question, dataset)

    @answers_errors
    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.SessionOpened:
        """A new session; it begins to fetch at once."""
        order, reader = convert.to_order(request.order), convert.to_reader(request.reader)
        dataset = await self._catalog.open(*self._resolve(request.dataset))
        order = self._joined(request, order, dataset)
        prefetch_batches = request.prefetch_batches or self._prefetch_batches
        session = await self._sessions.open(
            SessionRequest(
                dataset,
                order,
                reader,
                request.num_epochs,
                request.cursor,
                prefetch_batches,
                request.step if request.HasField("step") else None,
            )
        )
        peer = self._peer(context)
        if peer and session.share_arenas(peer):
            log_event("arena shared", {"session": session.session_id, "pid": peer.pid, "uid": peer.uid})
        return pb.SessionOpened(
            session_id=session.session_id,
            first_step=session.first_step,
            num_steps=session.num_steps or 0,
            num_samples=dataset.num_samples,
            fingerprint=dataset.fingerprint,
            cursor=session.cursor_at(session.first_step),
            lease_s=self._sessions.environment.lease_s,
            prefetch_batches=session.share.num_queued,
            arena_bytes=session.arena_bytes if session.shares_arena else 0,
            max_kept_batches=session.share.num_kept,
            fields=convert.from_fields(list(dataset.fields)),
        )

    @answers_errors
    async def Stream(
        self, request_iterator: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        """A session's control stream; the session ends with it."""
        first = await anext(request_iterator, pb.StreamRequest())
        if first.WhichOneof("event") != "attach":
            raise InvalidRequest("the first message of a stream must be `attach`")
        session = self._sessions.get(first.attach.session_id)
        session.attach()
        listening = asyncio.create_task(self._listen(session, request_iterator))
        try:
            async for response in control.responses(session, listening, self._sessions.environment.lease_s):
                yield response
        finally:
            listening.cancel()
            self._sessions.close(session.session_id, _stream_ended())

    @answers_errors
    async def ReadPayload(  # type: ignore[override]  # frames, not messages: see `register`
        self, request: pb.ReadPayloadRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """The payload of a session's batches, as PayloadChunk messages framed by hand."""
        session = self._sessions.get(request.session_id)
        while num_bytes := await session.next_payload():
            for begin in range(0, num_bytes, _CHUNK_BYTES):
                part = session.payload_part(begin, _CHUNK_BYTES)
                if part is None:
                    return
                yield convert.frame_chunk(part)

    @answers_errors
    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.SessionState:
        """Where a session stands."""
        return convert.from_session(self._sessions.get(request.session_id))

    @answers_errors
    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        """End a session; one that is not open is closed already."""
        self._sessions.close(request.session_id, _stream_ended())
        return pb.CloseSessionResponse()

    @answers_errors
    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.DaemonStatus:
        """The daemon and all its sessions."""
        environment = self._sessions.environment
        counts = sorted(environment.metrics.storage.items())
        return pb.DaemonStatus(
            version=__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            draining=self._sessions.draining,
            memory_reserved_bytes=environment.budget.reserved_bytes,
            memory_budget_bytes=environment.budget.limit_bytes,
            memory_abandoned_bytes=environment.budget.abandoned_bytes,
            sessions=[convert.from_session(session) for session in self._sessions],
            storage=[explain.from_count(labels, count) for labels, count in counts],
            endpoints=[explain.from_endpoint(endpoint, time.monotonic()) for endpoint in self._catalog.endpoints],
            num_batches_sent=environment.metrics.num_batches_sent,
            num_bytes_sent=environment.metrics.num_bytes_sent,
            num_copiers=len(self._copiers.pids),
            cache=convert.from_cache(environment.metrics.cache) if self._catalog.has_cache else None,
        )

    @answers_errors
    async def ExplainStep(self, request: pb.ExplainStepRequest, context: Context) -> pb.ExplainStepResponse:
        """Why a batch took as long as it did."""
        name, _ = self._resolve(request.dataset)
        machinery = self._sessions.environment.machinery
        found = machinery.accounts.find(name, request.step, request.job)
        if not found:
            raise InvalidRequest(
                f"no batch of step {request.step} of `{name}` is among the last {len(machinery.accounts)} that were read: it "
                "was not read yet, or so long ago that the record has gone on"
            )
        return pb.ExplainStepResponse(accounts=[explain.from_account(each, machinery.clock()) for each in found])

    def _resolve(self, ref: pb.DatasetRef) -> tuple[str, DatasetConfig]:
        match ref.WhichOneof("ref"):
            case "name":
                return self._catalog.resolve(ref.name)
            case "ad_hoc":
                return self._catalog.resolve_ad_hoc(convert.to_ad_hoc(ref.ad_hoc))
        raise InvalidRequest("the request names no dataset")

    def _joined(self, request: pb.OpenSessionRequest, order: Order, dataset: Dataset) -> Order:
        """The order, beginning where the request wants to join another job."""
        if request.join != pb.JOIN_ROTATE:
            return order
        if request.cursor:
            return replace(order, start_position=joined_at(request.cursor))
        if request.reader.rank:
            raise InvalidRequest(
                f"rank {request.reader.rank} cannot choose where its job joins; open rank 0 first and load its state_dict() "
                "on every rank"
            )
        return replace(order, start_position=self._sessions.hot_position(dataset, order))

    def _peer(self, context: Context) -> Peer | None:
        """The client's end of the side channel, if it has one."""
        metadata = dict(context.invocation_metadata() or ())
        token = str(metadata.get(_SIDE_TOKEN, ""))
        return next((peer for side in self._sides if (peer := side.peer(token))), None)

    async def _listen(self, session: Session, requests: AsyncIterator[pb.StreamRequest]) -> None:
        """Take in what the client says until it hangs up."""
        async for request in requests:
            control.take(session, request)
        self._sessions.close(session.session_id, _stream_ended())


def _stream_ended() -> GyreError:
    return GyreError("the client ended its stream")


def register(service: LoaderService, server: grpc.aio.Server) -> None:
    """Make a server answer with this service; payload passes no protobuf codec."""
    payload = grpc.unary_stream_rpc_method_handler(
        service.ReadPayload, request_deserializer=pb.ReadPayloadRequest.FromString, response_serializer=None
    )
    pb_grpc.add_LoaderServicer_to_server(service, server)
    server.add_registered_method_handlers(SERVICE_NAME, {"ReadPayload": payload})  # type: ignore[attr-defined]
