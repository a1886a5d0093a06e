"""Shared streams, their consumers and their batch groups: the records that `StreamState` changes.

Pure, as `stream_state` is. Properties derive facts from several records: which steps a consumer
still takes, how much may be fetched ahead, and which consumer is the slowest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gyre_daemon.memory.share import Share

# The fraction of all time that a consumer may cost others for ever. If it is smaller, jobs whose
# speeds differ by a few percent part, and everything is read twice from then on; if it is larger,
# a slower job holds up the others for longer.
TOLERATED = 0.05


@dataclass(slots=True, eq=False)
class Group:
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


@dataclass(slots=True, eq=False)
class Segment:
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


@dataclass(slots=True, eq=False)
class Consumer:
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
    segments: list[Segment] = field(default_factory=list, repr=False)
    held: dict[int, tuple[range, Group]] = field(default_factory=dict, repr=False)
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
    def num_held(self) -> int:
        """How many steps it was sent and has not released."""
        return sum(len(steps) for steps, _ in self.held.values())

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


@dataclass(slots=True, eq=False)
class Stream:
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
    groups: dict[int, Group] = field(default_factory=dict, repr=False)
    segments: list[Segment] = field(default_factory=list, repr=False)
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
    def read_until(self) -> int | None:
        """The step after the last that a consumer wants for now; None if one wants all."""
        wanted = [each.consumer.read_until for each in self.segments if each.is_active]
        bounds = [bound for bound in wanted if bound is not None]
        until = max(bounds) if len(bounds) == len(wanted) > 0 else None
        end = self.end_step
        return until if end is None else end if until is None else min(until, end)

    @property
    def end_step(self) -> int | None:
        """The step after the last that a consumer wants; None if one reads without end."""
        stops = [segment.stop for segment in self.segments]
        ends = [stop for stop in stops if stop is not None]
        return max(ends) if len(ends) == len(stops) > 0 else None

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
