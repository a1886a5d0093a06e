"""Which consumers share a stream, and which steps it fetches next: a pure state machine.

One `StreamState` has all shared streams of one spec (`fetching.prefetch.Spec`, whose `key` says
what must be equal). It knows no event loop, clock, storage or log. `SharedStreams` reports each
event by calling a method, and then carries out the instructions that the method left behind.

Events, in the order of a batch group's life:

========================  =====================================================================
`join`                    a consumer begins to read at its next step
`next_fetch`              a `SharedStream` asks how many steps it should fetch
`begin`, `no_memory`      a slot was taken for these steps, or none was free
`seal`                    a batch group is complete; some of its steps may have failed
`take`                    a consumer is sent batches
`release`                 a consumer no longer needs batches that it was sent together
`set_starved`             a consumer has no batch to continue with, or has one again
`tick`                    time has passed
`read_until`              a consumer wants more steps to be read ahead, or fewer
`leave`, `drain`          a consumer leaves; the daemon is about to stop
========================  =====================================================================

Instructions: `Open` and `Close` a stream, `Fetch` (call `next_fetch`), `Free` the memory of a batch
group, `Wake` a consumer, and log that one was `Detached`.

[Note: Sharing a stream] Sessions that want the same batches are consumers of one stream. A stream
fetches each batch group once, into memory that one of its consumers, the owner, has reserved. It
fetches up to one prefetch window ahead of its fastest consumer, and no further than a consumer
wants for now. So a slow consumer holds up the
others only when the memory is full. A batch group is needed by each consumer still to be sent a
part of it, and by each part sent and not released. As soon as it is sealed and no longer needed,
its memory is free.

A consumer takes its steps from one or more *segments*, each a range of steps of one stream. A
consumer that joins a little behind an existing stream has two: the first segment is in a separate
stream, which fetches the steps up to the place where the existing stream will fetch next; the
second begins there, in the existing stream. The second segment counts as a reader from the start,
so the existing stream cannot run further ahead than its memory reaches. Whole streams meet in the
same way: if the steps that a stream would fetch next are in the memory of another, its consumers
continue in the other. If the owner leaves, another consumer becomes the owner: the stream stays in
its memory, and the two exchange their reservations. So every consumer has reserved memory to
continue alone.

The slow-consumer policy protects consumers from each other. While the memory is full, the time that
others wait is charged to the slowest consumer. When it has cost them `STALL_S`, it is detached: it
continues in a separate stream. The fraction `TOLERATED` of all time is forgiven, so jobs whose
speeds differ by less stay together. The time that a consumer itself waits for another is refunded,
so jobs that keep each other waiting in turns stay together too.

Properties of the records derive facts from several records: which steps a consumer
still takes, how much may be fetched ahead, and which consumer is the slowest.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from gyre_daemon.memory.share import Share

# The fraction of all time that a consumer may cost others for ever. If it is smaller, jobs whose
# speeds differ by a few percent part, and everything is read twice from then on; if it is larger,
# a slower job holds up the others for longer.
TOLERATED = 0.05


def last_bound(bounds: Sequence[int | None]) -> int | None:
    """The last of some steps, where None is no bound; None without any."""
    known = [bound for bound in bounds if bound is not None]
    return max(known) if len(known) == len(bounds) > 0 else None


class Group(Struct, eq=False):
    """A batch group: steps fetched together into one slot.

    It owns the slot until it is freed; see [Note: The life of a slot] in `memory.arenas`.

    Attributes:
        stream: the stream that fetches the steps.
        steps: the steps, without a gap.
        num_needs: the segments still to take some of the steps, plus the parts that
            consumers hold; at 0 the group can be freed.
        is_sealed: all steps are in memory, except those that failed.
    """

    stream: "Stream"
    steps: range
    num_needs: int
    is_sealed: bool = False


class Segment(Struct, eq=False):
    """The steps `[start, stop)` that a consumer takes from one stream.

    Without a `stop` they have no end. A consumer reads its segments one after the other.
    """

    consumer: "Consumer"
    stream: "Stream"
    start: int
    stop: int | None

    @property
    def front(self) -> int:
        """The step that the consumer takes next here."""
        return max(self.start, self.consumer.next_step)

    @property
    def is_over(self) -> bool:
        """Every step has been taken."""
        return self.stop is not None and self.front >= self.stop

    @property
    def is_active(self) -> bool:
        """Whether the consumer reads here now; only then are batches fetched ahead for it."""
        return self.consumer.segment is self

    @property
    def oldest_needed(self) -> int:
        """The first step that must stay in memory for the consumer."""
        held = self.consumer.held.values()
        return min(
            (steps.start for steps, group in held if group.stream is self.stream),
            default=self.front,
        )

    def wanted(self, steps: range) -> range:
        """Those of `steps` that the consumer is still to take here."""
        stop = steps.stop if self.stop is None else min(steps.stop, self.stop)
        return range(max(steps.start, self.front), stop)


class Consumer(Struct, eq=False):
    """A data rank's part in shared streams: it reads the steps `[next_step, end_step)`.

    Attributes:
        next_step: the step that it is sent next.
        end_step: the first step that it does not want; None if it reads without end.
        share: the memory that its sessions have reserved; the owner of a stream and its heir
            exchange theirs.
        read_until: the first step that need not be begun yet; None where all are wanted.
        is_starved: its client may soon run out of batches, and none is ready for it.
        segments: the streams from which it takes its steps, in their order; empty once it has left.
        held: the batches that were sent and not released: the steps that were sent together and
            their batch group, by the first of these steps.
    """

    next_step: int
    end_step: int | None
    share: Share
    read_until: int | None = None
    is_starved: bool = False
    segments: list[Segment] = field(default_factory=list)
    held: dict[int, tuple[range, Group]] = field(default_factory=dict)
    _cost_s: float = 0.0  # the seconds that others had waited for it at the time `_charged_at`
    _charged_at: float = float("-inf")

    @property
    def segment(self) -> Segment:
        """The segment that it reads now."""
        first, *others = self.segments
        if not first.is_over or not others:
            return first
        return next((each for each in others if not each.is_over), others[-1])

    @property
    def stream(self) -> "Stream":
        """The stream that it reads now."""
        return self.segment.stream

    @property
    def at_end(self) -> bool:
        """Whether it was sent all steps that it wants."""
        return self.next_step == self.end_step

    @property
    def is_ready(self) -> bool:
        """Whether its next step can be taken: it is in memory, or it failed."""
        if self.at_end or not self.segments:
            return False
        group = self.stream.groups.get(self.next_step)
        return group is not None and group.is_sealed

    @property
    def num_begun(self) -> int:
        """How many steps are in flight or ready for it in the stream that it reads now."""
        if not self.segments:
            return 0
        segment = self.segment
        return len(segment.wanted(range(self.next_step, segment.stream.next_to_begin)))

    @property
    def num_ready(self) -> int:
        """How many steps are ready for it, without a gap, in the stream that it reads now."""
        if not self.segments:
            return 0
        segment = self.segment
        groups = segment.stream.groups_from(self.next_step)
        return sum(len(segment.wanted(group.steps)) for group in groups if group.is_sealed)

    @property
    def sharing(self) -> set["Consumer"]:
        """The consumers that have a stream in common with it, now or later; none once it left."""
        return {other.consumer for each in self.segments for other in each.stream.segments}

    def cost_s(self, now: float) -> float:
        """The seconds that others have waited for it, less the forgiven ones."""
        if not self._cost_s:
            return 0.0
        return max(0.0, self._cost_s - TOLERATED * max(0.0, now - self._charged_at))

    def charge(self, since: float, now: float) -> None:
        """Count the time since `since`, in seconds, in which others waited for it."""
        self._cost_s, self._charged_at = self.cost_s(since) + (now - since), now

    def refund(self, since: float, now: float) -> None:
        """Take off the time since `since`, in seconds, in which it waited for another."""
        self._cost_s, self._charged_at = max(0.0, self.cost_s(now) - (now - since)), now


class Stream(Struct, eq=False):
    """A shared stream: steps in flight or in memory, and the consumers that take them.

    Attributes:
        owner: the consumer whose reserved memory it uses.
        next_to_begin: the step to fetch next.
        groups: the batch groups in flight or in memory, by each of their steps.
        segments: one for each consumer that reads here now or later, in the order of joining.
        leads_on: it ends at a step where its consumers continue in another stream.
        apart_until: until a consumer reaches this step, no other joins it and it joins no other.
        in_groups: whether several batches are fetched together, if its share says so.
        is_full: no memory was free when it last wanted to fetch.
        is_closed: it has no consumers any more.
        stall: the consumer charged, those that wait, and since when; None while none waits. See
            `StreamState.tick`.
    """

    owner: Consumer
    next_to_begin: int
    groups: dict[int, Group] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    leads_on: bool = False
    apart_until: int = 0
    in_groups: bool = True
    is_full: bool = False
    is_closed: bool = False
    stall: tuple[Consumer, list[Consumer], float] | None = None

    @property
    def share(self) -> Share:
        """The memory that it uses, and its division."""
        return self.owner.share

    @property
    def num_together(self) -> int:
        """How many batches the next batch group has."""
        return self.share.num_together if self.in_groups else 1

    @property
    def room(self) -> int:
        """How many more steps may be begun, up to one window ahead of the fastest consumer."""
        window, stops = self.share.window_batches, []
        for segment in self.segments:
            if segment.is_active:
                until = segment.consumer.read_until
                stop = segment.front + window
                stops.append(stop if until is None else min(stop, until))
        if not stops:
            return 0
        end, stop = self.end_step, max(stops)
        return max(0, (stop if end is None else min(stop, end)) - self.next_to_begin)

    @property
    def bounds(self) -> list[int | None]:
        """The `read_until` of each consumer that reads here now."""
        return [each.consumer.read_until for each in self.segments if each.is_active]

    @property
    def read_until(self) -> int | None:
        """The step after the last that a consumer wants for now; None if one wants all."""
        until, end = last_bound(self.bounds), self.end_step
        return until if end is None else end if until is None else min(until, end)

    @property
    def end_step(self) -> int | None:
        """The step after the last that a consumer wants; None if one reads without end."""
        return last_bound([segment.stop for segment in self.segments])

    def has(self, step: int) -> bool:
        """Whether a consumer can begin at this step: it is here with all that follow, or next."""
        while (group := self.groups.get(step)) is not None:
            step = group.steps.stop
        return step == self.next_to_begin

    def groups_from(self, step: int) -> Iterator[Group]:
        """The batch group of a step, and the groups that follow it without a gap."""
        while group := self.groups.get(step):
            step = group.steps.stop
            yield group

    @property
    def may_be_joined(self) -> bool:
        """Whether further consumers may join it, whatever memory they have reserved."""
        return not self.leads_on and not self.is_apart

    @property
    def is_apart(self) -> bool:
        """Whether its consumer was detached a moment ago and must stay alone for now.

        That consumer's next step may still be in the memory of the others. If it joined them again
        at once, they would wait for it again.
        """
        return all(segment.front < self.apart_until for segment in self.segments)

    @property
    def oldest_holder(self) -> Segment | None:
        """The segment that holds the oldest batches; None while any batch is in flight or ready."""
        begun = range(self.next_to_begin)
        if any(segment.wanted(begun) for segment in self.segments):
            return None
        holding = [
            segment
            for segment in self.segments
            if any(group.stream is self for _, group in segment.consumer.held.values())
        ]
        return min(holding or self.segments, key=lambda each: each.oldest_needed, default=None)

    @property
    def furthest_behind(self) -> Segment | None:
        """Of the segments behind the furthest one, the one that needs the oldest batch.

        The furthest one may hold old batches, too, but it is not slow.
        """
        front = max((segment.front for segment in self.segments), default=0)
        behind = [segment for segment in self.segments if segment.front < front]
        return min(behind, key=lambda segment: segment.oldest_needed, default=None)

    @property
    def slowest(self) -> Segment | None:
        """The segment that the others wait for, if batches still held fill the memory."""
        if not self.is_full:
            return None
        starved = [segment for segment in self.segments if segment.consumer.is_starved]
        behind = self.furthest_behind
        if behind and any(segment is not behind for segment in starved):
            return behind
        return self.oldest_holder if starved else None


class Open(Struct, frozen=True):
    """Start a stream at its `next_to_begin`, in memory that its owner has reserved."""

    stream: Stream


class Close(Struct, frozen=True):
    """Stop a stream without consumers: give its memory back, even if clients hold batches there."""

    stream: Stream


class Fetch(Struct, frozen=True):
    """Ask a stream to look again: it may have steps to fetch, or a consumer may wait."""

    stream: Stream


class Free(Struct, frozen=True):
    """Put the slot of a batch group back: no consumer needs the group."""

    group: Group


class Wake(Struct, frozen=True):
    """Tell a consumer's session that its next step is ready."""

    consumer: Consumer


class Detached(Struct, frozen=True):
    """Log that a consumer was too slow for the others and continues by itself."""

    consumer: Consumer


Instruction = Open | Close | Fetch | Free | Wake | Detached


# The seconds that a consumer may cost others before it is detached. If fewer, jobs of equal speed
# part after a hiccup, and everything is read twice from then on; if more, a job that stops holds up
# the others for longer.
STALL_S = 1.0
# A consumer that joins at most this many windows behind a stream catches up with it. With more,
# fewer jobs read alone; but until it has caught up, the stream gets no further than its memory
# reaches.
_REACH = 4


class StreamState:
    """All shared streams of one spec.

    Attributes:
        streams: the open streams.
        instructions: for the caller of the last method, which carries them out in this order and
            removes them.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.instructions: deque[Instruction] = deque()
        self._is_draining = False

    def join(self, consumer: Consumer) -> None:
        """Let a consumer begin: in an existing stream, behind one, or in a new one."""
        step, end = consumer.next_step, consumer.end_step
        for stream in self.streams:
            if not stream.may_be_joined:
                continue
            if stream.has(step):
                self._add(consumer, stream, step, end)
                return
            meet = stream.next_to_begin
            reach = _REACH * consumer.share.window_batches
            if 0 < meet - step <= reach and (end is None or meet < end):
                self._open(consumer, meet).leads_on = True
                self._add(consumer, stream, meet, end)
                return
        self._open(consumer, end)

    def next_fetch(self, stream: Stream) -> int:
        """How many steps to fetch next in one batch group, at most; 0 for none now.

        If it is not 0, call `begin` next, or `no_memory` if no slot is free and no arena can be
        made.
        """
        stream.is_full = False
        room, num_together = stream.room, stream.num_together
        if room and not stream.leads_on and not stream.is_apart and self._merge(stream):
            return 0
        begun = range(stream.next_to_begin + 1, stream.next_to_begin + room + 1)
        is_last = any(bound in begun for bound in (*stream.bounds, stream.end_step))
        if self._is_draining or not (room >= num_together or is_last):
            return 0
        return min(room, num_together)

    def begin(self, stream: Stream, num_steps: int) -> Group:
        """Begin the stream's next `num_steps` as one batch group, which has a slot from now on."""
        steps = range(stream.next_to_begin, stream.next_to_begin + num_steps)
        stream.next_to_begin = steps.stop
        num_needs = sum(bool(segment.wanted(steps)) for segment in stream.segments)
        group = Group(stream, steps, num_needs)
        stream.groups.update(dict.fromkeys(steps, group))
        return group

    def no_memory(self, stream: Stream) -> None:
        """All memory of the stream is in use."""
        stream.is_full = True

    def seal(self, group: Group) -> None:
        """A batch group is complete."""
        group.is_sealed = True
        self._free_if_unneeded(group)
        self._look_at(group.stream)
        for segment in group.stream.segments:
            if segment.is_active and segment.consumer.is_ready:
                self.instructions.append(Wake(segment.consumer))

    def take(self, consumer: Consumer, max_steps: int) -> tuple[Group, range]:
        """Give a consumer its next steps of one batch group, at least one; it holds them then.

        Call it only if the consumer `is_ready`.

        Returns:
            The batch group, and which of its steps were taken.
        """
        self._leave_what_is_over(consumer)
        segment = consumer.segment
        group = segment.stream.groups[consumer.next_step]
        steps = segment.wanted(group.steps)[:max_steps]
        consumer.next_step = steps.stop
        consumer.held[steps.start] = steps, group
        # The held part counts now. The segment counts as well only if it wants more of the group.
        group.num_needs += bool(segment.wanted(group.steps))
        self._look_at(segment.stream)
        if segment.is_over and consumer.stream is not segment.stream:
            self._look_at(consumer.stream)
        return group, steps

    def release(self, consumer: Consumer, first_step: int) -> None:
        """A consumer no longer needs the batches that it was sent together from this step on.

        No effect if it holds none there. A consumer may still release after it left.
        """
        held = consumer.held.pop(first_step, None)
        if held:
            group = held[1]
            self._unneed(group)
            self._look_at(group.stream)

    def set_starved(self, consumer: Consumer, is_starved: bool) -> None:
        """Note that a consumer may soon run out of batches, or that it does not any more."""
        self._leave_what_is_over(consumer)
        consumer.is_starved = is_starved
        if is_starved:
            self._look_at(consumer.stream)

    def read_until(self, consumer: Consumer, step: int | None) -> None:
        """Begin no step from this one on for a consumer; None for no bound.

        Steps that were begun stay.
        """
        consumer.read_until = step
        if consumer.segments:
            self._look_at(consumer.stream)

    def tick(self, stream: Stream, now: float) -> float | None:
        """Charge the time since the last tick to the slowest consumer; detach it at `STALL_S`.

        Returns:
            After how many seconds to call again at the latest; None while no consumer waits.
        """
        if stream.stall:
            slowest, waiting, since = stream.stall
            slowest.charge(since, now)
            for consumer in waiting:
                consumer.refund(since, now)
            stream.stall = None
        segment = stream.slowest
        if segment is None:
            return None
        consumer = segment.consumer
        left_s = STALL_S - consumer.cost_s(now)
        if left_s <= 0:
            self.instructions.append(Detached(consumer))
            self._detach(consumer)
            return None
        starved = [each.consumer for each in stream.segments if each.consumer.is_starved]
        stream.stall = consumer, [each for each in starved if each is not consumer], now
        return left_s

    def leave(self, consumer: Consumer) -> None:
        """A consumer reads no more; the batches that it holds stay until it releases them."""
        consumer.is_starved = False
        while consumer.segments:
            self._drop(consumer.segments[-1])

    def drain(self) -> None:
        """Begin no further step."""
        self._is_draining = True

    def owned_by(self, consumer: Consumer) -> list[Stream]:
        """The streams that use this consumer's memory: one, or none."""
        return [stream for stream in self.streams if stream.owner is consumer]

    def _add(self, consumer: Consumer, stream: Stream, start: int, stop: int | None) -> None:
        segment = Segment(consumer, stream, start, stop)
        consumer.segments.append(segment)
        stream.segments.append(segment)
        for group in stream.groups_from(segment.front):
            group.num_needs += bool(segment.wanted(group.steps))
        self._look_at(stream)

    def _open(self, consumer: Consumer, stop: int | None) -> Stream:
        """Open a stream for one consumer, from its next step up to `stop`."""
        stream = Stream(consumer, consumer.next_step)
        self.streams.append(stream)
        self.instructions.append(Open(stream))
        self._add(consumer, stream, consumer.next_step, stop)
        return stream

    def _drop(self, segment: Segment) -> None:
        """Remove a segment; its stream continues in another consumer's memory, or closes."""
        consumer, stream = segment.consumer, segment.stream
        wanted = [
            group for group in stream.groups_from(segment.front) if segment.wanted(group.steps)
        ]
        consumer.segments.remove(segment)
        stream.segments.remove(segment)
        for group in wanted:
            self._unneed(group)
        if not stream.segments:
            self._close(stream)
        elif stream.owner is consumer:
            self._inherit(stream)
        self._look_at(stream)

    def _leave_what_is_over(self, consumer: Consumer) -> None:
        while len(consumer.segments) > 1 and consumer.segments[0].is_over:
            self._drop(consumer.segments[0])

    def _close(self, stream: Stream) -> None:
        stream.is_closed = True
        stream.groups.clear()
        self.streams.remove(stream)
        self.instructions.append(Close(stream))

    def _inherit(self, stream: Stream) -> None:
        """Make another consumer the owner, which exchanges its memory for the old owner's."""
        heirs = [each.consumer for each in stream.segments if not self.owned_by(each.consumer)]
        if not heirs:  # every one still reads its first segment, in a stream that it owns
            for consumer in [segment.consumer for segment in stream.segments]:
                self._leave_what_is_over(consumer)
                if any(segment.stream is stream for segment in consumer.segments):
                    self._detach(consumer)
            return
        before, heir = stream.owner, heirs[0]
        before.share, heir.share = heir.share, before.share
        stream.owner = heir

    def _detach(self, consumer: Consumer) -> None:
        """Let a consumer continue in a new stream, in the memory that it has reserved."""
        self._leave_what_is_over(consumer)
        while len(consumer.segments) > 1:
            self._drop(consumer.segments[-1])
        segment = consumer.segment
        stream = segment.stream
        is_stuck = stream.is_full and stream.oldest_holder is not None
        if stream.owner is consumer and len(stream.segments) == 1 and not is_stuck:
            segment.stop, stream.leads_on = consumer.end_step, False
        else:
            self._drop(segment)
            stream = self._open(consumer, consumer.end_step)
        stream.apart_until = consumer.next_step + consumer.share.window_batches
        self._look_at(stream)

    def _merge(self, stream: Stream) -> bool:
        """Continue this stream's consumers in another with its next step; False without one."""
        step = stream.next_to_begin
        for other in self.streams:
            if other is not stream and other.may_be_joined and other.has(step):
                stream.leads_on = True
                for segment in list(stream.segments):
                    self._go_on_in(other, segment, step)
                over = [each for each in stream.segments if each is not each.consumer.segments[-1]]
                # the owner is dropped last, so that no segment about to leave inherits the stream
                for segment in sorted(over, key=lambda each: each.consumer is stream.owner):
                    if segment.is_over:
                        self._drop(segment)
                return True
        return False

    def _go_on_in(self, other: Stream, segment: Segment, step: int) -> None:
        """Move the steps that a segment wants from `step` on to a new segment in another stream."""
        stop, start = segment.stop, max(step, segment.front)
        if stop is None or stop > start:
            segment.stop = start
            self._add(segment.consumer, other, start, stop)
            if segment.consumer.is_ready:
                self.instructions.append(Wake(segment.consumer))

    def _unneed(self, group: Group) -> None:
        group.num_needs -= 1
        self._free_if_unneeded(group)

    def _free_if_unneeded(self, group: Group) -> None:
        if group.is_sealed and not group.num_needs and not group.stream.is_closed:
            for step in group.steps:
                del group.stream.groups[step]
            self.instructions.append(Free(group))

    def _look_at(self, stream: Stream) -> None:
        if not stream.is_closed:
            self.instructions.append(Fetch(stream))
