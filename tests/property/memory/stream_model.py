"""All shared streams of one spec against a simple model, with a runner that has no event loop.

The runner takes memory, reads nothing, and does what the state says; the model knows of every
consumer which batches it was sent and holds, and of every batch group whether its memory is in use.
"""

from dataclasses import dataclass, field

from gyre_daemon.memory.share import Share, share_within
from gyre_daemon.sessions import stream_state
from gyre_daemon.sessions.stream_state import Consumer, Group, Stream, StreamState
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

PAGE = 4096  # the size of a batch
MAX_CONSUMERS = 5


def share_for(window_batches: int) -> Share:
    return share_within(PAGE, window_batches, 1 << 40, in_groups=True)


@dataclass(eq=False)
class Reader:
    """A consumer as the model knows it."""

    consumer: Consumer
    first_step: int
    next_step: int
    held: dict[int, tuple[range, Group]] = field(default_factory=dict)
    is_asleep: bool = False
    num_detached: int = 0


class Runner:
    """What stands around a `StreamState`, without event loop, storage and memory."""

    def __init__(self) -> None:
        self.state = StreamState()
        self.now = 0.0
        self.readers: list[Reader] = []  # also those that left and still hold batches
        self.in_flight: list[Group] = []
        self.slots: dict[Stream, dict[Group, int]] = {}  # how many batches each has room for
        self.shares: dict[Stream, Share] = {}  # with which each was opened
        self.reserved: list[Share] = []  # by all consumers
        self.changed: set[Stream] = set()

    def execute(self) -> None:
        left = self.state.instructions
        while left:
            match left.popleft():
                case stream_state.Open(stream):
                    assert stream not in self.slots
                    self.slots[stream] = {}
                    self.shares[stream] = stream.share
                    self.changed.add(stream)
                case stream_state.Close(stream):
                    del self.slots[stream], self.shares[stream]
                    self.changed.discard(stream)
                    self.in_flight = [group for group in self.in_flight if group.stream != stream]
                case stream_state.Free(group):
                    assert not any(
                        held is group for each in self.readers for _, held in each.held.values()
                    ), "a slot is not free while somebody holds it"
                    del self.slots[group.stream][group]
                case stream_state.Wake(consumer):
                    self.reader_of(consumer).is_asleep = False
                case stream_state.Detached(consumer):
                    self.reader_of(consumer).num_detached += 1
                case stream_state.Fetch(stream):
                    assert stream in self.slots
                    self.changed.add(stream)

    def reader_of(self, consumer: Consumer) -> Reader:
        return next(each for each in self.readers if each.consumer is consumer)

    @property
    def present(self) -> list[Reader]:
        return [each for each in self.readers if each.consumer.segments]

    def join(self, step: int, end_step: int | None, share: Share) -> Reader:
        reader = Reader(Consumer(step, end_step, share), step, step)
        self.readers.append(reader)
        self.reserved.append(share)
        self.state.join(reader.consumer)
        self.execute()
        return reader

    def fetch(self, stream: Stream, max_steps: int = 1 << 20) -> bool:
        """Begin one batch group, if there is room and memory for it."""
        self.changed.discard(stream)
        num_steps = self.state.next_fetch(stream)
        self.execute()
        if not num_steps:
            return False
        assert not stream.is_closed
        num_steps = min(num_steps, max_steps)
        slots, step = self.slots[stream], stream.next_to_begin
        if sum(slots.values()) + num_steps > stream.share.num_bytes // PAGE:
            self.state.no_memory(stream)
            return False
        group = self.state.begin(stream, num_steps)
        assert group.steps == range(step, step + num_steps)
        front = max(segment.front for segment in stream.segments if segment.is_active)
        assert stream.next_to_begin - front <= stream.share.window_batches, (
            "no further than the window"
        )
        slots[group] = num_steps
        self.in_flight.append(group)
        self.changed.add(stream)
        return True

    def seal(self, group: Group) -> None:
        self.in_flight.remove(group)
        self.state.seal(group)
        self.execute()

    def take(self, reader: Reader, max_steps: int) -> None:
        consumer = reader.consumer
        group, steps = self.state.take(consumer, max_steps)
        assert 1 <= len(steps) <= max_steps
        assert steps.start == reader.next_step, "in order, each once"
        assert set(steps) <= set(group.steps)
        assert consumer.end_step is None or steps.stop <= consumer.end_step
        assert group.is_sealed
        assert group not in self.in_flight
        assert group in self.slots[group.stream], "its memory was not given back"
        reader.next_step = steps.stop
        reader.held[steps.start] = steps, group
        self.execute()

    def release(self, reader: Reader, step: int) -> None:
        reader.held.pop(step, None)
        self.state.release(reader.consumer, step)
        self.execute()

    def leave(self, reader: Reader) -> None:
        self.state.leave(reader.consumer)
        self.execute()

    def wait(self, reader: Reader) -> None:
        """Its client has nothing to go on with."""
        reader.is_asleep = True
        self.state.set_starved(reader.consumer, True)
        self.execute()

    def tick(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        for stream in list(self.state.streams):
            if not stream.is_closed:
                left_s = self.state.tick(stream, self.now)
                assert left_s is None or 0 < left_s <= stream_state.STALL_S
                self.execute()

    def read(self, reader: Reader) -> None:
        """A client that reads as fast as batches come, and keeps none."""
        if reader.is_asleep:
            return
        while reader.consumer.is_ready:
            self.state.set_starved(reader.consumer, False)
            for step in list(reader.held):
                self.release(reader, step)
            self.take(reader, 2)
        for step in list(reader.held):
            self.release(reader, step)
        if not reader.consumer.at_end:
            self.wait(reader)

    def turn(self, reading: list[Reader]) -> None:
        """The storage answers, those who read do, and a tenth of a second passes."""
        for group in list(self.in_flight):
            if group in self.in_flight:
                self.seal(group)
        for reader in reading:
            self.read(reader)
        while self.changed:
            stream = min(self.changed, key=lambda each: each.next_to_begin)
            while not stream.is_closed and self.fetch(stream):
                pass
        self.tick(0.1)


class StreamModel(RuleBasedStateMachine):
    """Consumers join, read, hold, release, lag, are detached and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = Runner()

    @precondition(lambda self: len(self.runner.present) < MAX_CONSUMERS)
    @rule(
        data=st.data(),
        back=st.integers(0, 30),
        length=st.none() | st.integers(0, 30),
        window_batches=st.integers(1, 9),
    )
    def join(self, data: st.DataObject, back: int, length: int | None, window_batches: int) -> None:
        streams = self.runner.state.streams
        step = data.draw(st.sampled_from(streams)).next_to_begin if streams else 20
        step = max(0, step - back)
        end = None if length is None else step + length
        self.runner.join(step, end, share_for(window_batches))

    @precondition(lambda self: self.runner.state.streams)
    @rule(data=st.data(), max_steps=st.integers(1, 4))
    def fetch(self, data: st.DataObject, max_steps: int) -> None:
        self.runner.fetch(data.draw(st.sampled_from(self.runner.state.streams)), max_steps)

    @precondition(lambda self: self.runner.in_flight)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        self.runner.seal(data.draw(st.sampled_from(self.runner.in_flight)))

    @precondition(lambda self: self.runner.present)
    @rule(data=st.data(), max_steps=st.integers(1, 5))
    def take(self, data: st.DataObject, max_steps: int) -> None:
        reader = data.draw(st.sampled_from(self.runner.present))
        if reader.consumer.is_ready:
            self.runner.take(reader, max_steps)

    @precondition(lambda self: self.runner.readers)
    @rule(data=st.data(), unknown=st.none() | st.integers(0, 100))
    def release(self, data: st.DataObject, unknown: int | None) -> None:
        reader = data.draw(st.sampled_from(self.runner.readers))
        if unknown is not None:
            self.runner.release(reader, unknown)
        elif reader.held:
            self.runner.release(reader, data.draw(st.sampled_from(sorted(reader.held))))

    @precondition(lambda self: self.runner.present)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.runner.present))
        if not reader.consumer.is_ready and not reader.consumer.at_end:
            self.runner.wait(reader)

    @rule(elapsed_s=st.floats(0.0, 1.5))
    def tick(self, elapsed_s: float) -> None:
        self.runner.tick(elapsed_s)

    @precondition(lambda self: self.runner.present)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.runner.leave(data.draw(st.sampled_from(self.runner.present)))

    @rule(num_turns=st.integers(1, 5), data=st.data())
    def some_read_for_a_while(self, num_turns: int, data: st.DataObject) -> None:
        reading = data.draw(
            st.lists(st.sampled_from(self.runner.present), unique_by=id)
            if self.runner.present
            else st.just([])
        )
        for _ in range(num_turns):
            self.runner.turn(reading)

    @invariant()
    def two_consumers_count_each_other_equally(self) -> None:
        counts = [len(reader.consumer.sharing) for reader in self.runner.present]
        assert len(counts) != 2 or counts[0] == counts[1] >= 1

    @invariant()
    def memory_is_in_use_exactly_while_somebody_needs_it(self) -> None:
        for stream, groups in self.runner.slots.items():
            for group in groups:
                num_held = sum(
                    held is group for each in self.runner.readers for _, held in each.held.values()
                )
                num_wanting = sum(bool(each.wanted(group.steps)) for each in stream.segments)
                assert group.num_needs == num_held + num_wanting
                assert group.num_needs or not group.is_sealed

    @invariant()
    def a_stream_uses_what_one_of_its_consumers_has_reserved(self) -> None:
        streams = self.runner.state.streams
        assert set(streams) == set(self.runner.slots)
        owners = [stream.owner for stream in streams]
        assert len(set(map(id, owners))) == len(owners), "and no other stream uses that"
        for stream in streams:
            assert any(segment.consumer is stream.owner for segment in stream.segments)
            assert stream.share is self.runner.shares[stream], "its memory stays as it is"
        now = [reader.consumer.share for reader in self.runner.readers]
        assert sorted(map(id, now)) == sorted(map(id, self.runner.reserved)), "nothing is lost"

    @invariant()
    def who_has_left_is_told_of_nothing(self) -> None:
        for reader in self.runner.readers:
            consumer = reader.consumer
            if not consumer.segments:
                assert (consumer.is_ready, consumer.num_begun, consumer.num_ready) == (False, 0, 0)

    @invariant()
    def counts_are_right(self) -> None:
        for reader in self.runner.present:
            consumer, stream = reader.consumer, reader.consumer.stream
            begun = [
                step
                for step in range(consumer.next_step, stream.next_to_begin)
                if consumer.segment.stop is None or step < consumer.segment.stop
            ]
            ready = [step for step in begun if stream.groups[step].is_sealed]
            assert (consumer.num_begun, consumer.num_ready) == (len(begun), len(ready))
            held = sum(len(steps) for steps, _ in consumer.held.values())
            assert held == sum(len(steps) for steps, _ in reader.held.values())
            assert consumer.is_ready == (consumer.next_step in ready)

    @invariant()
    def what_a_consumer_reads_is_a_chain_without_gaps(self) -> None:
        for reader in self.runner.present:
            consumer = reader.consumer
            assert consumer.next_step == reader.next_step
            assert consumer.held == reader.held
            assert consumer.segments[-1].stop == consumer.end_step
            for one, other in zip(consumer.segments, consumer.segments[1:], strict=False):
                assert one.stop == other.start
            for segment in consumer.segments:
                assert segment in segment.stream.segments
                begun = segment.wanted(range(segment.stream.next_to_begin))
                assert segment.stream.groups.keys() >= set(begun), "it is still there"

    def teardown(self) -> None:
        """Those who read get on, whatever the others keep; then all go, and nothing is left."""
        runner = self.runner
        reading, still = runner.present[::2], runner.present[1::2]
        for reader in still:  # they read nothing more
            runner.state.set_starved(reader.consumer, False)
            runner.execute()
        for reader in reading:
            reader.is_asleep = False
        goals = [
            reader.next_step + 40
            if reader.consumer.end_step is None
            else min(reader.consumer.end_step, reader.next_step + 40)
            for reader in reading
        ]
        for _ in range(600):
            runner.turn(reading)
            pairs = zip(reading, goals, strict=True)
            if all(reader.next_step >= goal for reader, goal in pairs):
                break
        else:
            raise AssertionError("somebody starves")
        for reader in runner.present:
            runner.leave(reader)
        for reader in runner.readers:
            for step in list(reader.held):
                runner.release(reader, step)
        assert runner.state.streams == []
        assert runner.slots == {}
        assert not runner.state.instructions
