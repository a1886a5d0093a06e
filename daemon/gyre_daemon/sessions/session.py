"""Sessions: one for each rank of each job, or for each of its peers.

A session sends its client the batches that a shared stream has fetched, in the order of their
steps, each once. A step that failed raises its error when its turn comes and not before. Losing a
session loses nothing, because its client has the cursor and opens another.

Each session has reserved enough memory to continue in a separate stream, together with its peers
([Note: Peers of a data rank] in `shared_stream`); [Note: Sharing a stream] in `stream_state` has
the cases. It ends when its steps end, when its lease runs out, or when a newer session of the same
peer takes over.
"""

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from gyre_protos.text import counted
from msgspec import Struct

from gyre_daemon.errors import Draining, GyreError, InvalidRequest, LeaseExpired
from gyre_daemon.fetching.fetch import BatchGroup
from gyre_daemon.fetching.prefetch import Spec
from gyre_daemon.memory.arenas import Arena
from gyre_daemon.memory.sidechannel import Peer
from gyre_daemon.monitoring.metrics import Lately, Occupancy, Recorder, SessionGauges, SessionTotals
from gyre_daemon.order.planner import BatchPlanner, ShuffleQuality
from gyre_daemon.runtime.threads import Flow
from gyre_daemon.sessions.session_request import InUse, SessionRequest
from gyre_daemon.sessions.shared_stream import DaemonResources, DataRank, SharedStreams
from gyre_daemon.sessions.stream_state import Consumer


class SessionAccount:
    """The counts of a session since it was opened; all times are of one monotonic clock.

    Attributes:
        window: how long the prefetch window was how full.
    """

    def __init__(self, now: float) -> None:
        """The session is opened `now`, in seconds."""
        self.window = Occupancy(now)
        self._recorder = Recorder(now)
        self._num_batches = self._num_bytes = self._num_substitutes = 0
        self._trainer_waited_s = 0.0

    def totals(self, now: float) -> SessionTotals:
        """All counts up to `now`."""
        return SessionTotals(
            self._num_batches,
            self._num_bytes,
            self.window.at(now),
            self._trainer_waited_s,
            self._num_substitutes,
        )

    def lately(self, now: float) -> Lately:
        """The rates of the last ten seconds."""
        return self._recorder.at(now, self.totals(now))

    def sent(self, num_batches: int, num_bytes: int, num_substitutes: int = 0) -> None:
        """Count batches sent, with that much payload and that many substitutes."""
        self._num_batches += num_batches
        self._num_bytes += num_bytes
        self._num_substitutes += num_substitutes

    def trainer_waited(self, waited_s: float) -> None:
        """Add the time that a client reports its trainer waited; ignore invalid times."""
        if 0 < waited_s < math.inf:
            self._trainer_waited_s += waited_s

    def heard(self, now: float, num_taken: int) -> None:
        """The client has sent a message.

        Args:
            now: when it came.
            num_taken: how many batches its trainer has taken since the session was opened. With 0
                the client does not say, and all batches that were sent count.
        """
        if self._recorder.is_due(now):
            totals = self.totals(now)
            self._recorder.mark(now, num_taken or totals.num_batches, totals)


class PayloadQueue:
    """The payloads of one session in their order.

    Each holds a lease of its arena until it was sent, or until the queue is closed.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Arena, memoryview]] = deque()
        self._sending: tuple[Arena, memoryview] | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(self, group: BatchGroup) -> None:
        """Append the payload of each batch; none where the memory has been given back."""
        arena = group.slot.arena
        for payload in group.payloads:
            if arena.acquire():
                self._waiting.append((arena, payload))
        self._changed.set()

    async def next(self) -> int:
        """The last payload was sent; wait for the next one.

        Returns:
            Its length in bytes; 0 after `close`.
        """
        self._sent()
        while not self._waiting and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            return 0
        self._sending = self._waiting.popleft()
        return self._sending[1].nbytes

    def part(self, begin: int, num_bytes: int) -> memoryview | None:
        """At most `num_bytes` of the payload from `begin` on, to be copied at once.

        None after `close`.
        """
        return self._sending[1][begin : begin + num_bytes] if self._sending else None

    def close(self) -> None:
        """Stop queueing payloads: the reader is gone."""
        self._is_closed = True
        self._sent()
        while self._waiting:
            self._waiting.popleft()[0].release()
        self._changed.set()

    def _sent(self) -> None:
        if self._sending:
            self._sending[0].release()
            self._sending = None


class LeftArenas(Struct, frozen=True):
    """Arenas that a client is to unmap, by its numbers for them."""

    numbers: Collection[int]


class ClientArenas:
    """The arenas that one client maps, by the number that it knows them by.

    There are none before `share`; its batches are then copied to it.
    """

    def __init__(
        self, held_in: Callable[[Arena], Sequence[int]], on_news: Callable[[], None]
    ) -> None:
        """Nothing is mapped.

        Args:
            held_in: the first steps of the batches in an arena that the client holds.
            on_news: called when there is an arena that the client is to unmap.
        """
        self._held_in = held_in
        self._on_news = on_news
        self._session_id = ""
        self._peer: Peer | None = None
        self._on_gone: Callable[[], None] = lambda: None
        self._numbers: dict[Arena, int] = {}
        self._num_shown = 0
        # until the client has unmapped them and moved out the batches with these first steps
        self._leaving: dict[int, tuple[Arena | None, Sequence[int]]] = {}
        self._left: list[int] = []  # the client is not yet told to unmap them

    @property
    def are_shared(self) -> bool:
        """Whether the client maps arenas, so that batches are not copied to it."""
        return self._peer is not None

    def share(self, session_id: str, peer: Peer, first: Arena, on_gone: Callable[[], None]) -> bool:
        """Let a client map the arenas from the first on; False if the side channel fails.

        `on_gone` is called when the client leaves the side channel before the session's `end`.
        """
        self._session_id, self._on_gone = session_id, on_gone
        if not peer.is_full and self._shown(peer, first) is not None:
            self._peer = peer
            peer.when_gone(self._peer_gone)
        return self.are_shared

    def number(self, arena: Arena) -> int | None:
        """The client's number for an arena, which is handed over if the client lacks it.

        Args:
            arena: of the batches that the client is sent now. If it is closed, the client is to
                move them out and to unmap it.

        Returns:
            0 if the client maps nothing; None if it has left the side channel.
        """
        if self._peer is None:
            return 0
        number = self._shown(self._peer, arena)
        if arena.is_closed:
            self._arena_left(arena)
        return number

    def take_left(self) -> LeftArenas | None:
        """The arenas that the client must be told to unmap; None if empty."""
        left, self._left = self._left, []
        return LeftArenas(left) if left else None

    def unmapped(self, numbers: Collection[int]) -> list[int]:
        """Note that the client has unmapped these; the first steps that it no longer holds."""
        steps: list[int] = []
        for number in numbers:
            arena, moved = self._leaving.pop(number, (None, ()))
            if arena:
                arena.remove_client(self._arena_left)
            steps += moved
        return steps

    def end(self, release: Callable[[], None], *, holds: bool) -> None:
        """Call `release` once the client reads no shared memory any more.

        That is now if it maps no arena, or `holds` none that another process reads. Nothing else of
        the session is kept until the client leaves the side channel.
        """
        peer, self._peer = self._peer, None
        if peer:
            peer.forget(self._peer_gone)
            self._remove()
        if peer and holds:
            peer.when_gone(release)
        else:
            release()

    def _shown(self, peer: Peer, arena: Arena) -> int | None:
        number = self._numbers.get(arena)
        if number is None and peer.hand_over(self._session_id, self._num_shown, arena):
            number = self._numbers[arena] = self._num_shown
            self._num_shown += 1
            arena.add_client(self._arena_left)
        return number

    def _arena_left(self, arena: Arena) -> None:
        """Ask the client to unmap an arena; if it is shown again later, it gets another number."""
        number = self._numbers.pop(arena, None)
        if number is not None:
            self._leaving[number] = arena, self._held_in(arena)
            self._left.append(number)
            self._on_news()

    def _peer_gone(self) -> None:
        self._on_gone()
        self._remove()

    def _remove(self) -> None:
        arenas = [*self._numbers, *(arena for arena, _ in self._leaving.values() if arena)]
        self._numbers.clear()
        # a client whose side channel broke may still say that it has moved batches out
        self._leaving = {number: (None, steps) for number, (_, steps) in self._leaving.items()}
        for arena in arenas:
            arena.remove_client(self._arena_left)


_MAX_CREDITS = 1 << 20


class Sent(Struct, frozen=True):
    """Batches sent to a client together.

    Attributes:
        group: the batches, all in one slot.
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
        request: that of its client.
        quality: how well its order shuffles.
        attached: whether the control stream of a client is connected to it.
        credits: how many more batches may be sent to the client.
        cursors: encodes the cursor of each batch.
        first_step: the first step to send.
        num_steps: the step after the last; None for a session without end.
        rank: its data rank, which has reserved memory for all its peers.
        peer: where it stands in the batches of the data rank.
        payloads: of the batches that it sends through gRPC.
    """

    def __init__(
        self,
        request: SessionRequest,
        planner: BatchPlanner,
        quality: ShuffleQuality,
        flow: Flow,
        resources: DaemonResources,
        in_use: Iterable[InUse] = (),
    ) -> None:
        """Join its peers; or take memory and join a shared stream.

        Raises:
            InvalidRequest: the cursor stands behind the end.
            Overloaded: the budget has no memory for it now.
        """
        self.planner = planner
        self.session_id = secrets.token_hex(16)
        self.handle = secrets.token_hex(4)
        self._num_taken = 0  # batches, since the session was opened
        self.request = request
        self.quality = quality
        self.attached = False
        self.credits = 0
        self._most_credits = 0
        self._resources = resources
        self.cursors = request.start_cursor().encoder()
        self.first_step, self.num_steps = _steps(request, planner)
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
        num_epochs = request.iteration_epochs
        iteration_stop = planner.iteration_stop(self.first_step, num_epochs) if num_epochs else None
        rank = joinable_rank(request, planner, flow, resources)
        if rank is None:
            share, reader = resources.reservations.take(request, in_use), request.reader
            spec = _spec(request, planner)
            streams = resources.streams.setdefault(spec.key, SharedStreams(spec, resources))
            consumer = Consumer(self.first_step, self.num_steps, share, iteration_stop)
            has_peers = reader.peer is not None
            rank = DataRank(streams, consumer, flow, reader.fence, may_have_peers=has_peers)
        self.rank, self._streams, self._granted = rank, rank.streams, rank.share
        self.peer = rank.join(request.reader.peer, self.first_step, self._sendable.set, self.end)
        self.read_until(iteration_stop)
        if len(rank.peers) == 1:
            self._streams.join(rank.consumer, rank)

    async def start(self) -> None:
        """Wait until the first arena of its stream is there.

        Raises:
            Overloaded: the machine does not have the memory.
        """
        await self._streams.running[self.rank.consumer.stream].has_started.wait()
        if self._ended:
            raise self._ended
        self._has_started = True
        self.renew()

    @property
    def next_step(self) -> int:
        """The step that it sends next."""
        return self.peer.next_step

    @property
    def window_batches(self) -> int:
        """The prefetch window of its shared stream, in batches."""
        return 0 if self._ended else self.rank.consumer.stream.share.window_batches

    @property
    def num_sharing(self) -> int:
        """How many sessions, with itself, take batches from the same shared streams, or will."""
        return self._streams.num_sharing(self.rank.consumer)

    @property
    def held_up_by(self) -> str:
        """The peer that it waits for, for people; empty if it waits for none."""
        peer = self.rank.held_up_by(self.peer)
        return (
            f"peer {peer.number}, which is {counted(peer.num_taken, 'batch')} behind"
            if peer
            else ""
        )

    @property
    def num_in_flight(self) -> int:
        """How many batches are being fetched for it."""
        return self.peer.num_begun - self.peer.num_ready

    @property
    def arena_bytes(self) -> int:
        """The size of the first arena of its shared stream."""
        return self._streams.arenas_of(self.rank.consumer).first.num_bytes

    @property
    def max_queued(self) -> int:
        """How many batches its client may have received and not taken."""
        return self._granted.max_queued

    @property
    def num_kept(self) -> int:
        """How many batches its client may go on to use after it took the next."""
        return max(0, self._granted.num_kept - self.rank.num_retained)

    @property
    def reserved_bytes(self) -> int:
        """The memory that it has reserved; 0 if it uses the memory of another peer."""
        stands_for_all = self.rank.peers[:1] in ([], [self.peer])
        return self.rank.share.reserved_bytes if stands_for_all else 0

    @property
    def in_use(self) -> InUse:
        """Whose memory it has reserved, and how many bytes."""
        return self.request.owner.name, self.reserved_bytes

    @property
    def gauges(self) -> SessionGauges:
        """Its present state."""
        has_memory = self.reserved_bytes and not self._ended
        arenas = self._streams.arenas_of(self.rank.consumer) if has_memory else None
        return SessionGauges(
            num_ready=self.peer.num_ready,
            num_held=self.peer.num_held,
            window_batches=self.window_batches,
            memory_bytes=arenas.held_bytes if arenas else 0,
            memory_limit_bytes=self.reserved_bytes,
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

    @property
    def resume_step(self) -> int:
        """The first step that the trainer has not taken, as far as its client says."""
        return self.first_step + self._num_taken if self._num_taken else self.next_step

    def cursor_at(self, step: int) -> bytes:
        """The cursor of a client that consumed all steps before `step`."""
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
        self._num_taken = max(self._num_taken, num_taken)
        self._account.heard(self._seen, num_taken)

    def add_credit(self, num_batches: int, waited_s: float = 0.0) -> None:
        """Allow this many more batches; the client's trainer stood still for `waited_s`."""
        self.credits += min(num_batches, _MAX_CREDITS - self.credits)
        self._most_credits = max(self._most_credits, self.credits)
        self._account.trainer_waited(waited_s)
        self._note_window()
        self._sendable.set()

    def read_until(self, step: int | None) -> None:
        """Begin no step from this one on, unless another peer wants it; None for no bound."""
        if not self._ended:
            self.rank.read_until(self.peer, step)

    def release(self, first_step: int) -> None:
        """Release the batches that the client was sent together from this step on.

        A second release of the same step changes nothing.
        """
        if not self._ended:
            self.rank.release(self.peer, first_step)

    def share_arenas(self, peer: Peer, on_gone: Callable[[], None]) -> bool:
        """Let the client map the arenas of its batches; False if the side channel fails.

        `on_gone` is called when the client leaves the side channel before the session has ended.
        """
        if self._ended:
            return False
        first = self._streams.arenas_of(self.rank.consumer).first
        return self._arenas.share(self.session_id, peer, first, on_gone)

    @property
    def shares_arena(self) -> bool:
        """Whether the client maps arenas, so that batches are not copied to it."""
        return self._arenas.are_shared

    def unmapped(self, arenas: Collection[int]) -> None:
        """The client has unmapped these arenas and moved out the batches that it still needed."""
        for step in self._arenas.unmapped(arenas):
            self.release(step)

    def renew_grant(self) -> bool:
        """Take over `max_queued` and `num_kept` as they are now; whether they have changed."""
        before, self._granted = self._granted, self.rank.consumer.stream.share
        return self._granted != before

    async def next_news(self, max_batches: int = _MAX_CREDITS) -> Sent | LeftArenas | None:
        """Wait for the next news for the client.

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
            if self.peer.at_end:
                return None
            if self._draining and (self.peer.num_begun == 0 or not self.credits):
                raise Draining(
                    "the daemon is stopping; open the session again with the last cursor, here "
                    "after its restart or elsewhere"
                )
            await self._wait_until_sendable()

    @property
    def head_is_whole(self) -> bool:
        """Whether the next step is ready and did not fail."""
        return self.peer.is_ready and not self.peer.has_failed

    def ready_group(self, max_batches: int = _MAX_CREDITS) -> Sent | None:
        """Batches of the next steps that can be sent now, all in one slot; None if there are none.

        Raises:
            GyreError: the step failed.
        """
        if not self.credits or not self.peer.is_ready:
            return None
        taken = self.rank.take(self.peer, min(self.credits, max_batches))
        if isinstance(taken, Exception):
            raise taken
        arena = taken.slot.arena
        number = self._arenas.number(arena)
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
        self.rank.leave(self.peer)
        # the callback refers to no session: a client may stay connected for long
        release = partial(self.rank.release_all, self.peer)
        self._arenas.end(release, holds=self.peer.holds_shared)
        if not self.rank.peers:
            self._resources.reservations.give_back(self.request, self.rank.share)
        self._sendable.set()

    def _held_in(self, arena: Arena) -> Sequence[int]:
        return () if self._ended else self.peer.held_in(arena)

    def _count(self, group: BatchGroup) -> None:
        num_bytes = group.num_bytes
        metrics = self._resources.metrics
        metrics.num_batches_sent += len(group.plan)
        metrics.num_bytes_sent += num_bytes
        metrics.num_substitutes_sent += group.plan.num_substitutes
        self._account.sent(len(group.plan), num_bytes, group.plan.num_substitutes)

    def _note_window(self) -> None:
        """Note how full the window is. Batches behind a missing one do not count as ready."""
        if self._ended:
            return
        peer, size = self.peer, self.window_batches
        is_ready = peer.is_ready
        ends = [
            each for each in (self.num_steps, self.rank.consumer.read_until) if each is not None
        ]
        num_left = max(0, min(ends, default=peer.next_step + size) - peer.next_step)
        self._account.window.note(
            self._resources.clock(),
            min(peer.num_ready, size) if is_ready else 0,
            min(size, num_left),
            self.credits,
            is_head_ready=is_ready,
            storage_share=self._streams.running[self.rank.consumer.stream].storage_share.value,
        )

    async def _wait_until_sendable(self) -> None:
        self._note_window()
        # starved: nothing is ready, and the client has taken more than half of its queue
        most_queued = min(self._most_credits, self._granted.max_queued)
        is_starved = self.credits > most_queued // 2 and not self.peer.is_ready
        self.rank.set_starved(self.peer, is_starved=is_starved)
        self._sendable.clear()
        try:
            await self._sendable.wait()
        finally:
            self.rank.fed(self.peer)


def joinable_rank(
    request: SessionRequest, planner: BatchPlanner, flow: Flow, resources: DaemonResources
) -> DataRank | None:
    """The data rank of the session's peers, if it has one that it can join."""
    streams = resources.streams.get(_spec(request, planner).key)
    ranks = streams.ranks.values() if streams else ()
    number, steps = request.reader.peer, _steps(request, planner)
    return next(
        (
            each
            for each in ranks
            if each.flow is flow
            and each.fence == request.reader.fence
            and each.may_join(number, *steps)
        ),
        None,
    )


def _spec(request: SessionRequest, planner: BatchPlanner) -> Spec:
    ranks = request.reader.rank, request.reader.world_size
    wished, balance = request.prefetch_batches, request.balance
    return Spec(request.dataset, request.order, *ranks, planner, wished, balance)


def _steps(request: SessionRequest, planner: BatchPlanner) -> tuple[int, int | None]:
    """The first step to send, and the step after the last; None for a session without end."""
    order, position = request.order, request.start_cursor().position
    first_step = order.batch_of(position // order.global_batch_size)
    return first_step, planner.num_steps(request.num_epochs) if request.num_epochs else None
