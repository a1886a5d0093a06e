"""The peers of one data rank: sessions that take the same batches from one consumer. Pure.

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
their arena; see [Note: Who owns an arena] in `memory.arena`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from gyre_daemon.errors import GyreError
from gyre_daemon.fetching.batch_group import BatchGroup
from gyre_daemon.memory.arena import Arena
from gyre_daemon.memory.share import Share
from gyre_daemon.runtime.fair import Flow
from gyre_daemon.sessions.streams import Consumer


class Streams(Protocol):
    """Where a data rank takes its batches; see `SharedStreams`."""

    def take(self, consumer: Consumer, max_batches: int) -> BatchGroup | Exception:
        """Take the batches of a consumer's next steps, or why the first one failed."""

    def has_failed(self, consumer: Consumer) -> bool:
        """Whether a consumer's next step failed."""

    def release(self, consumer: Consumer, first_step: int) -> None:
        """Release batches that a consumer took together."""

    def set_starved(self, consumer: Consumer, *, is_starved: bool) -> None:
        """Note that a consumer may soon run out of batches, or that it does not any more."""

    def read_until(self, consumer: Consumer, step: int | None) -> None:
        """Begin no step from this one on for a consumer; None for no bound."""

    def leave(self, consumer: Consumer) -> None:
        """Let a consumer read no more."""


@dataclass(slots=True, eq=False)
class _Part:
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


@dataclass(slots=True, eq=False)
class RankPeer:
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
    held: dict[int, tuple[range, _Part]] = field(default_factory=dict, repr=False)

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
        streams: Streams,
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
        self._parts: dict[int, _Part] = {}  # by each of their steps
        self._retained: list[_Part] = []

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

    def part_at(self, step: int) -> _Part | None:
        """The part with this step; None where the step was not taken from the stream."""
        return self._parts.get(step)

    def take(self, peer: RankPeer, max_batches: int) -> BatchGroup | Exception:
        """Take the batches of a peer's next steps, at least one, or why the first one failed.

        Call it only if the peer `is_ready`. They stay in memory until they are released together.
        """
        part = self._parts.get(peer.next_step) or self._next_part(max_batches)
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

        No effect if it holds none there. A peer that has left may still release.
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
        bounds = [each.read_until for each in self.peers]
        known = [bound for bound in bounds if bound is not None]
        self.streams.read_until(self.consumer, max(known) if len(known) == len(bounds) else None)

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

    def _parts_from(self, step: int) -> Iterator[_Part]:
        while part := self._parts.get(step):
            step = part.steps.stop
            yield part

    def _next_part(self, max_batches: int) -> _Part:
        begin = self.consumer.next_step
        batches = self.streams.take(self.consumer, max_batches)
        part = _Part(range(begin, self.consumer.next_step), batches, len(self.peers))
        self._parts.update(dict.fromkeys(part.steps, part))
        return part

    def _settle(self, part: _Part) -> None:
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
        self._drop_excess()

    def _drop_excess(self) -> None:
        num_over = sum(len(each.steps) for each in self._retained) - self.num_retained
        while num_over > 0:
            oldest = self._retained.pop(0)
            num_over -= len(oldest.steps)
            self._drop(oldest)

    def _drop(self, part: _Part) -> None:
        for step in part.steps:
            del self._parts[step]
        part.lease(is_wanted=False)
        self.streams.release(self.consumer, part.steps.start)
