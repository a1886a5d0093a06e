"""Sessions: one for each rank of each job. A session fetches ahead of its client and holds nothing worth keeping.

What it promises: batches come in the order of their steps, each once; a step that fails raises when its turn comes and not
before; its memory stays within its arena; it ends when its stream ends, when its lease runs out, or when a newer one takes
over.
"""

import asyncio
import logging
import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from gyre_daemon.arena import Arena, Budget, Share, Slot, divide
from gyre_daemon.batch import max_batch_bytes
from gyre_daemon.cursor import Cursor, check_cursor, decode_cursor
from gyre_daemon.dataset import Dataset
from gyre_daemon.errors import Draining, GyreError, InvalidRequest, first_error
from gyre_daemon.events import log_event
from gyre_daemon.fetch import Batch, Fetch, Fetcher
from gyre_daemon.metrics import Metrics
from gyre_daemon.plan import Order, Plan, check_ranks
from gyre_daemon.window import Window

MAX_PREFETCH_BATCHES = 1024
MAX_EPOCHS = 1 << 32
_MAX_CREDITS = 1 << 20
_MAX_PLANNED = 64  # batches that are planned at once
_BULK_BYTES = 4 << 20  # batches that are read together where that is cheaper
_AHEAD_BYTES, _MIN_AHEAD, _MAX_AHEAD = 8 << 20, 4, 64  # the window, unless it is asked for

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


@dataclass(frozen=True, slots=True)
class SessionEnvironment:
    """What all sessions of a daemon share."""

    budget: Budget
    executor: Executor
    metrics: Metrics
    session_limit_bytes: int
    lease_s: float
    clock: Clock = time.monotonic


@dataclass(slots=True)
class SessionCounts:
    """What a session has done, for its state."""

    num_batches_sent: int = 0
    num_bytes_sent: int = 0
    wait_storage_s: float = 0.0  # credit was there, no batch was
    wait_trainer_s: float = 0.0  # a batch was there, no credit


class Session:
    """One rank's stream of batches."""

    def __init__(self, request: SessionRequest, environment: SessionEnvironment) -> None:
        """Check the request and reserve memory; `start` begins to fetch.

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
        self.counts = SessionCounts()
        self.attached = False
        self.shares_arena = False
        self._environment = environment
        cursor = _start_cursor(request)
        self._encode_cursor = cursor.encoder()
        self.first_step = cursor.position // order.global_batch_size
        self.num_steps = self.plan.num_steps(request.num_epochs) if request.num_epochs else None
        if self.num_steps is not None and self.first_step > self.num_steps:
            raise InvalidRequest(
                f"the cursor stands at step {self.first_step}, after the stream's end at step {self.num_steps}"
            )
        batch_bytes = max_batch_bytes(dataset.index, order.global_batch_size // reader.world_size)
        self.share = self._reserve(batch_bytes)
        self._bulk = _bulk_size(dataset, batch_bytes, self.share)
        self.window = Window(self.first_step, self.num_steps, self.share.num_ahead)
        self._fetcher = Fetcher(dataset, environment.executor)
        self._arena: Arena | None = None
        self._fetches: deque[Fetch] = deque()  # laid out, not begun
        self._next_to_plan = self.first_step
        self._slots: dict[int, Slot] = {}
        self._outcomes: dict[int, Batch | Exception] = {}
        self._payloads: deque[Batch] = deque()
        self._room = asyncio.Event()
        self._sendable = asyncio.Event()
        self._payload_ready = asyncio.Event()
        self._ended: GyreError | None = None
        self._draining = False
        self._seen = environment.clock()
        self._prefetching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Allocate the arena and begin to fetch.

        Raises:
            Overloaded: the machine has no such memory.
        """
        arena = await asyncio.get_running_loop().run_in_executor(self._environment.executor, Arena, self.share.num_bytes)
        if self._ended:
            arena.close()
            raise self._ended
        self._arena = arena
        self._prefetching = asyncio.create_task(_leaving_nothing(self._prefetch()), name=f"prefetch {self.session_id}")
        self._prefetching.add_done_callback(self._prefetch_done)

    @property
    def arena(self) -> Arena:
        """Of a session that was started."""
        assert self._arena
        return self._arena

    @property
    def memory_bytes(self) -> int:
        """Held by batches now."""
        return self._arena.held_bytes if self._arena else 0

    @property
    def lease_left_s(self) -> float:
        """Until the session is lost, unless its client is heard of."""
        return self._seen + self._environment.lease_s - self._environment.clock()

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

    def add_credit(self, num_batches: int) -> None:
        """The client takes so many batches more."""
        self.window.add_credit(min(num_batches, _MAX_CREDITS - self.window.credits))
        self._sendable.set()

    def release(self, step: int) -> None:
        """The client no longer needs the memory of a step; unknown steps and second releases change nothing."""
        if not self._ended and self.window.release(step):
            self.arena.put_back(self._slots.pop(step))
            self._room.set()

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
            if self.window.at_end:
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
        step = self.window.send()
        if step is None:
            return None
        outcome = self._outcomes.pop(step)
        if isinstance(outcome, Exception):
            raise outcome
        self.counts.num_batches_sent += 1
        self.counts.num_bytes_sent += outcome.layout.num_bytes
        self._environment.metrics.num_batches_sent += 1
        self._environment.metrics.num_bytes_sent += outcome.layout.num_bytes
        if not self.shares_arena:
            self._payloads.append(outcome)
            self._payload_ready.set()
        self._room.set()
        return outcome

    @property
    def head_is_whole(self) -> bool:
        """The next step is ready and did not fail."""
        return isinstance(self._outcomes.get(self.window.next_to_send), Batch)

    async def next_payload(self) -> Batch | None:
        """Each batch that `next_batch` gave, once more, for the stream that carries payload; None after the session's last."""
        while not self._payloads and not self._ended:
            self._payload_ready.clear()
            await self._payload_ready.wait()
        return self._payloads.popleft() if self._payloads else None

    def drain(self) -> None:
        """Begin no further step; send what is under way as far as the client has credit for it."""
        self._draining = True
        self._sendable.set()

    def end(self, reason: GyreError) -> None:
        """Stop for good and give the memory back; whoever waits for a batch gets the reason."""
        if self._ended:
            return
        self._ended = reason
        if self._prefetching:
            self._prefetching.cancel()
        self._outcomes.clear()
        self._slots.clear()
        self._fetches.clear()
        if self._arena:
            self._arena.close()
            self._arena = None
        self._environment.budget.give_back(self.share.num_bytes)
        self._sendable.set()
        self._payload_ready.set()

    @property
    def _drained(self) -> bool:
        nothing_begun = self.window.next_to_begin == self.window.next_to_send
        return self._draining and (nothing_begun or not self.window.credits)

    def _reserve(self, batch_bytes: int) -> Share:
        request, environment = self.request, self._environment
        num_ahead = request.prefetch_batches or min(max(_AHEAD_BYTES // batch_bytes, _MIN_AHEAD), _MAX_AHEAD)
        limit_bytes = min(max(environment.session_limit_bytes, batch_bytes), environment.budget.free_bytes)
        share = divide(batch_bytes, num_ahead, limit_bytes)
        environment.budget.reserve(share.num_bytes, f"a session on `{request.dataset.name}`")
        return share

    async def _prefetch(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._draining and self.window.next_to_begin != self.num_steps:
                while begun := self._begin():
                    group.create_task(_leaving_nothing(self._fill(begun)))
                    await asyncio.sleep(0)  # planning is computation: let the loop breathe
                await self._room.wait()
                self._room.clear()

    def _prefetch_done(self, task: asyncio.Task[None]) -> None:
        """A fault of the daemon's own ends the session instead of leaving its client to wait."""
        if not task.cancelled() and task.exception():
            log_event("prefetch failed", {"session": self.session_id, "error": repr(task.exception())}, logging.ERROR)
            self.end(GyreError(f"the daemon failed to prefetch: {task.exception()!r}; see its log"))

    def _begin(self) -> list[tuple[Fetch, Slot]]:
        """Begin the steps that are fetched together, as soon as the window has room for as many and the arena for one."""
        begun: list[tuple[Fetch, Slot]] = []
        room = self.window.room()
        if self._draining or room <= 0 or (room < self._bulk and self.window.next_to_begin + room != self.num_steps):
            return begun
        for _ in range(min(room, self._bulk)):
            fetch = self._next_fetch()
            slot = self.arena.take(fetch.layout.num_bytes)
            if slot is None:
                break
            self._fetches.popleft()
            self._slots[self.window.begin()] = slot
            begun.append((fetch, slot))
        return begun

    def _next_fetch(self) -> Fetch:
        """The step to begin next, laid out together with those that follow it."""
        if not self._fetches:
            reader = self.request.reader
            plans = self.plan.batches(self._next_to_plan, self._num_to_plan, reader.rank, reader.world_size)
            self._next_to_plan += len(plans)
            self._fetches.extend(self._fetcher.prepare(plans))
        return self._fetches[0]

    @property
    def _num_to_plan(self) -> int:
        wanted = max(self._bulk, min(self.share.num_ahead, _MAX_PLANNED))
        return wanted if self.num_steps is None else min(wanted, self.num_steps - self._next_to_plan)

    async def _fill(self, begun: list[tuple[Fetch, Slot]]) -> None:
        try:
            outcomes: Sequence[Batch | Exception] = await self._fetcher.fill(begun)
        except Exception as error:
            if len(begun) > 1:  # find out which of them fails: the others are sound
                for single in begun:
                    await self._fill([single])
                return
            outcomes = [first_error(error) if isinstance(error, ExceptionGroup) else error]
        for (fetch, _), outcome in zip(begun, outcomes, strict=True):
            self._outcomes[fetch.plan.step] = outcome
            self.window.seal(fetch.plan.step)
        if self.window.head_ready:
            self._sendable.set()

    async def _wait_until_sendable(self) -> None:
        began = self._environment.clock()
        waits_for_trainer = self.window.head_ready and not self.window.credits
        waits_for_storage = bool(self.window.credits)
        self._sendable.clear()
        try:
            await self._sendable.wait()
        finally:
            waited = self._environment.clock() - began
            self.counts.wait_trainer_s += waited if waits_for_trainer else 0.0
            self.counts.wait_storage_s += waited if waits_for_storage else 0.0


async def _leaving_nothing(work: Coroutine[None, None, None]) -> None:
    """Run a coroutine; if it is cancelled, its frames let go of the arena now and not at some garbage collection.

    A task group keeps the CancelledError that ends it in its own frame, which the error's traceback keeps in turn.
    """
    try:
        await work
    except asyncio.CancelledError as error:
        traceback.clear_frames(error.__traceback__)
        raise


def _bulk_size(dataset: Dataset, batch_bytes: int, share: Share) -> int:
    """How many batches are read together: several small ones where that is cheaper, but at most a quarter of the window."""
    return max(1, min(_BULK_BYTES // batch_bytes, share.num_ahead // 4)) if dataset.storage.reads_in_bulk else 1


def _start_cursor(request: SessionRequest) -> Cursor:
    dataset, order = request.dataset, request.order
    if not request.cursor:
        return Cursor(dataset.fingerprint, order, position=0)
    cursor = decode_cursor(request.cursor)
    check_cursor(cursor, dataset.name, dataset.fingerprint, order)
    return cursor
