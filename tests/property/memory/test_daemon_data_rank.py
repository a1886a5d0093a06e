"""Peers of data ranks that take batches from the shared streams of one spec, next to other jobs.

A peer gets every step once, in order, from memory that is still there; a data rank reserves memory
once; and those who read get on, whatever other jobs keep.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from gyre_daemon.errors import GyreError
from gyre_daemon.fetching.fetch import BatchGroup
from gyre_daemon.memory.arenas import Arena, Slot
from gyre_daemon.runtime.threads import Flow
from gyre_daemon.sessions.shared_stream import DataRank, RankPeer
from gyre_daemon.sessions.stream_state import Consumer, Stream
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.property.memory.stream_model import PAGE, Reader, Runner, share_for

MAX_PEERS = 4
Item = TypeVar("Item")


class Batches(BatchGroup, frozen=True):
    """Batches of which only the steps and the memory are known."""

    def part(self, steps: range) -> "Batches":
        assert set(steps) <= set(cast("range", self.plan))
        return Batches(cast("Any", steps), self.layout, self.slot)


class Streams:
    """What a data rank knows of shared streams: those of a `Runner`, with an arena for each."""

    def __init__(self) -> None:
        self.runner = Runner()
        self.arenas: dict[Stream, Arena] = {}

    def join(self, step: int, window_batches: int) -> tuple[Consumer, Reader]:
        reader = self.runner.join(step, None, share_for(window_batches))
        return reader.consumer, reader

    def take(self, consumer: Consumer, max_batches: int) -> BatchGroup | Exception:
        reader, stream, begin = self.runner.reader_of(consumer), consumer.stream, consumer.next_step
        self.runner.take(reader, max_batches)
        steps = range(begin, consumer.next_step)
        if begin % 11 == 0:
            return GyreError(f"step {begin} failed")
        if stream not in self.arenas:
            self.arenas[stream] = Arena(PAGE)
        slot = Slot(self.arenas[stream], 0, memoryview(bytearray(1)), 0)
        return Batches(cast("Any", steps), cast("Any", None), slot)

    def has_failed(self, consumer: Consumer) -> bool:
        return consumer.next_step % 11 == 0

    def release(self, consumer: Consumer, first_step: int) -> None:
        self.runner.release(self.runner.reader_of(consumer), first_step)

    def set_starved(self, consumer: Consumer, *, is_starved: bool) -> None:
        self.runner.state.set_starved(consumer, is_starved)
        self.runner.execute()

    def read_until(self, consumer: Consumer, step: int | None) -> None:
        self.runner.state.read_until(consumer, step)
        self.runner.execute()

    def leave(self, consumer: Consumer) -> None:
        self.runner.leave(self.runner.reader_of(consumer))

    def close_arenas(self) -> None:
        """Streams that have ended give their memory back."""
        for stream in set(self.arenas) - set(self.runner.slots):
            self.arenas[stream].close()


@dataclass(eq=False)
class Client:
    """A session as the model knows it."""

    peer: RankPeer
    next_step: int
    held: list[int] = field(default_factory=list)

    def take(self, max_batches: int) -> None:
        rank = self.peer.rank
        has_failed = self.peer.has_failed
        found = rank.take(self.peer, max_batches)
        assert isinstance(found, Exception) == has_failed
        steps = range(self.next_step, self.peer.next_step)
        assert 1 <= len(steps) <= max_batches
        if isinstance(found, BatchGroup):
            assert cast("range", found.plan) == steps, "in order, each once"
            assert found.slot.arena.descriptor >= 0, "the memory is there"
        else:
            assert str(found) == f"step {self.next_step} failed"
        self.held.append(self.next_step)
        self.next_step = steps.stop

    def release(self, step: int) -> None:
        self.held.remove(step)
        self.peer.rank.release(self.peer, step)

    def read(self) -> None:
        """Read as fast as batches come, and keep none."""
        while self.peer.is_ready:
            self.take(2)
            for step in list(self.held):
                self.release(step)
        self.peer.rank.set_starved(self.peer, is_starved=True)


def some_of(items: list[Item]) -> st.SearchStrategy[list[Item]]:
    return st.lists(st.sampled_from(items), unique_by=id) if items else st.just([])


class RankModel(RuleBasedStateMachine):
    """Peers join, read, hold, lag, die and come again, and so does another job."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = Streams()
        self.ranks: list[DataRank] = []
        self.most_retained: dict[DataRank, int] = {}
        self.clients: list[Client] = []  # also those that ended and still hold batches
        self.others: list[Reader] = []

    @property
    def present(self) -> list[Client]:
        return [each for each in self.clients if each.peer in each.peer.rank.peers]

    @precondition(lambda self: len(self.present) < MAX_PEERS)
    @rule(number=st.integers(0, MAX_PEERS - 1), back=st.integers(-2, 9), ahead=st.integers(1, 9))
    def join(self, number: int, back: int, ahead: int) -> None:
        for each in self.present:
            if each.peer.number == number:  # fenced
                each.peer.rank.leave(each.peer)
        step = max(0, max((each.next_step for each in self.present), default=20) - back)
        rank = next((each for each in self.ranks if each.may_join(number, step, None)), None)
        if rank is None:
            consumer, _ = self.streams.join(step, ahead)
            flow = Flow("job", "user")
            rank = DataRank(cast("Any", self.streams), consumer, flow, "run", may_have_peers=True)
            self.ranks.append(rank)
        peer = rank.join(number, step, lambda: None, lambda _: None)
        self.clients.append(Client(peer, step))

    @precondition(lambda self: len(self.others) < 2)
    @rule(back=st.integers(0, 9), ahead=st.integers(1, 9))
    def another_job_joins(self, back: int, ahead: int) -> None:
        step = max([0, *(each.next_step for each in self.present)]) - back
        self.others.append(self.streams.join(max(0, step), ahead)[1])

    @precondition(lambda self: self.others)
    @rule(data=st.data())
    def another_job_leaves(self, data: st.DataObject) -> None:
        other = data.draw(st.sampled_from(self.others))
        self.others.remove(other)
        self.streams.runner.leave(other)
        for step in list(other.held):
            self.streams.runner.release(other, step)

    @precondition(lambda self: self.present)
    @rule(data=st.data(), max_batches=st.integers(1, 4))
    def take(self, data: st.DataObject, max_batches: int) -> None:
        client = data.draw(st.sampled_from(self.present))
        if client.peer.is_ready:
            client.take(max_batches)

    @precondition(lambda self: any(each.held for each in self.clients))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.held]))
        client.release(data.draw(st.sampled_from(client.held)))

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.present))
        client.peer.rank.leave(client.peer)

    @rule(data=st.data(), num_turns=st.integers(1, 4))
    def some_read_for_a_while(self, data: st.DataObject, num_turns: int) -> None:
        reading = data.draw(some_of(self.present))
        other = data.draw(some_of(self.others))
        for _ in range(num_turns):
            self.turn(reading, other)

    def turn(self, clients: list[Client], others: list[Reader]) -> None:
        self.streams.runner.turn(others)
        self.streams.close_arenas()
        for client in clients:
            client.read()
        self.streams.close_arenas()

    @invariant()
    def peers_stand_where_their_clients_do(self) -> None:
        for client in self.clients:
            assert client.peer.next_step == client.next_step
            assert sorted(client.peer.held) == sorted(client.held)
            assert client.peer.num_taken >= 0 or client not in self.present

    @invariant()
    def no_more_is_retained_than_said(self) -> None:
        for rank in self.ranks:
            kept = {part for part in rank._parts.values() if not part.num_waiting + part.num_held}
            # a rank whose memory became less retains more until one of its batches is released
            self.most_retained[rank] = max(self.most_retained.get(rank, 0), rank.num_retained)
            assert sum(len(part.steps) for part in kept) <= self.most_retained[rank]
            assert rank.peers or not kept

    @invariant()
    def a_stream_uses_the_memory_of_one_data_rank(self) -> None:
        owners = [id(stream.owner) for stream in self.streams.runner.state.streams]
        assert len(set(owners)) == len(owners)

    def teardown(self) -> None:
        """All peers get on, whatever the other job keeps; then all go, and nothing is left."""
        for client in self.clients:
            for step in list(client.held):
                client.release(step)
        for other in self.others:  # it reads nothing more
            self.streams.runner.state.set_starved(other.consumer, False)
            self.streams.runner.execute()
        goals = [client.next_step + 40 for client in self.present]
        for _ in range(800):
            self.turn(self.present, [])
            if all(c.next_step >= goal for c, goal in zip(self.present, goals, strict=True)):
                break
        else:
            raise AssertionError("somebody starves")
        for client in self.present:
            client.peer.rank.leave(client.peer)
        for other in self.others:
            self.streams.runner.leave(other)
            for step in list(other.held):
                self.streams.runner.release(other, step)
        assert self.streams.runner.state.streams == []
        self.streams.close_arenas()
        assert all(each.descriptor == -1 for each in self.streams.arenas.values()), "no lease left"
        assert not any(rank._parts for rank in self.ranks)


TestDataRanks = RankModel.TestCase
TestDataRanks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def level(*numbers: int, window_batches: int = 9) -> tuple[RankModel, list[Client]]:
    """Peers of one data rank that have read some steps."""
    model = RankModel()
    for number in numbers:
        model.join(number, 0, window_batches)
    for _ in range(5):
        model.turn(model.present, [])
    assert len(model.ranks) == 1
    return model, model.present


def test_a_peer_that_stops_is_waited_for_and_not_detached() -> None:
    model, (fast, stopped) = level(0, 1)
    before = stopped.next_step
    for _ in range(100):
        model.turn([fast], [])
    num_slots = fast.peer.rank.share.num_bytes // PAGE
    assert fast.peer.rank.held_up_by(fast.peer) is stopped.peer
    assert fast.peer.rank.held_up_by(stopped.peer) is None
    assert fast.next_step <= before + num_slots
    assert len(model.streams.runner.state.streams) == 1
    stopped.peer.rank.leave(stopped.peer)  # its lease has run out
    for _ in range(20):
        model.turn([fast], [])
    assert fast.next_step > before + num_slots
    model.teardown()


def test_a_peer_comes_again_where_the_others_stand_and_takes_no_memory() -> None:
    model, (first, second) = level(0, 1)
    second.peer.rank.leave(second.peer)
    again = first.next_step - 1
    assert first.peer.rank.may_join(1, again, None)
    assert not first.peer.rank.may_join(0, again, None), "its own session is fenced first"
    assert not first.peer.rank.may_join(None, again, None)
    assert not first.peer.rank.may_join(1, 0, None), "it is gone"
    model.join(1, 1, 9)
    assert len(model.ranks) == 1
    for _ in range(5):
        model.turn(model.present, [])
    assert len({each.next_step for each in model.present}) == 1
    model.teardown()


def test_peers_are_detached_from_another_job_together() -> None:
    model, (first, second) = level(0, 1)
    _, other = model.streams.join(first.next_step, 9)
    model.others.append(other)
    for _ in range(5):
        model.turn([first, second], [other])
    before = other.next_step
    for _ in range(60):
        model.turn([first], [other])
    assert other.next_step > before + 100, "it goes on by itself"
    assert first.peer.rank is second.peer.rank
    while second.next_step < first.next_step:
        model.turn([second], [])
    model.teardown()
