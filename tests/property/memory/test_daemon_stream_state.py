"""All shared streams of one spec against a simple model, and scenes of readers that differ."""

from gyre_daemon.sessions import stream_state
from gyre_daemon.sessions.stream_state import TOLERATED, Consumer
from hypothesis import settings

from tests.property.memory.stream_model import Reader, Runner, StreamModel, share_for

TestStreams = StreamModel.TestCase
TestStreams.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def reading_together(*window_batches: int) -> tuple[Runner, list[Reader]]:
    """Consumers of one stream that have read some steps."""
    runner = Runner()
    readers = [runner.join(0, None, share_for(size)) for size in window_batches]
    for _ in range(5):
        runner.turn(readers)
    assert len(runner.state.streams) == 1
    return runner, readers


def test_a_consumer_that_stops_is_detached_when_the_time_has_run_out() -> None:
    runner, (fast, stopped) = reading_together(6, 6)
    num_turns = 0
    while not stopped.num_detached:
        runner.turn([fast])
        num_turns += 1
        assert num_turns < 100
    assert num_turns >= stream_state.STALL_S / 0.1, "others waited for it that long"
    assert len(fast.consumer.sharing) == len(stopped.consumer.sharing)
    assert len(runner.state.streams) == 2
    assert fast.num_detached == 0
    before = stopped.next_step
    for _ in range(50):
        runner.turn([fast, stopped])
    assert stopped.next_step > before + 20


def test_consumers_that_keep_each_other_waiting_in_turns_stay_together() -> None:
    runner, readers = reading_together(6, 6)
    for turn in range(400):
        runner.turn([readers[turn // 8 % 2]])  # 0.8 s each
    assert [reader.num_detached for reader in readers] == [0, 0]
    assert len(runner.state.streams) == 1


def test_a_consumer_that_costs_others_little_is_forgiven() -> None:
    consumer = Consumer(0, None, share_for(4))
    for second in range(1000):
        assert consumer.cost_s(second) < stream_state.STALL_S
        consumer.charge(second, second + 0.9 * TOLERATED)


def test_a_consumer_that_is_somewhat_slower_is_not_forgiven() -> None:
    consumer, second = Consumer(0, None, share_for(4)), 0
    while consumer.cost_s(second) < stream_state.STALL_S:
        consumer.charge(second, second + 2.5 * TOLERATED)
        second += 1
    assert second < 20


def test_a_consumer_that_comes_a_little_late_catches_up() -> None:
    runner, (first,) = reading_together(6)
    late = runner.join(max(0, first.next_step - 12), None, share_for(6))
    assert len(runner.state.streams) == 2
    assert [len(each.consumer.sharing) for each in (first, late)] == [2, 2], "from the start"
    for _ in range(30):
        runner.turn([first, late])
    assert first.consumer.stream is late.consumer.stream
    assert len(runner.state.streams) == 1


def test_a_consumer_that_waits_is_woken_where_another_stream_goes_on_for_its_own() -> None:
    runner = Runner()
    first = runner.join(30, None, share_for(6))
    for _ in range(5):
        runner.turn([first])
    late = runner.join(first.next_step - 10, None, share_for(1))  # too far behind to catch up
    assert len(late.consumer.segments) == 1
    for _ in range(30):
        runner.turn([late])
    assert late.next_step > first.next_step


def test_who_is_behind_is_the_slowest_also_where_the_furthest_keeps_an_older_step() -> None:
    runner = Runner()
    front, behind = (runner.join(0, None, share_for(9)) for _ in range(2))
    (stream,) = runner.state.streams
    while runner.fetch(stream, 1):
        runner.seal(runner.in_flight[0])
    for _ in range(4):
        runner.take(front, 1)
    runner.take(behind, 1)
    runner.release(behind, 0)
    assert front.consumer.segment.oldest_needed == 0
    assert stream.furthest_behind is behind.consumer.segment


def test_after_a_drain_nothing_is_begun_and_what_is_ready_is_taken() -> None:
    runner, readers = reading_together(4, 4)
    (stream,) = runner.state.streams
    while runner.fetch(stream):
        pass
    runner.state.drain()
    ready_until = stream.next_to_begin
    for _ in range(20):
        runner.turn(readers)
    assert stream.next_to_begin == ready_until
    assert [reader.next_step for reader in readers] == [ready_until, ready_until]
    late = runner.join(ready_until, None, share_for(4))
    assert not any(runner.fetch(each) for each in runner.state.streams)
    assert not late.consumer.is_ready


def test_nothing_is_begun_beyond_what_a_consumer_wants_for_now() -> None:
    runner = Runner()
    reader = runner.join(0, None, share_for(6))
    stream = reader.consumer.stream
    runner.state.read_until(reader.consumer, 4)
    for _ in range(9):
        runner.turn([reader])
    assert (reader.next_step, stream.next_to_begin) == (4, 4)
    runner.state.read_until(reader.consumer, None)
    for _ in range(9):
        runner.turn([reader])
    assert reader.next_step > 4
    assert stream.next_to_begin > reader.next_step


def test_of_two_consumers_the_one_that_wants_more_decides() -> None:
    runner, (first, second) = reading_together(6, 6)
    stop = first.consumer.stream.next_to_begin + 3
    runner.state.read_until(first.consumer, stop - 2)
    runner.state.read_until(second.consumer, stop)
    for _ in range(20):
        runner.turn([first, second])
    assert first.consumer.stream.next_to_begin == stop
    assert first.next_step == second.next_step == stop


def test_a_consumer_gets_its_last_steps_although_another_wants_more_and_stands_still() -> None:
    """An iteration ends inside a batch group, whose other steps are beyond the window."""
    for stop in range(25, 33):
        for others_stop in (None, 1000):
            runner = Runner()
            first, still = (runner.join(0, None, share_for(24)) for _ in range(2))
            assert first.consumer.stream.num_together == 8
            runner.state.read_until(first.consumer, stop)
            runner.state.read_until(still.consumer, others_stop)
            for _ in range(20):
                runner.turn([first])
            assert (first.next_step, still.num_detached) == (stop, 0)
            for _ in range(20):
                runner.turn([still])
            assert still.next_step > stop
