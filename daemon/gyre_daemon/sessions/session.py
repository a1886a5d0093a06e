"""Sessions: one for each rank of each job.

A session sends its client the batches that a shared stream has fetched, in the order of their
steps, each once. A step that failed raises its error when its turn comes and not before. Losing a
session loses nothing, because its client has the cursor and opens another.

Each session has reserved enough memory to continue in a stream of its own; [Note: Sharing a stream]
in `stream_state` says when it does. It ends when its steps end, when its lease runs out, or when a
newer session of the same rank takes over.
"""

import asyncio
import math
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from gyre_daemon.errors import Draining, GyreError, InvalidRequest, LeaseExpired
from gyre_daemon.fetching.batch_group import BatchGroup
from gyre_daemon.fetching.prefetch import Spec
from gyre_daemon.memory.arena import Arena
from gyre_daemon.memory.budget import Allowance
from gyre_daemon.memory.share import Share
from gyre_daemon.memory.sidechannel import Peer
from gyre_daemon.monitoring.jobs import SessionGauges, SessionTotals
from gyre_daemon.monitoring.lately import Lately
from gyre_daemon.order.planner import BatchPlanner
from gyre_daemon.order.quality import ShuffleMeter
from gyre_daemon.runtime.fair import Flow
from gyre_daemon.sessions.account import SessionAccount
from gyre_daemon.sessions.client_arenas import ClientArenas, LeftArenas
from gyre_daemon.sessions.payload_queue import PayloadQueue
from gyre_daemon.sessions.request import SessionRequest
from gyre_daemon.sessions.shared_stream import DaemonResources, Member
from gyre_daemon.sessions.streams import Consumer

_MAX_CREDITS = 1 << 20


@dataclass(frozen=True, slots=True)
class Sent:
    """Batches that are sent to a client together.

    Attributes:
        group: the batches, which lie in one slot.
        arena: the client's number for their arena, counted from 0; without a meaning if the client
            gets the payload instead.
    """

    group: BatchGroup
    arena: int


class Session:
    """One rank's stream of batches.

    Attributes:
        planner: computes the samples of each step.
        session_id: a secret, and of use to its owner only.
        handle: tells the session apart in the status and the log; no secret.
        opened_at: when it was opened, on the daemon's clock.
        request: what its client asked for.
        shuffle: measures how well the samples that were sent are shuffled.
        attached: whether the control stream of a client is connected to it.
        credits: how many more batches may be sent to the client.
        cursors: encodes the cursor of each batch.
        first_step: the step that is sent first.
        num_steps: the step after the last; None for a session without end.
        share: the memory that it has reserved.
        consumer: where it stands in the shared streams of its spec.
        payloads: of the batches that it sends through gRPC.
    """

    def __init__(
        self,
        request: SessionRequest,
        planner: BatchPlanner,
        flow: Flow,
        resources: DaemonResources,
        allowed: Collection[Allowance] = (),
    ) -> None:
        """Check the request, reserve memory, and join a shared stream or open one.

        Raises:
            InvalidRequest, CursorRejected: the request makes no sense or does not fit its dataset.
            Overloaded: the budget has no memory for it now.
        """
        request.check()
        order, reader = request.order, request.reader
        self.planner = planner
        self.session_id = secrets.token_hex(16)
        self.handle = secrets.token_hex(4)
        self.request = request
        self.shuffle = ShuffleMeter()
        self.attached = False
        self.credits = 0
        self._most_credits = 0
        self._resources = resources
        cursor = request.start_cursor()
        self.cursors = cursor.encoder()
        self.first_step = order.batch_of(cursor.position // order.global_batch_size)
        self.num_steps = planner.num_steps(request.num_epochs) if request.num_epochs else None
        if self.num_steps is not None and self.first_step > self.num_steps:
            raise InvalidRequest(
                f"the cursor stands at step {self.first_step}, but the stream ends at step "
                f"{self.num_steps}; ask for more epochs or begin with no cursor"
            )
        self._sendable = asyncio.Event()
        self._arenas = ClientArenas(self._held_in, self._sendable.set)
        self.payloads = PayloadQueue()
        self._ended: GyreError | None = None
        self._draining = False
        self._has_started = False
        self._seen = self.opened_at = self._resources.clock()
        self._account = SessionAccount(self._seen)
        self.share = self._granted = request.reserve(
            resources.budget, resources.arena_limit_bytes, allowed
        )
        wished = request.prefetch_batches
        ranks = reader.rank, reader.world_size
        spec = Spec(request.dataset, order, *ranks, planner, wished, request.balance)
        self._streams = self._resources.streams_of(spec)
        self.consumer = Consumer(self.first_step, self.num_steps, self.share)
        self._streams.join(self.consumer, Member(flow, self._sendable.set, self.end))

    async def start(self) -> None:
        """Wait until the first arena of its stream is there.

        Raises:
            Overloaded: the machine does not have the memory.
        """
        await self._streams.running[self.consumer.stream].has_started.wait()
        if self._ended:
            raise self._ended
        self._has_started = True
        self.renew()

    @property
    def window_size(self) -> int:
        """The prefetch window of its shared stream, in batches."""
        return 0 if self._ended else self.consumer.stream.share.num_ahead

    @property
    def num_sharing(self) -> int:
        """How many sessions, with itself, take batches from the same shared streams, or will."""
        return self.consumer.num_sharing

    @property
    def arena_bytes(self) -> int:
        """The size of the first arena of its shared stream."""
        return self._streams.arenas_of(self.consumer).first.num_bytes

    @property
    def least_bytes(self) -> int:
        """The fewest bytes that it can have reserved; it never shrinks below them."""
        least_bytes = self.request.least_bytes(self._resources.arena_limit_bytes)
        first_bytes = self.share.reserved_for(self._streams.first_arena_bytes(self.consumer))
        return min(self.share.reserved_bytes, max(least_bytes, first_bytes))

    @property
    def gauges(self) -> SessionGauges:
        """Its present state."""
        return SessionGauges(
            num_sessions=1,
            num_ready=self.consumer.num_ready,
            num_held=self.consumer.num_held,
            window_batches=self.window_size,
            memory_bytes=0 if self._ended else self._streams.arenas_of(self.consumer).held_bytes,
            memory_limit_bytes=self.share.reserved_bytes,
        )

    @property
    def totals(self) -> SessionTotals:
        """Its counts since it was opened."""
        return self._account.totals(self._resources.clock())

    @property
    def lately(self) -> Lately:
        """Its rates of the last ten seconds."""
        return self._account.lately(self._resources.clock())

    @property
    def lease_left_s(self) -> float:
        """The seconds until the session ends, unless a message of its client comes before.

        Before it has started, the client knows of no session and can send no message.
        """
        if not self._has_started:
            return math.inf
        return self._seen + self._resources.lease_s - self._resources.clock()

    def cursor_at(self, step: int) -> bytes:
        """The cursor of a client that has consumed all steps before `step`."""
        position = self.request.order.position_of(step)
        return self.cursors.encode(position, self.planner.num_substitutes(position))

    def attach(self) -> None:
        """Connect the session to the control stream of a client.

        Raises:
            InvalidRequest: another control stream is connected to it.
        """
        if self.attached:
            raise InvalidRequest("the session has a stream already; open another session")
        self.attached = True
        self.renew()

    def renew(self, num_taken: int = 0) -> None:
        """Renew the lease, because a message came whose client has taken `num_taken` batches."""
        self._seen = self._resources.clock()
        self._account.heard(self._seen, num_taken)

    def add_credit(self, num_batches: int, waited_s: float = 0.0) -> None:
        """Allow this many more batches; the client's trainer stood still for `waited_s`."""
        self.credits += min(num_batches, _MAX_CREDITS - self.credits)
        self._most_credits = max(self._most_credits, self.credits)
        self._account.trainer_waited(waited_s)
        self._note_window()
        self._sendable.set()

    def release(self, first_step: int) -> None:
        """Release the batches that the client was sent together from this step on.

        A second release of the same step changes nothing.
        """
        if not self._ended:
            self._streams.release(self.consumer, first_step)

    def share_arenas(self, peer: Peer, on_gone: Callable[[], None]) -> bool:
        """Let the client map the arenas of its batches; False if the side channel fails.

        `on_gone` is called when the client leaves the side channel before the session has ended.
        """
        if self._ended:
            return False
        first = self._streams.arenas_of(self.consumer).first
        return self._arenas.share(self.session_id, peer, first, on_gone)

    @property
    def shares_arena(self) -> bool:
        """Whether the client maps arenas, so that batches are not copied to it."""
        return self._arenas.are_shared

    def unmapped(self, arenas: Collection[int]) -> None:
        """The client has unmapped these arenas and moved out the batches that it still needed."""
        for step in self._arenas.unmapped(arenas):
            self.release(step)

    def new_grant(self) -> Share | None:
        """The share that its client must be told of; None if the client knows it already."""
        share = self.consumer.stream.share
        if share == self._granted:
            return None
        self._granted = share
        return share

    async def next_news(self, max_batches: int = _MAX_CREDITS) -> Sent | LeftArenas | None:
        """Wait for what the client must be told next.

        Returns:
            Batches of its next steps, at most `max_batches` and no more than it has credit for; or
            arenas that it is to unmap; None after the last batch.

        Raises:
            GyreError: the step failed, or the session has ended.
            Draining: the daemon is stopping, and nothing is left to send.
        """
        while True:
            if self._ended:
                raise self._ended
            if left := self._arenas.take_left():
                return left
            if sent := self.ready_group(max_batches):
                return sent
            if self.consumer.at_end:
                return None
            if self._draining and (self.consumer.num_begun == 0 or not self.credits):
                raise Draining(
                    "the daemon is stopping; open the session again with the last cursor, here "
                    "after its restart or elsewhere"
                )
            await self._wait_until_sendable()

    @property
    def head_is_whole(self) -> bool:
        """Whether the next step is ready and did not fail."""
        return self.consumer.is_ready and not self._streams.has_failed(self.consumer)

    def ready_group(self, max_batches: int = _MAX_CREDITS) -> Sent | None:
        """Batches of the next steps that can be sent now, all in one slot; None if there are none.

        Raises:
            GyreError: the step failed.
        """
        if not self.credits or not self.consumer.is_ready:
            return None
        taken = self._streams.take(self.consumer, min(self.credits, max_batches))
        if isinstance(taken, Exception):
            raise taken
        is_leaving = self._streams.arenas_of(self.consumer).is_leaving(taken.slot)
        number = self._arenas.number(taken.slot.arena, is_leaving=is_leaving)
        if not self.shares_arena:
            self.payloads.add(taken)
        if number is None:
            raise LeaseExpired(
                "the client left the side channel, which gives it the memory of its batches; open "
                "the session again"
            )
        self.credits -= len(taken.plan)
        self._count(taken)
        return Sent(taken, number)

    def drain(self) -> None:
        """Begin no further step; batches in flight are still sent as far as there is credit."""
        self._draining = True
        self._streams.state.drain()
        self._sendable.set()

    def end(self, reason: GyreError) -> None:
        """End the session and give its memory back; a client that waits gets the reason.

        Batches that the client holds in arenas of a stream that others still read are released only
        when the client has left the side channel.
        """
        if self._ended:
            return
        self._ended = reason
        self.payloads.close()
        self._streams.leave(self.consumer)
        # the callback refers to no session: a client may stay connected for long
        release = partial(self._streams.release_all, self.consumer)
        self._arenas.end(release, holds=self._streams.are_held(self.consumer))
        self._resources.budget.give_back(self.share.reserved_bytes)
        self._sendable.set()

    def halve(self) -> bool:
        """Give half of the reserved memory back, down to `least_bytes`; False if it can give none.

        Batches that its client holds stay in memory until they are released.
        """
        before = self.share.reserved_bytes
        share = self.request.wanted_share(max(before // 2, self.least_bytes), scarce=True)
        if self._ended or share.reserved_bytes >= before:
            return False
        self.share = share
        self._streams.resize(self.consumer, share)
        self._resources.budget.give_back(before - share.reserved_bytes)
        return True

    def _held_in(self, arena: Arena) -> Sequence[int]:
        return () if self._ended else self._streams.held_in(self.consumer, arena)

    def _count(self, group: BatchGroup) -> None:
        reader, num_bytes = self.request.reader, group.num_bytes
        self.shuffle.add(
            group.plan, lambda step: self.planner.first_place(step, reader.rank, reader.world_size)
        )
        metrics = self._resources.metrics
        metrics.num_batches_sent += len(group.plan)
        metrics.num_bytes_sent += num_bytes
        metrics.num_substitutes_sent += group.plan.num_substitutes
        self._account.sent(len(group.plan), num_bytes, group.plan.num_substitutes)

    def _note_window(self) -> None:
        """Note how full the window is. Batches behind one that is missing do not count as ready."""
        if self._ended:
            return
        consumer, size = self.consumer, self.window_size
        is_ready = consumer.is_ready
        num_left = size if self.num_steps is None else self.num_steps - consumer.next_step
        self._account.window.note(
            self._resources.clock(),
            consumer.num_ready if is_ready else 0,
            min(size, num_left),
            self.credits,
            is_head_ready=is_ready,
            storage_share=self._streams.running[consumer.stream].storage_share.value,
        )

    async def _wait_until_sendable(self) -> None:
        self._note_window()
        # starved: nothing is ready, and the client has taken more than half of its queue
        most_queued = min(self._most_credits, self._granted.num_queued)
        is_starved = self.credits > most_queued // 2 and not self.consumer.is_ready
        self._streams.set_starved(self.consumer, is_starved=is_starved)
        self._sendable.clear()
        try:
            await self._sendable.wait()
        finally:
            self.consumer.is_starved = False
