"""Sessions: one for each rank of each job. A session delivers what a feed fetched, and holds nothing worth keeping.

What it promises: batches come in the order of their steps, each once; a step that fails raises when its turn comes and not
before; its memory stays within its share; it ends when its stream ends, when its lease runs out, or when a newer one takes
over. Sessions that want the same batches read along in one feed; each has reserved what it needs to go on by itself.
"""

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

from gyre_daemon.arena import Arena, Budget, Share, divide
from gyre_daemon.batch import max_batch_bytes
from gyre_daemon.cursor import Cursor, check_cursor, decode_cursor
from gyre_daemon.dataset import Dataset
from gyre_daemon.errors import Draining, GyreError, InvalidRequest, LeaseExpired
from gyre_daemon.fair import FairExecutor, Flow
from gyre_daemon.feed import Feed, Machinery, Spec, Subscription
from gyre_daemon.fetch import Batch
from gyre_daemon.jobs import SessionTotals
from gyre_daemon.metrics import Metrics
from gyre_daemon.occupancy import Occupancy
from gyre_daemon.plan import Order, Plan, check_ranks
from gyre_daemon.sidechannel import Peer
from gyre_daemon.window import View

MAX_PREFETCH_BATCHES = 1024
MAX_EPOCHS = 1 << 32
_MAX_CREDITS = 1 << 20
_AHEAD_BYTES, _MIN_AHEAD, _MAX_AHEAD = 8 << 20, 4, 64  # the window, unless it is asked for
_REACH = 4  # so many windows behind another feed, a session may still catch up with it

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads.

    Attributes:
        job: the job's name.
        rank: in `[0, world_size)`.
        world_size: ranks of the job.
        generation: grows with every attempt of the same rank; the newest wins.
    """

    job: str
    rank: int
    world_size: int
    generation: int


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a client asks for.

    Attributes:
        dataset: open.
        order: how to go through it.
        reader: for whom.
        num_epochs: after which the stream ends; 0 for never.
        cursor: encoded; empty for the beginning.
        prefetch_batches: size of the window; 0 to let the size of a batch decide.
    """

    dataset: Dataset
    order: Order
    reader: Reader
    num_epochs: int
    cursor: bytes
    prefetch_batches: int

    @property
    def spec(self) -> Spec:
        """What is to be fetched."""
        return Spec(self.dataset, self.order, self.reader.rank, self.reader.world_size)


@dataclass(frozen=True, slots=True)
class SessionEnvironment:
    """What all sessions of a daemon share.

    Attributes:
        feeds: those that a session may still join.
    """

    budget: Budget
    workers: FairExecutor
    metrics: Metrics
    session_limit_bytes: int
    lease_s: float
    clock: Clock = time.monotonic
    feeds: WeakSet[Feed] = field(default_factory=WeakSet)

    @property
    def machinery(self) -> Machinery:
        """What feeds need of it."""
        return Machinery(self.budget, self.workers, self.session_limit_bytes, self.clock)


@dataclass(slots=True)
class SessionCounts:
    """What a session has done, for its state."""

    num_batches_sent: int = 0
    num_bytes_sent: int = 0
    trainer_waited_s: float = 0.0  # as its client tells


class Session:
    """One rank's stream of batches."""

    def __init__(self, request: SessionRequest, flow: Flow, environment: SessionEnvironment) -> None:
        """Check the request, reserve memory and begin to fetch, or to read along.

        Raises:
            InvalidRequest, CursorRejected: the request makes no sense or does not fit its dataset.
            Overloaded: there is no memory for it now.
        """
        reader, order, dataset = request.reader, request.order, request.dataset
        check_ranks(order, reader.rank, reader.world_size)
        if request.num_epochs > MAX_EPOCHS or request.prefetch_batches > MAX_PREFETCH_BATCHES:
            raise InvalidRequest(f"at most {MAX_EPOCHS} epochs and {MAX_PREFETCH_BATCHES} prefetched batches can be asked for")
        self.plan = Plan(order, dataset.num_samples)
        self.session_id = secrets.token_hex(16)
        self.request = request
        self.flow = flow
        self.counts = SessionCounts()
        self.attached = False
        self.credits = 0
        self._environment = environment
        cursor = _start_cursor(request)
        self._encode_cursor = cursor.encoder()
        self.first_step = cursor.position // order.global_batch_size
        self.num_steps = self.plan.num_steps(request.num_epochs) if request.num_epochs else None
        if self.num_steps is not None and self.first_step > self.num_steps:
            raise InvalidRequest(
                f"the cursor stands at step {self.first_step}, after the stream's end at step {self.num_steps}"
            )
        self._peer: Peer | None = None
        self._arena_numbers: dict[Arena, int] = {}
        self._held: dict[int, Subscription] = {}  # where each step that was sent came from, until its release
        self._payloads: deque[Batch] = deque()
        self._sendable = asyncio.Event()
        self._payload_ready = asyncio.Event()
        self._waits_for_storage = False
        self._ended: GyreError | None = None
        self._draining = False
        self._seen = environment.clock()
        self._occupancy = Occupancy(self._seen)
        self.share = self._reserve()
        self._path = self._find_path()  # the feed that it reads from, and the one that it catches up with

    async def start(self) -> None:
        """Wait until the memory is there.

        Raises:
            Overloaded: the machine has no such memory.
        """
        await self._here.feed.started()
        if self._ended:
            raise self._ended

    def share_arenas(self, peer: Peer) -> bool:
        """From now on batches are read where they lie; False where the client cannot be reached so."""
        self._peer = peer
        if self._here.feed.is_closed or self._show(self._here.feed.arenas[0]) is None:
            self._peer = None
        return self.shares_arena

    @property
    def shares_arena(self) -> bool:
        """Batches are not copied to the client."""
        return self._peer is not None

    @property
    def view(self) -> View:
        """Where it stands in the feed that it reads from now."""
        return self._here.view

    @property
    def num_held(self) -> int:
        """Batches sent and not released."""
        return len(self._held)

    @property
    def window_size(self) -> int:
        """How many batches its feed may be ahead now."""
        return self._here.feed.window.size

    @property
    def arena_bytes(self) -> int:
        """Of the first arena that batches lie in."""
        return self._here.feed.arenas[0].num_bytes

    def arena_number(self, batch: Batch) -> int:
        """What the client calls the arena where a batch lies."""
        return self._arena_numbers[batch.slot.arena]

    @property
    def num_sharing(self) -> int:
        """Sessions that take batches from its feed."""
        return self._here.feed.num_subscribers

    @property
    def memory_bytes(self) -> int:
        """Held by batches of its feed now."""
        return self._here.feed.memory_bytes

    @property
    def totals(self) -> SessionTotals:
        """What it has done up to now."""
        times = self._occupancy.at(self._environment.clock())
        return SessionTotals(self.counts.num_batches_sent, self.counts.num_bytes_sent, times, self.counts.trainer_waited_s)

    @property
    def lease_left_s(self) -> float:
        """Until the session is lost, unless its client is heard of."""
        return self._seen + self._environment.lease_s - self._environment.clock()

    @property
    def has_ended(self) -> bool:
        """Its memory may be anybody's."""
        return self._ended is not None

    def cursor_at(self, step: int) -> bytes:
        """The cursor of a client that has consumed all steps before `step`."""
        return self._encode_cursor(step * self.request.order.global_batch_size)

    def attach(self) -> None:
        """A client's stream takes the session over.

        Raises:
            InvalidRequest: another stream has it.
        """
        if self.attached:
            raise InvalidRequest("the session has a stream already; open another session")
        self.attached = True
        self.renew()

    def renew(self) -> None:
        """The client was heard of."""
        self._seen = self._environment.clock()

    def add_credit(self, num_batches: int, waited_s: float = 0.0) -> None:
        """The client takes so many batches more; its trainer stood still for so long."""
        self.credits += min(num_batches, _MAX_CREDITS - self.credits)
        if 0 < waited_s < math.inf:
            self.counts.trainer_waited_s += waited_s
        self._note_window()
        self._sendable.set()

    def release(self, step: int) -> None:
        """The client no longer needs the memory of a step; unknown steps and second releases change nothing."""
        subscription = self._held.pop(step, None)
        if subscription:
            subscription.release(step)

    async def next_batch(self) -> Batch | None:
        """The batch of the next step, once it is whole and the client has credit for it; None after the last.

        Raises:
            GyreError: the step failed, or the session ended; Draining where the daemon wants to stop and nothing is left to
            send.
        """
        while True:
            if self._ended:
                raise self._ended
            batch = self.ready_batch()
            if batch:
                return batch
            if self._here.view.next_to_send == self.num_steps:
                return None
            if self._drained:
                raise Draining(
                    "the daemon is stopping; open the session again with the last cursor, here after its restart or elsewhere"
                )
            await self._wait_until_sendable()

    def ready_batch(self) -> Batch | None:
        """The batch of the next step if it can be sent now.

        Raises:
            GyreError: the step failed.
        """
        self._advance()
        if not self.credits or not self._here.view.head_is_sealed:
            return None
        outcome = self._here.take()
        if isinstance(outcome, Exception):
            raise outcome
        if self._peer:
            self._show_or_end(outcome)
        else:
            self._payloads.append(outcome)
            self._payload_ready.set()
        self._held[outcome.plan.step] = self._here
        self.credits -= 1
        self._count(outcome)
        return outcome

    @property
    def head_is_whole(self) -> bool:
        """The next step is ready and did not fail."""
        here = self._here
        return here.view.head_is_sealed and isinstance(here.feed.outcome(here.view.next_to_send), Batch)

    async def next_payload(self) -> Batch | None:
        """Each batch that `next_batch` gave, once more, for the stream that carries payload; None after the session's last."""
        while not self._payloads and not self._ended:
            self._payload_ready.clear()
            await self._payload_ready.wait()
        return self._payloads.popleft() if self._payloads else None

    def drain(self) -> None:
        """Begin no further step; send what is under way as far as the client has credit for it."""
        self._draining = True
        for subscription in self._path:
            subscription.feed.drain()
        self._sendable.set()

    def end(self, reason: GyreError) -> None:
        """Stop for good and give the memory back; whoever waits for a batch gets the reason.

        What the client may still read in an arena that others go on with stays untouched until it has let go of it.
        """
        if self._ended:
            return
        self._ended = reason
        for step, subscription in self._held.items():
            if self._peer:
                self._peer.when_gone(partial(subscription.release, step))
            else:
                subscription.release(step)
        self._held.clear()
        self._payloads.clear()
        self._arena_numbers.clear()
        for subscription in self._path:
            subscription.leave()
        self._environment.budget.give_back(self.share.num_bytes)
        self._sendable.set()
        self._payload_ready.set()

    @property
    def is_starved(self) -> bool:
        """Its client waits, and no batch is ready."""
        return self._waits_for_storage

    @property
    def owns_a_feed(self) -> bool:
        """The memory that it reserved is in use."""
        return any(subscription.feed.owner is self for subscription in self._path)

    def wake(self) -> None:
        """The batch it sends next is ready."""
        self._note_window()
        self._sendable.set()

    def fail(self, reason: GyreError) -> None:
        """The feed cannot go on."""
        self.end(reason)

    def cast_off(self) -> None:
        """Others do not wait any longer: it goes on in a feed of its own."""
        while len(self._path) > 1:
            self._path.pop().leave()
        here = self._here
        if here.feed.is_only(here) and here.feed.owner is self:
            here.feed.following = False
            here.view.extend(self.num_steps)
            here.feed.look_again()
        else:
            here.leave()
            self._path[0] = self._found(here.view.next_to_send, self.num_steps)

    @property
    def _here(self) -> Subscription:
        """What it reads from now."""
        return self._path[0]

    @property
    def _drained(self) -> bool:
        return self._draining and (self._here.view.num_begun == 0 or not self.credits)

    def _reserve(self) -> Share:
        """The share of a feed that it may read along in, or one of its own."""
        request, environment = self.request, self._environment
        batch_bytes = max_batch_bytes(request.dataset.index, request.order.global_batch_size // request.reader.world_size)
        num_ahead = request.prefetch_batches or min(max(_AHEAD_BYTES // batch_bytes, _MIN_AHEAD), _MAX_AHEAD)
        limit_bytes = max(environment.session_limit_bytes, batch_bytes)
        share = divide(batch_bytes, num_ahead, limit_bytes)
        if share.num_bytes > environment.budget.free_bytes:
            share = divide(batch_bytes, num_ahead, min(limit_bytes, environment.budget.free_bytes))
        environment.budget.reserve(share.num_bytes, f"a session on `{request.dataset.name}`")
        return share

    def _find_path(self) -> deque[Subscription]:
        """Read along in another feed, or in one of its own up to where another begins, or in one of its own."""
        step, end = self.first_step, self.num_steps
        for feed in list(self._environment.feeds):
            if feed.is_closed or feed.following or feed.share != self.share or not feed.spec.is_as(self.request.spec):
                continue
            if feed.window.has(step):
                return deque([feed.subscribe(self, step, end)])
            meet = feed.window.next_to_begin
            if 0 < meet - step <= _REACH * self.share.num_ahead and (end is None or meet < end):
                own = self._found(step, meet)
                own.feed.following = True
                return deque([own, feed.subscribe(self, meet, end, is_active=False)])
        return deque([self._found(step, end)])

    def _found(self, first_step: int, end_step: int | None) -> Subscription:
        feed = Feed(self.request.spec, self.share, first_step, self, self._environment.machinery)
        if self._draining:
            feed.drain()
        self._environment.feeds.add(feed)
        return feed.subscribe(self, first_step, end_step)

    def _advance(self) -> None:
        """Go on to the feed that it has caught up with."""
        if len(self._path) > 1 and self._here.view.at_end:
            self._path.popleft().leave()
            self._here.activate()

    def _show(self, arena: Arena) -> int | None:
        """The number of an arena that the client has been given, or could be now."""
        number = self._arena_numbers.get(arena, len(self._arena_numbers))
        if arena not in self._arena_numbers:
            if not self._peer or not self._peer.hand_over(self.session_id, number, arena.descriptor):
                return None
            self._arena_numbers[arena] = number
        return number

    def _show_or_end(self, batch: Batch) -> None:
        if self._show(batch.slot.arena) is None:
            raise LeaseExpired(
                "the client left the side channel, where it gets the memory of its batches; open the session again"
            )

    def _count(self, batch: Batch) -> None:
        for counts in (self.counts, self._environment.metrics):
            counts.num_batches_sent += 1
            counts.num_bytes_sent += batch.layout.num_bytes

    def _note_window(self) -> None:
        """Batches behind one that is missing cannot be sent, and do not count as ready here."""
        if self._ended:
            return
        view = self._here.view
        is_head_ready = view.head_is_sealed
        num_left = self.window_size if self.num_steps is None else self.num_steps - view.next_to_send
        self._occupancy.note(
            self._environment.clock(),
            view.num_ready if is_head_ready else 0,
            min(self.window_size, num_left),
            self.credits,
            is_head_ready=is_head_ready,
        )

    async def _wait_until_sendable(self) -> None:
        self._note_window()
        self._waits_for_storage = bool(self.credits) and not self._here.view.head_is_sealed
        if self._waits_for_storage:
            self._here.feed.look_again()
        self._sendable.clear()
        try:
            await self._sendable.wait()
        finally:
            self._waits_for_storage = False


def _start_cursor(request: SessionRequest) -> Cursor:
    dataset, order = request.dataset, request.order
    if not request.cursor:
        return Cursor(dataset.fingerprint, order, position=0)
    cursor = decode_cursor(request.cursor)
    check_cursor(cursor, dataset.name, dataset.fingerprint, order)
    return cursor
