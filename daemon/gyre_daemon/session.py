"""Sessions: one for each rank of each job. A session fetches ahead of its client and holds nothing worth keeping.

What it promises: batches come in the order of their steps, each once; a step that fails raises when its turn comes and not
before; its memory stays within its arena; it ends when its stream ends, when its lease runs out, or when a newer one takes
over.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from gyre_daemon.arena import Arena, Budget, Slot, share_bytes
from gyre_daemon.batch import Batch, max_batch_bytes
from gyre_daemon.cursor import Cursor, check_cursor, decode_cursor
from gyre_daemon.dataset import Dataset
from gyre_daemon.errors import Draining, GyreError, InvalidRequest, first_error
from gyre_daemon.events import log_event
from gyre_daemon.fetch import Fetch, Fetcher
from gyre_daemon.metrics import Metrics
from gyre_daemon.plan import Order, Plan, check_ranks
from gyre_daemon.window import Window

MAX_PREFETCH_BATCHES = 1024
MAX_EPOCHS = 1 << 32
_MAX_CREDITS = 1 << 20

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
        prefetch_batches: size of the window.
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
        """Check the request, reserve memory and begin to fetch.

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
        self._environment = environment
        self._base = _start_cursor(request)
        self.first_step = self._base.position // order.global_batch_size
        self.num_steps = self.plan.num_steps(request.num_epochs) if request.num_epochs else None
        if self.num_steps is not None and self.first_step > self.num_steps:
            raise InvalidRequest(
                f"the cursor stands at step {self.first_step}, after the stream's end at step {self.num_steps}"
            )
        self.arena = self._make_arena()
        self.window = Window(self.first_step, self.num_steps, request.prefetch_batches)
        self._fetcher = Fetcher(dataset, environment.executor)
        self._prepared: Fetch | None = None
        self._slots: dict[int, Slot] = {}
        self._outcomes: dict[int, Batch | Exception] = {}
        self._room = asyncio.Event()
        self._sendable = asyncio.Event()
        self._payloads: deque[Batch] = deque()
        self._payload_ready = asyncio.Event()
        self._ended: GyreError | None = None
        self._draining = False
        self._seen = environment.clock()
        self._prefetching = asyncio.create_task(self._prefetch(), name=f"prefetch {self.session_id}")
        self._prefetching.add_done_callback(self._prefetch_done)

    @property
    def lease_left_s(self) -> float:
        """Until the session is lost, unless its client is heard of."""
        return self._seen + self._environment.lease_s - self._environment.clock()

    def cursor_at(self, step: int) -> bytes:
        """The cursor of a client that has consumed all steps before `step`."""
        return replace(self._base, position=step * self.request.order.global_batch_size).encode()

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
        self._prefetching.cancel()
        self._outcomes.clear()
        self._slots.clear()
        self.arena.close()
        self._sendable.set()
        self._payload_ready.set()

    @property
    def _drained(self) -> bool:
        nothing_begun = self.window.next_to_begin == self.window.next_to_send
        return self._draining and (nothing_begun or not self.window.credits)

    def _make_arena(self) -> Arena:
        request, environment = self.request, self._environment
        batch_bytes = max_batch_bytes(request.dataset.index, request.order.global_batch_size // request.reader.world_size)
        share = share_bytes(environment.budget, batch_bytes, request.prefetch_batches + 1, environment.session_limit_bytes)
        return Arena(environment.budget, share, f"a session on `{request.dataset.name}`")

    async def _prefetch(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._draining and self.window.next_to_begin != self.num_steps:
                for step, fetch, slot in self._begin_all():
                    group.create_task(self._fill(step, fetch, slot))
                    await asyncio.sleep(0)  # planning is computation: let the loop breathe between batches
                await self._room.wait()
                self._room.clear()

    def _prefetch_done(self, task: asyncio.Task[None]) -> None:
        """A fault of the daemon's own ends the session instead of leaving its client to wait."""
        if not task.cancelled() and task.exception():
            log_event("prefetch failed", {"session": self.session_id, "error": repr(task.exception())}, logging.ERROR)
            self.end(GyreError(f"the daemon failed to prefetch: {task.exception()!r}; see its log"))

    def _begin_all(self) -> Iterator[tuple[int, Fetch, Slot]]:
        """Begin steps as far as window and arena have room."""
        reader = self.request.reader
        while self.window.may_begin() and not self._draining:
            if self._prepared is None:
                plan = self.plan.batch(self.window.next_to_begin, reader.rank, reader.world_size)
                self._prepared = self._fetcher.prepare(plan)
            slot = self.arena.take(self._prepared.layout.num_bytes)
            if slot is None:
                return
            fetch, self._prepared = self._prepared, None
            step = self.window.begin()
            self._slots[step] = slot
            yield step, fetch, slot

    async def _fill(self, step: int, fetch: Fetch, slot: Slot) -> None:
        try:
            outcome: Batch | Exception = await self._fetcher.fill(fetch, slot)
        except Exception as error:
            outcome = first_error(error) if isinstance(error, ExceptionGroup) else error
        self._outcomes[step] = outcome
        self.window.seal(step)
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


def _start_cursor(request: SessionRequest) -> Cursor:
    dataset, order = request.dataset, request.order
    if not request.cursor:
        return Cursor(dataset.fingerprint, order, position=0)
    cursor = decode_cursor(request.cursor)
    check_cursor(cursor, dataset.name, dataset.fingerprint, order)
    return cursor
