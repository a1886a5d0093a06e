"""Which consumers share a stream, and which steps it fetches next: a pure state machine.

One `StreamState` has all shared streams of one spec (`fetching.prefetch.Spec`: the properties that
make batches equal). It knows no event loop, clock, storage or log. `SharedStreams` reports each
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
"""

from collections import deque

from gyre_daemon.sessions.instructions import (
    Close,
    Detached,
    Fetch,
    Free,
    Instruction,
    Open,
    Wake,
)
from gyre_daemon.sessions.streams import Consumer, Group, Segment, Stream

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
        is_last = room > 0 and stream.next_to_begin + room == stream.read_until
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

        No effect if it holds none there. A consumer that has left may still release.
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
