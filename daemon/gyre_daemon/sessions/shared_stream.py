"""Shared streams at work: the event loop, the memory and the reads around `StreamState`.

`StreamState` decides, and this module does it. `SharedStreams` has all streams of one spec, with
the decisions; each `SharedStream` is a task that plans, reads and stores the batch groups of one
`Stream`.

All sessions of a stream get the same bytes, and a slot is not used again before all of them have
released it. A step that fails is an error for each consumer that comes to it, and not before. See
[Note: Sharing a stream] in `stream_state` and [Note: The life of a slot] in `memory.arenas`.

[Note: Peers of a data rank] Ranks along a tensor-, context- or pipeline-parallel dim need the same
batches. Their sessions are the *peers* of one data rank, which is one `Consumer` of a shared
stream: it reserves memory once, it is charged once where it is slow, and it is detached as a whole.
A session without peers is the only peer of its data rank.

The fastest peer takes batches from the stream. They stay in memory until every peer was sent them
and has released them. So a slow peer stops the others when memory is full, as it does in the next
collective operation. A peer that dies, or whose lease runs out, leaves and stops no other.

A peer joins at a step that is still here with all later ones. Peers open their sessions one after
the other, and a restarted peer comes later still. So the newest batches that all have released are
*retained*: half of those that a client might keep, which it then keeps less. A peer whose step is
gone gets a data rank, and memory, for itself.

A stream may end before a slow peer was sent a batch from there. The unsent batches hold a lease of
their arena; see [Note: Who owns an arena] in `memory.arenas`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator

from msgspec import Struct, field

from gyre_daemon.access.policy import Limits
from gyre_daemon.errors import GyreError, first_error
from gyre_daemon.fetching.fetch import BatchGroup, BatchTiming, BatchTimings, Fetch
from gyre_daemon.fetching.prefetch import Prefetcher, Spec, SpecKey
from gyre_daemon.memory.arenas import Arena, ArenaRegistry, Arenas, Budget, Slot
from gyre_daemon.memory.share import Share
from gyre_daemon.monitoring.metrics import Metrics, StorageShare
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import FairExecutor, Flow
from gyre_daemon.sessions import stream_state
from gyre_daemon.sessions.session_request import Reservations
from gyre_daemon.sessions.stream_state import Consumer, Group, Stream, StreamState, last_bound
from gyre_daemon.storage.reads import Delays


class _TakenBatches(Struct, eq=False):
    """Batches that a data rank took together, or why the only one of them failed.

    Attributes:
        steps: their steps.
        batches: the batches, or the error.
        num_waiting: how many peers are still to be sent some of them.
        num_held: how many times peers hold some of them.
        is_leased: whether their arena stays although its stream may end; once it does, until they
            are dropped.
    """

    steps: range
    batches: BatchGroup | Exception
    num_waiting: int
    num_held: int = 0
    is_leased: bool = False

    @property
    def arena(self) -> Arena | None:
        """Their arena; None for an error."""
        return self.batches.slot.arena if isinstance(self.batches, BatchGroup) else None

    @property
    def can_be_sent(self) -> bool:
        """Whether another peer may still be sent them."""
        return self.arena is None or self.is_leased or not self.arena.is_closed

    def lease(self, *, is_wanted: bool) -> None:
        """Hold a lease of the arena, or return it."""
        if self.arena is None or is_wanted == self.is_leased:
            return
        if is_wanted:
            self.is_leased = self.arena.acquire()
        else:
            self.is_leased = False
            self.arena.release()


class RankPeer(Struct, eq=False):
    """Where one session stands in the batches of its data rank.

    Attributes:
        rank: the data rank.
        number: tells it from other peers; None where it has none.
        next_step: the step that it is sent next.
        wake: called when its next step is ready.
        end: called with the reason when the stream cannot continue.
        is_starved: its client may soon run out of batches, and none is ready for it.
        read_until: the first step that need not be begun for it yet; None where all are wanted.
        held: the batches that it was sent and has not released: their steps and their part, by the
            first step.
    """

    rank: "DataRank"
    number: int | None
    next_step: int
    wake: Callable[[], None]
    end: Callable[[GyreError], None]
    is_starved: bool = False
    read_until: int | None = None
    held: dict[int, tuple[range, _TakenBatches]] = field(default_factory=dict)

    @property
    def at_end(self) -> bool:
        """Whether it was sent all steps that it wants."""
        return self.next_step == self.rank.consumer.end_step

    @property
    def is_ready(self) -> bool:
        """Whether its next step can be taken: it is in memory, or it failed."""
        return self.num_taken > 0 or self.rank.consumer.is_ready

    @property
    def num_taken(self) -> int:
        """How many steps another peer has taken from the stream that it is still to be sent."""
        return self.rank.consumer.next_step - self.next_step

    @property
    def num_begun(self) -> int:
        """How many steps are in flight or ready for it."""
        return self.num_taken + self.rank.consumer.num_begun

    @property
    def num_ready(self) -> int:
        """How many steps are ready for it, without a gap."""
        return self.num_taken + self.rank.consumer.num_ready

    @property
    def num_held(self) -> int:
        """How many steps it was sent and has not released."""
        return sum(len(steps) for steps, _ in self.held.values())

    @property
    def has_failed(self) -> bool:
        """Whether its next step failed; ask only if it `is_ready`."""
        part = self.rank.part_at(self.next_step)
        if part is None:
            return self.rank.streams.has_failed(self.rank.consumer)
        return isinstance(part.batches, Exception)

    @property
    def holds_shared(self) -> bool:
        """Whether it holds batches of a stream that is still open."""
        arenas = [part.arena for _, part in self.held.values()]
        return any(arena and not arena.is_closed for arena in arenas)

    def held_in(self, arena: Arena) -> list[int]:
        """The first steps of the batches that it holds in an arena."""
        return [step for step, (_, part) in self.held.items() if part.arena is arena]


class DataRank:
    """Sessions that take the same batches.

    Attributes:
        streams: where it takes them.
        consumer: its place there; its share is the memory of all peers.
        flow: its job.
        fence: tells its run from others of the same name.
        peers: the sessions, in the order of joining. Until it leaves, the first of them stands for
            the memory.
    """

    def __init__(
        self,
        streams: "SharedStreams",
        consumer: Consumer,
        flow: Flow,
        fence: str,
        *,
        may_have_peers: bool,
    ) -> None:
        """A data rank without peers; the consumer has not joined the streams yet.

        Args:
            streams: where it takes batches.
            consumer: stands at its first step.
            flow: its job.
            fence: see `DataRank`.
            may_have_peers: whether more than one session may join, so that batches are retained.
        """
        self.streams = streams
        self.consumer = consumer
        self.flow, self.fence = flow, fence
        self.peers: list[RankPeer] = []
        self._may_have_peers = may_have_peers
        self._parts: dict[int, _TakenBatches] = {}  # by each of their steps
        self._retained: list[_TakenBatches] = []

    @property
    def share(self) -> Share:
        """The memory that all peers have together."""
        return self.consumer.share

    @property
    def num_retained(self) -> int:
        """How many batches are retained at most."""
        return self.share.num_kept // 2 if self._may_have_peers else 0

    def may_join(self, number: int | None, step: int, end_step: int | None) -> bool:
        """Whether a further peer may join at this step, which is here with all that follow."""
        if number is None or end_step != self.consumer.end_step:
            return False
        if all(peer.number in (None, number) for peer in self.peers):
            return False
        parts = list(self._parts_from(step))
        stop = parts[-1].steps.stop if parts else step
        return stop == self.consumer.next_step and all(part.can_be_sent for part in parts)

    def join(
        self,
        number: int | None,
        step: int,
        wake: Callable[[], None],
        end: Callable[[GyreError], None],
    ) -> RankPeer:
        """Add a peer: the first one, or one that `may_join`."""
        peer = RankPeer(self, number, step, wake, end)
        self.peers.append(peer)
        for part in self._parts_from(step):
            part.num_waiting += 1
            part.lease(is_wanted=True)
        self._retained = [part for part in self._retained if not part.num_waiting]
        return peer

    def part_at(self, step: int) -> _TakenBatches | None:
        """The part with this step; None where the step was not taken from the stream."""
        return self._parts.get(step)

    def take(self, peer: RankPeer, max_batches: int) -> BatchGroup | Exception:
        """Take the batches of a peer's next steps, at least one, or why the first one failed.

        Call it only if the peer `is_ready`. They stay in memory until they are released together.
        """
        part = self._parts.get(peer.next_step)
        if part is None:
            batches = self.streams.take(self.consumer, max_batches)
            part = _TakenBatches(
                range(peer.next_step, self.consumer.next_step), batches, len(self.peers)
            )
            self._parts.update(dict.fromkeys(part.steps, part))
        stop = min(part.steps.stop, peer.next_step + max_batches)
        steps = range(peer.next_step, stop)
        peer.next_step = stop
        peer.held[steps.start] = steps, part
        part.num_held += 1
        part.num_waiting -= stop == part.steps.stop
        self._settle(part)
        return part.batches.part(steps) if isinstance(part.batches, BatchGroup) else part.batches

    def release(self, peer: RankPeer, first_step: int) -> None:
        """A peer no longer needs the batches that it was sent together from this step on.

        No effect if it holds none there. A peer may still release after it left.
        """
        held = peer.held.pop(first_step, None)
        if held:
            held[1].num_held -= 1
            self._settle(held[1])

    def release_all(self, peer: RankPeer) -> None:
        """Release all batches that a peer holds."""
        for step in list(peer.held):
            self.release(peer, step)

    def set_starved(self, peer: RankPeer, *, is_starved: bool) -> None:
        """Note that a peer's client may soon run out of batches.

        As long as another peer is behind, the streams are to blame for nothing.
        """
        peer.is_starved = is_starved
        are_level = all(each.num_taken == 0 for each in self.peers)
        any_starved = any(each.is_starved for each in self.peers)
        self.streams.set_starved(self.consumer, is_starved=are_level and any_starved)

    def read_until(self, peer: RankPeer, step: int | None) -> None:
        """Note until where a peer wants batches to be read; the peer that wants most decides."""
        peer.read_until = step
        self.streams.read_until(self.consumer, last_bound([each.read_until for each in self.peers]))

    def held_up_by(self, peer: RankPeer) -> RankPeer | None:
        """The peer that another one waits for, because its unsent batches fill the memory."""
        slowest = max(self.peers, key=lambda each: each.num_taken, default=peer)
        waits = not peer.is_ready and self.consumer.segments and self.consumer.stream.is_full
        return slowest if waits and slowest.num_taken else None

    def fed(self, peer: RankPeer) -> None:
        """Note that a peer waits no more."""
        peer.is_starved = False
        if not any(each.is_starved for each in self.peers):
            self.consumer.is_starved = False

    def wake(self) -> None:
        """Wake each peer whose next step is ready."""
        for peer in self.peers:
            if peer.is_ready:
                peer.wake()

    def end(self, reason: GyreError) -> None:
        """End all peers, because the stream cannot continue."""
        for peer in list(self.peers):
            peer.end(reason)

    def leave(self, peer: RankPeer) -> None:
        """Let a peer leave; the batches that it holds stay until it releases them."""
        self.fed(peer)
        self.peers.remove(peer)
        waiting = list(self._parts_from(peer.next_step))
        if not self.peers:
            self.streams.leave(self.consumer)
            retained, self._retained = self._retained, []
            for part in retained:
                self._drop(part)
        for part in waiting:
            part.num_waiting -= 1
            self._settle(part)

    def _parts_from(self, step: int) -> Iterator[_TakenBatches]:
        while part := self._parts.get(step):
            step = part.steps.stop
            yield part

    def _settle(self, part: _TakenBatches) -> None:
        """Drop or retain a part no longer needed; lease the arena of one still to be sent."""
        if part.num_waiting:
            part.lease(is_wanted=True)
        if part.num_waiting or part.num_held:  # who was sent it just now may not map the arena yet
            return
        if not (self.peers and self.num_retained and part.can_be_sent):
            self._drop(part)
            return
        part.lease(is_wanted=True)
        self._retained.append(part)
        self._retained.sort(key=lambda each: each.steps.start)
        num_over = sum(len(each.steps) for each in self._retained) - self.num_retained
        while num_over > 0:
            oldest = self._retained.pop(0)
            num_over -= len(oldest.steps)
            self._drop(oldest)

    def _drop(self, part: _TakenBatches) -> None:
        for step in part.steps:
            del self._parts[step]
        part.lease(is_wanted=False)
        self.streams.release(self.consumer, part.steps.start)


# Batches of local files begun before the first one is complete. With one, a slow mount is
# idle while the last samples of the first batch arrive.
_NUM_AT_FIRST = 2
# The same afterwards. While some batches wait for late samples, this many others go on; beginning
# the whole window at once would keep the event loop from the first of them.
_NUM_OF_FILES = 64


class DaemonResources(Struct, frozen=True):
    """The resources that all sessions of a daemon share.

    Attributes:
        budget: the memory that all sessions may reserve together.
        registry: every arena of the daemon.
        workers: the threads that copy, decode and allocate, shared fairly among jobs.
        metrics: the counters of the daemon.
        reservations: the memory of each job, within the budget.
        lease_s: a session ends when its client is silent for longer.
        clock: returns the time in seconds.
        streams: the shared streams of each spec with sessions, by the spec's key.
        timings: how long the last batches took, for `gyre why`.
        limits: on the memory and sessions of one user and one job.
    """

    budget: Budget
    registry: ArenaRegistry
    workers: FairExecutor
    metrics: Metrics
    reservations: Reservations
    lease_s: float
    clock: Callable[[], float] = time.monotonic
    streams: "dict[SpecKey, SharedStreams]" = field(default_factory=dict)
    timings: BatchTimings = field(default_factory=BatchTimings)
    limits: Limits = field(default_factory=Limits)


class SharedStreams:
    """All shared streams of one spec: reports events to a `StreamState`, does as it instructs.

    Attributes:
        spec: the properties that make batches equal.
        state: decides which consumers share a stream and which steps each stream fetches.
        running: the task of each open stream.
        ranks: the data ranks behind the consumers; the job of the owner pays for the reads.
        resources: those that all streams of the daemon share.
    """

    def __init__(self, spec: Spec, resources: DaemonResources) -> None:
        self.spec = spec
        self.state = StreamState()
        self.running: dict[Stream, SharedStream] = {}
        self.ranks: dict[Consumer, DataRank] = {}
        self.resources = resources

    def join(self, consumer: Consumer, rank: DataRank) -> None:
        """Let a data rank begin to read, together with others or by itself."""
        self.ranks[consumer] = rank
        self.state.join(consumer)
        self.execute()

    def take(self, consumer: Consumer, max_batches: int) -> BatchGroup | Exception:
        """Take the batches of a consumer's next steps, at least one, or why the first one failed.

        Call it only if the consumer `is_ready`. Batches taken together stay in memory
        until they are released together.
        """
        running, step = self.running[consumer.stream], consumer.next_step
        result = running.result(step)
        running.note_reader(step, self.ranks[consumer].flow.user)
        num_good = len(result.good(range(step, step + max_batches)))
        _, steps = self.state.take(consumer, num_good or 1)
        running.was_read.set()
        self.execute()
        return result.part(steps) if num_good else result.errors[step]

    def has_failed(self, consumer: Consumer) -> bool:
        """Whether a consumer's next step failed; call it only if the consumer `is_ready`."""
        step = consumer.next_step
        return step in self.running[consumer.stream].result(step).errors

    def release(self, consumer: Consumer, first_step: int) -> None:
        """See `StreamState.release`."""
        self.state.release(consumer, first_step)
        self.execute()

    def num_sharing(self, consumer: Consumer) -> int:
        """How many sessions have a stream in common with a consumer's, now or later."""
        return sum(len(self.ranks[each].peers) for each in consumer.sharing)

    def set_starved(self, consumer: Consumer, *, is_starved: bool) -> None:
        """See `StreamState.set_starved`."""
        self.state.set_starved(consumer, is_starved)
        self.execute()

    def read_until(self, consumer: Consumer, step: int | None) -> None:
        """See `StreamState.read_until`."""
        self.state.read_until(consumer, step)
        self.execute()

    def leave(self, consumer: Consumer) -> None:
        """Let a data rank leave; batches that it holds stay in memory until it releases them."""
        self.state.leave(consumer)
        self.execute()
        del self.ranks[consumer]
        if not self.ranks:
            del self.resources.streams[self.spec.key]

    def arenas_of(self, consumer: Consumer) -> Arenas:
        """The arenas of the stream that a consumer reads now."""
        return self.running[consumer.stream].arenas

    def execute(self) -> None:
        """Carry out the instructions of the state."""
        left = self.state.instructions
        while left:
            match left.popleft():
                case stream_state.Fetch(stream):
                    self.running[stream].look_again()
                case stream_state.Free(group):
                    self.running[group.stream].free(group)
                case stream_state.Wake(consumer):
                    self.ranks[consumer].wake()
                case stream_state.Open(stream):
                    self.running[stream] = SharedStream(stream, self)
                case stream_state.Close(stream):
                    self.running.pop(stream).close()
                case stream_state.Detached(consumer):
                    name, job = self.spec.dataset.name, self.ranks[consumer].flow.name
                    log_event("reader falls behind", {"dataset": name, "job": job})


class SharedStream:
    """The task of one stream: plans its steps, reads them, and knows the slot of each batch group.

    Attributes:
        stream: its part of the `StreamState`.
        arenas: the owner's memory, which has its batches.
        slots: the slot of each batch group, from `StreamState.begin` to `Free`.
        storage_share: the fraction of the time of reading that was spent waiting for storage.
        was_read: set when the first batch was taken.
        has_started: set when its first arena is there, or when it was closed.
    """

    def __init__(self, stream: Stream, streams: SharedStreams) -> None:
        spec, resources = streams.spec, streams.resources
        is_local = spec.dataset.storage.is_node_local
        self.stream = stream
        self.slots: dict[Group, Slot] = {}
        self.storage_share = StorageShare(until_known=0.0 if is_local else 1.0)
        self.was_read, self.has_started = asyncio.Event(), asyncio.Event()
        self._streams = streams
        self._spec = spec
        self._resources = resources
        self._results: dict[Group, tuple[BatchGroup, BatchTiming]] = {}
        self._changed = asyncio.Event()
        self._has_sealed = False
        self._is_of_files = "://" not in spec.dataset.storage.path(0)
        self.arenas = Arenas(
            stream.share,
            resources.budget,
            resources.registry,
            resources.workers,
            shares_with_copy_workers=is_local and not spec.dataset.transforms,
        )
        self._prefetcher = Prefetcher(
            spec, stream.share, stream.next_to_begin, self._flow, resources.workers
        )
        self._running = asyncio.create_task(self._run(), name="shared_stream")
        self._running.add_done_callback(self._run_done)

    @property
    def _flow(self) -> Flow:
        """The job of the owner: it pays for the reads as it does for the memory."""
        return self._streams.ranks[self.stream.owner].flow

    def result(self, step: int) -> BatchGroup:
        """The batch group in memory with this step."""
        return self._results[self.stream.groups[step]][0]

    def note_reader(self, step: int, user: str) -> None:
        """Let a user see the timing of a step."""
        self._results[self.stream.groups[step]][1].readers.add(user)

    def look_again(self) -> None:
        """Look again whether there are steps to fetch or a consumer waits."""
        self._changed.set()

    def free(self, group: Group) -> None:
        """Put the slot of a batch group back, because no consumer needs the group."""
        del self._results[group]
        self.arenas.put_back(self.slots.pop(group))

    def close(self) -> None:
        """Stop fetching and give the memory back. The stream is not used after this."""
        self._running.cancel()
        self._results.clear()
        self.slots.clear()
        self.arenas.close()
        self.has_started.set()

    async def _run(self) -> None:
        await self.arenas.allocate(self._flow)
        self.has_started.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._complete())
            while True:
                self._changed.clear()
                while filling := await self._begin():
                    tasks.create_task(filling)
                    await asyncio.sleep(0)  # planning is computation: let the loop breathe
                await self._wait()

    async def _complete(self) -> None:
        """Make more arenas when they are needed, but not before the first batch was taken.

        Making them would slow that batch down, because both need the processor.
        """
        await self.was_read.wait()
        if not self.stream.is_closed:
            await self.arenas.complete(self._flow, self.look_again)

    async def _begin(self) -> Coroutine[None, None, None] | None:
        """Take a slot for the next batch group and return the coroutine that reads the group.

        None if there is nothing to fetch now, or no slot is free.
        """
        states = self._streams.state
        # The first batches come alone: only reading them says whether their mount is fast now. If
        # it is slow, the reads of later ones would delay them.
        in_groups = self._has_sealed and self._spec.dataset.is_read_in_groups
        self.stream.in_groups = in_groups
        num_reading = len(self.slots) - len(self._results)
        most = _NUM_OF_FILES if self._has_sealed else _NUM_AT_FIRST
        if self._is_of_files and num_reading >= most:
            return None
        if self.stream.room:
            await self._prefetcher.prepare(self.stream.read_until, in_groups=in_groups)
        num_steps = states.next_fetch(self.stream)
        self._streams.execute()
        if not num_steps:
            return None
        fetch = self._prefetcher.next_fetch(num_steps)
        slot = self.arenas.take(fetch.layout.num_bytes)
        if slot is None:
            if self.arenas.is_complete:
                states.no_memory(self.stream)
            return None
        self._prefetcher.begun()
        group = states.begin(self.stream, len(fetch.plan))
        self.slots[group] = slot
        return self._fill(group, fetch, slot, self._flow)

    async def _fill(self, group: Group, fetch: Fetch, slot: Slot, flow: Flow) -> None:
        """Read a batch group; `flow` pays, even if its session leaves before the reading begins."""
        clock, delays = self._resources.clock, Delays()
        began = clock()
        stream = self.stream
        if stream.is_closed or not slot.arena.acquire():
            return
        try:
            result = await self._prefetcher.fill(fetch, slot, flow, delays)
        finally:
            slot.arena.release()
        if self.stream.is_closed:
            return
        total_s, spec, ranks = clock() - began, self._spec, self._streams.ranks
        self.storage_share.add(delays.storage_s, total_s)
        timing = BatchTiming(
            spec.dataset.name,
            self._flow.name,
            self._flow.user,
            {ranks[segment.consumer].flow.user for segment in self.stream.segments},
            spec.rank,
            spec.world_size,
            spec.order.step_of(fetch.plan.first_step),
            spec.order.step_of(fetch.plan.stop_step - 1) + 1,
            begun_at=began,
            total_s=total_s,
            is_awaited=any(segment.consumer.is_starved for segment in self.stream.segments),
            delays=delays,
            error=next(map(str, result.errors.values()), ""),
        )
        self._resources.timings.add(timing)
        self._results[group] = result, timing
        self._has_sealed = True
        self._streams.state.seal(group)
        self._streams.execute()

    async def _wait(self) -> None:
        """Wait until something changes, or until the slowest consumer is to be detached."""
        left_s = self._streams.state.tick(self.stream, self._resources.clock())
        self._streams.execute()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._changed.wait()

    def _run_done(self, task: asyncio.Task[None]) -> None:
        """End the sessions of a stream that cannot continue, so that they do not wait for ever."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        error = first_error(error) if isinstance(error, ExceptionGroup) else error
        reason = error
        if not isinstance(reason, GyreError):
            reason = GyreError(f"the daemon failed to prefetch: {error!r}; see its log")
            facts = {"dataset": self._spec.dataset.name, "error": repr(error)}
            log_event("prefetch failed", facts, logging.ERROR)
        for segment in list(self.stream.segments):
            self._streams.ranks[segment.consumer].end(reason)
