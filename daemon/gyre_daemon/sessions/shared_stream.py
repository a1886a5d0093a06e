"""Shared streams at work: the event loop, the memory and the reads around `StreamState`.

`StreamState` decides, and this module does it. `SharedStreams` has all streams of one spec, with
the decisions; each `SharedStream` is a task that plans, reads and stores the batch groups of one
`streams.Stream`.

All sessions of a stream get the same bytes, and a slot is not used again before all of them have
released it. A step that fails is an error for each consumer that comes to it, and not before. See
[Note: Sharing a stream] in `stream_state` and [Note: The life of a slot] in `memory.arenas`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field

from gyre_daemon.access.limits import Limits
from gyre_daemon.errors import GyreError, first_error
from gyre_daemon.fetching.batch_group import BatchGroup, Fetch
from gyre_daemon.fetching.prefetch import GroupResult, Prefetcher, Spec, SpecKey
from gyre_daemon.fetching.timing import BatchTiming, BatchTimings
from gyre_daemon.memory.arena import Slot
from gyre_daemon.memory.arena_registry import ArenaRegistry
from gyre_daemon.memory.arenas import Arenas
from gyre_daemon.memory.budget import Budget
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.monitoring.occupancy import StorageShare
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.fair import FairExecutor, Flow
from gyre_daemon.sessions import instructions
from gyre_daemon.sessions.data_rank import DataRank
from gyre_daemon.sessions.reservations import Reservations
from gyre_daemon.sessions.stream_state import StreamState
from gyre_daemon.sessions.streams import Consumer, Group, Stream
from gyre_daemon.storage.delays import Delays

# Batches of local files begun before the first one is complete. With one, a slow mount is
# idle while the last samples of the first batch arrive.
_NUM_AT_FIRST = 2
# The same afterwards. While some batches wait for late samples, this many others go on; beginning
# the whole window at once would keep the event loop from the first of them.
_NUM_OF_FILES = 64


@dataclass(frozen=True, slots=True)
class DaemonResources:
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

    def streams_of(self, spec: Spec) -> "SharedStreams":
        """The shared streams of a spec; made if there are none yet."""
        return self.streams.setdefault(spec.key, SharedStreams(spec, self))


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
        return result.group.part(steps) if num_good else result.errors[step]

    def has_failed(self, consumer: Consumer) -> bool:
        """Whether a consumer's next step failed; call it only if the consumer `is_ready`."""
        step = consumer.next_step
        return step in self.running[consumer.stream].result(step).errors

    def release(self, consumer: Consumer, first_step: int) -> None:
        """See `StreamState.release`."""
        self.state.release(consumer, first_step)
        self.execute()

    def are_open(self, consumer: Consumer, steps: Iterable[int]) -> bool:
        """Whether some of the batches that a consumer took at these steps are of an open stream."""
        taken = [consumer.held[step] for step in steps if step in consumer.held]
        return any(group.stream in self.running for _, group in taken)

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
                case instructions.Fetch(stream):
                    self.running[stream].look_again()
                case instructions.Free(group):
                    self.running[group.stream].free(group)
                case instructions.Wake(consumer):
                    self.ranks[consumer].wake()
                case instructions.Open(stream):
                    self.running[stream] = SharedStream(stream, self)
                case instructions.Close(stream):
                    self.running.pop(stream).close()
                case instructions.Detached(consumer):
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
        self._results: dict[Group, GroupResult] = {}
        self._timings: dict[Group, BatchTiming] = {}
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

    def result(self, step: int) -> GroupResult:
        """The batches of a step in memory, or why it failed."""
        return self._results[self.stream.groups[step]]

    def note_reader(self, step: int, user: str) -> None:
        """Let a user see the timing of a step that has been read."""
        self._timings[self.stream.groups[step]].readers.add(user)

    def look_again(self) -> None:
        """Look again whether there are steps to fetch or a consumer waits."""
        self._changed.set()

    def free(self, group: Group) -> None:
        """Put the slot of a batch group back, because no consumer needs the group."""
        del self._results[group], self._timings[group]
        self.arenas.put_back(self.slots.pop(group))

    def close(self) -> None:
        """Stop fetching and give the memory back. The stream is not used after this."""
        self._running.cancel()
        self._results.clear()
        self._timings.clear()
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
        self.stream.in_groups = self._prefetcher.in_groups = in_groups
        num_reading = len(self.slots) - len(self._results)
        most = _NUM_OF_FILES if self._has_sealed else _NUM_AT_FIRST
        if self._is_of_files and num_reading >= most:
            return None
        if self.stream.room:
            await self._prefetcher.prepare(self.stream.read_until)
        num_steps = states.next_fetch(self.stream)
        self._streams.execute()
        if not num_steps:
            return None
        fetch = self._prefetcher.next_fetch(num_steps, self.stream.read_until)
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
        self._timings[group] = timing
        self._results[group] = result
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
