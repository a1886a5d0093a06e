"""Sessions: one for each rank of each job. A session delivers what a feed fetched, and holds nothing worth keeping.

What it promises: batches come in the order of their steps, each once; a step that fails raises when its turn comes and not
before; its memory stays within its share; it ends when its stream ends, when its lease runs out, or when a newer one takes
over. Sessions that want the same batches read along in one feed; each has reserved what it needs to go on by itself.
"""

import asyncio
import math
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gyre_daemon.errors import Draining, GyreError, InvalidRequest, LeaseExpired
from gyre_daemon.fetching.fetch import Strip
from gyre_daemon.fetching.prefetch import Spec
from gyre_daemon.fetching.window import View
from gyre_daemon.memory.arena import Arena
from gyre_daemon.memory.budget import Budget
from gyre_daemon.memory.share import Share
from gyre_daemon.memory.sidechannel import Peer, ShownArenas
from gyre_daemon.monitoring.jobs import SessionTotals
from gyre_daemon.monitoring.lately import Lately, Recorder
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.monitoring.occupancy import Occupancy
from gyre_daemon.order.plan import Plan
from gyre_daemon.order.quality import ShuffleMeter
from gyre_daemon.runtime.fair import Flow
from gyre_daemon.sessions.feed import Machinery
from gyre_daemon.sessions.news import LeftArenas, Sent
from gyre_daemon.sessions.path import Path
from gyre_daemon.sessions.request import SessionRequest
from gyre_daemon.sessions.unsent import Unsent

_MAX_CREDITS = 1 << 20


@dataclass(frozen=True, slots=True)
class SessionEnvironment:
    """What all sessions of a daemon share."""

    machinery: Machinery
    metrics: Metrics
    lease_s: float

    @property
    def budget(self) -> Budget:
        """Of which each session has a share."""
        return self.machinery.budget


@dataclass(slots=True)
class SessionCounts:
    """What a session has done, for its state."""

    num_batches_sent: int = 0
    num_bytes_sent: int = 0
    trainer_waited_s: float = 0.0  # as its client tells


class Session:
    """One rank's stream of batches."""

    def __init__(self, request: SessionRequest, plan: Plan, flow: Flow, environment: SessionEnvironment) -> None:
        """Check the request, reserve memory and begin to fetch, or to read along.

        Raises:
            InvalidRequest, CursorRejected: the request makes no sense or does not fit its dataset.
            Overloaded: there is no memory for it now.
        """
        request.check()
        order, reader = request.order, request.reader
        self.plan = plan
        self.session_id = secrets.token_hex(16)
        self.request = request
        self.counts = SessionCounts()
        self.shuffle = ShuffleMeter(plan.num_samples)
        self.attached = False
        self.credits = 0
        self._most_credits = 0
        self._environment = environment
        cursor = request.start_cursor()
        self.cursors = cursor.encoder()
        self.first_step = cursor.position // order.global_batch_size
        self.num_steps = self.plan.num_steps(request.num_epochs) if request.num_epochs else None
        if self.num_steps is not None and self.first_step > self.num_steps:
            raise InvalidRequest(
                f"the cursor stands at step {self.first_step}, after the stream's end at step {self.num_steps}"
            )
        self._shown: ShownArenas | None = None
        self._left: list[int] = []  # arenas that the client is not yet told to unmap
        self._moved: dict[int, list[int]] = {}  # what it has moved out of an arena once that is unmapped, by first steps
        self._unsent = Unsent()
        self._sendable = asyncio.Event()
        self._ended: GyreError | None = None
        self._draining = False
        self._seen = environment.machinery.clock()
        self._occupancy = Occupancy(self._seen)
        self._recorder = Recorder(self._seen)
        self.share = self._granted = self._reserve()
        spec = Spec(request.dataset, order, reader.rank, reader.world_size, plan, request.prefetch_batches)
        self._path = Path(self, spec, self.share, (self.first_step, self.num_steps), flow, environment.machinery)

    async def start(self) -> None:
        """Wait until the memory is there.

        Raises:
            Overloaded: the machine has no such memory.
        """
        await self._path.feed.started()
        if self._ended:
            raise self._ended

    def share_arenas(self, peer: Peer) -> bool:
        """From now on batches are read where they lie; False where the client cannot be reached so."""
        shown = ShownArenas(self.session_id, peer, self._arena_left)
        if not self._ended and shown.number(self._path.feed.arenas.first) is not None:
            self._shown = shown
        return self.shares_arena

    @property
    def shares_arena(self) -> bool:
        """Batches are not copied to the client."""
        return self._shown is not None

    @property
    def view(self) -> View:
        """Where it stands in the feed that it reads from now."""
        return self._path.view

    @property
    def num_held(self) -> int:
        """Batches sent and not released."""
        return self._path.num_held

    @property
    def window_size(self) -> int:
        """How many batches its feed may be ahead now."""
        return self._path.feed.window.size

    @property
    def arena_bytes(self) -> int:
        """Of the first arena that batches lie in."""
        return self._path.feed.arenas.first.num_bytes

    def unmapped(self, arenas: Collection[int]) -> None:
        """The client has these arenas no longer, and needs nothing that it was sent there before it was told."""
        for number in arenas:
            if self._shown:
                self._shown.unmapped(number)
            for step in self._moved.pop(number, []):
                self.release(step)

    def _arena_left(self, arena: Arena, number: int) -> None:
        if not self._ended:
            self._moved[number] = self._path.held_in(arena)
            self._left.append(number)
            self._sendable.set()

    def new_grant(self) -> Share | None:
        """What its client may have from now on, where that is not what it was told last."""
        extent = self._path.feed.arenas.extent
        if extent == self._granted:
            return None
        self._granted = extent
        return extent

    @property
    def num_sharing(self) -> int:
        """Sessions that take batches from its feed."""
        return self._path.feed.num_subscribers

    @property
    def memory_bytes(self) -> int:
        """Held by batches of its feed now."""
        return self._path.feed.arenas.held_bytes

    @property
    def totals(self) -> SessionTotals:
        """What it has done up to now."""
        times = self._occupancy.at(self._environment.machinery.clock())
        return SessionTotals(self.counts.num_batches_sent, self.counts.num_bytes_sent, times, self.counts.trainer_waited_s)

    @property
    def lease_left_s(self) -> float:
        """Until the session is lost, unless its client is heard of."""
        return self._seen + self._environment.lease_s - self._environment.machinery.clock()

    def cursor_at(self, step: int) -> bytes:
        """The cursor of a client that has consumed all steps before `step`."""
        return self.cursors.encode(step * self.request.order.global_batch_size)

    def attach(self) -> None:
        """A client's stream takes the session over.

        Raises:
            InvalidRequest: another stream has it.
        """
        if self.attached:
            raise InvalidRequest("the session has a stream already; open another session")
        self.attached = True
        self.renew()

    @property
    def lately(self) -> Lately:
        """What it did in the last seconds."""
        return self._recorder.at(self._environment.machinery.clock(), self.totals)

    def renew(self, num_taken: int = 0) -> None:
        """The client was heard of; its trainer has taken so many batches. One that does not say has taken what was sent."""
        self._seen = self._environment.machinery.clock()
        if self._recorder.is_due(self._seen):
            totals = self.totals
            self._recorder.mark(self._seen, num_taken or totals.num_batches, totals)

    def add_credit(self, num_batches: int, waited_s: float = 0.0) -> None:
        """The client takes so many batches more; its trainer stood still for so long."""
        self.credits += min(num_batches, _MAX_CREDITS - self.credits)
        self._most_credits = max(self._most_credits, self.credits)
        if 0 < waited_s < math.inf:
            self.counts.trainer_waited_s += waited_s
        self._note_window()
        self._sendable.set()

    def release(self, first_step: int) -> None:
        """The client no longer needs the strip that it got from this step on; a second release changes nothing."""
        if not self._ended:
            self._path.release(first_step)

    async def next_news(self, max_batches: int = _MAX_CREDITS) -> Sent | LeftArenas | None:
        """What the client is told next.

        Batches of the next steps, from one to so many, once they are whole and have credit; arenas that it is to unmap; None
        after the last batch.

        Raises:
            GyreError: the step failed, or the session ended; Draining where the daemon wants to stop and nothing is left to
            send.
        """
        while True:
            if self._ended:
                raise self._ended
            if self._left:
                left, self._left = self._left, []
                return LeftArenas(left)
            if sent := self.ready_strip(max_batches):
                return sent
            if self._path.at_end:
                return None
            if self._drained:
                raise Draining(
                    "the daemon is stopping; open the session again with the last cursor, here after its restart or elsewhere"
                )
            await self._wait_until_sendable()

    def ready_strip(self, max_batches: int = _MAX_CREDITS) -> Sent | None:
        """Batches of the next steps that can be sent now, and lie in one piece of memory.

        Raises:
            GyreError: the step failed.
        """
        if not self.credits or not self._path.head_is_ready:
            return None
        taken = self._path.take(min(self.credits, max_batches))
        if isinstance(taken, Exception):
            raise taken
        number: int | None = 0
        if self._shown is None:
            self._unsent.add(taken)
        else:
            number = self._shown.number(taken.slot.arena)
            if self._path.feed.arenas.is_leaving(taken.slot):
                self._shown.arena_left(taken.slot.arena)  # the client moves the batches out once it has them
        if number is None:
            raise LeaseExpired("the client left the side channel, where it gets its batches' memory; open the session again")
        self.credits -= len(taken.plan)
        self._count(taken)
        return Sent(taken, number)

    @property
    def head_is_whole(self) -> bool:
        """The next step is ready and did not fail."""
        return self._path.head_is_whole

    async def next_payload(self) -> int:
        """Go on to the next batch that `next_news` gave, for the stream that carries payload.

        Returns:
            Its length in bytes; 0 after the session's last.
        """
        return await self._unsent.next()

    def payload_part(self, begin: int, num_bytes: int) -> memoryview | None:
        """So many bytes of it, or what is left; None where the session has ended meanwhile."""
        return self._unsent.part(begin, num_bytes)

    def drain(self) -> None:
        """Begin no further step; send what is under way as far as the client has credit for it."""
        self._draining = True
        self._path.drain()
        self._sendable.set()

    def end(self, reason: GyreError) -> None:
        """Stop for good and give the memory back; whoever waits for a batch gets the reason.

        What the client may still read in an arena that others go on with stays untouched until it has let go of it.
        """
        if self._ended:
            return
        self._ended = reason
        self._unsent.close()
        self._path.leave(self._shown.when_unread if self._shown else _at_once)
        self._shown = None
        self._environment.budget.give_back(self.share.reserved_bytes)
        self._sendable.set()

    @property
    def least_bytes(self) -> int:
        """What it cannot do without."""
        least_bytes = self.request.least_bytes(self._environment.machinery.arena_limit_bytes)
        return min(self.share.reserved_bytes, max(least_bytes, self.share.reserved_for(self._path.first_arena_bytes)))

    def halve(self) -> bool:
        """Have half of the memory, for others to have it; no less than for a few batches. False where it has no more.

        What its client was given stays until it is released.
        """
        before = self.share.reserved_bytes
        share = self.request.wanted_share(max(before // 2, self.least_bytes), scarce=True)
        if self._ended or share.reserved_bytes >= before:
            return False
        self.share = share
        self._path.reshape(share)
        self._environment.budget.give_back(before - share.reserved_bytes)
        return True

    def wake(self) -> None:
        """The batch it sends next is ready."""
        self._sendable.set()

    @property
    def _is_short(self) -> bool:
        """Its client has taken more than half of what it queues, and may soon have nothing to go on with."""
        return self.credits > min(self._most_credits, self._granted.num_queued) // 2

    @property
    def _drained(self) -> bool:
        return self._draining and (self._path.view.num_begun == 0 or not self.credits)

    def _reserve(self) -> Share:
        """What it wants; where that is more than half of what there is, less."""
        request, budget = self.request, self._environment.budget
        limit_bytes = self._environment.machinery.arena_limit_bytes
        share = request.wanted_share(limit_bytes)
        if share.reserved_bytes > budget.free_bytes // 2:
            share = request.scarce_share(limit_bytes, budget.free_bytes)
        budget.reserve(share.reserved_bytes, f"a session on `{request.dataset.name}`")
        return share

    def _count(self, strip: Strip) -> None:
        reader, num_bytes = self.request.reader, strip.num_bytes
        self.shuffle.add(strip.plan, lambda step: self.plan.first_place(step, reader.rank, reader.world_size))
        for counts in (self.counts, self._environment.metrics):
            counts.num_batches_sent += len(strip.plan)
            counts.num_bytes_sent += num_bytes

    def _note_window(self) -> None:
        """Batches behind one that is missing cannot be sent, and do not count as ready here."""
        if self._ended:
            return
        view = self._path.view
        is_head_ready = view.head_is_sealed
        num_left = self.window_size if self.num_steps is None else self.num_steps - view.next_to_send
        self._occupancy.note(
            self._environment.machinery.clock(),
            view.num_ready if is_head_ready else 0,
            min(self.window_size, num_left),
            self.credits,
            is_head_ready=is_head_ready,
            storage_share=self._path.feed.storage_share.value,
        )

    async def _wait_until_sendable(self) -> None:
        self._note_window()
        self._path.is_starved = self._is_short and not self._path.head_is_ready
        if self._path.is_starved:
            self._path.feed.look_again()
        self._sendable.clear()
        try:
            await self._sendable.wait()
        finally:
            self._path.is_starved = False


def _at_once(act: Callable[[], None]) -> None:
    """Nobody reads memory of the daemon: the client has copies."""
    act()
