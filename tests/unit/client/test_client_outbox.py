from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from gyre_client.batches.attachment import LONG_WAIT_S, MAX_RELEASES, Consumed, Outbox
from gyre_protos.v1 import loader_pb2 as pb


@dataclass
class Memory:
    """Memory of batches that nobody uses any more."""

    first_step: int
    num_batches: int = 1
    is_free: bool = False

    def take_back(self) -> None:
        self.is_free = True


class Consumer:
    """What the consumer of an outbox did, and the outbox."""

    def __init__(self, num_credits: int = 0, num_together: int = 1) -> None:
        self.num_dequeued = self.num_taken = 0
        self.waited_s = 0.0
        self.returned: deque[Any] = deque()
        self.outbox = Outbox("abc", num_credits, num_together, self.consumed, self.returned)

    def consumed(self) -> Consumed:
        return Consumed(self.num_dequeued, self.num_taken, self.waited_s)

    def dequeue(self, num_batches: int = 1, waited_s: float = 0.0) -> None:
        self.num_dequeued += num_batches
        self.waited_s += waited_s

    def is_due(self, num_per_group: int = 1) -> bool:
        """Whether the sending thread is woken; takes the call away."""
        wakeup = self.outbox._wakeup
        wakeup.wait(0.0)
        self.outbox.send_if_due(num_per_group)
        is_due = not wakeup._calls.empty()
        wakeup.wait(0.0)
        return is_due


def test_it_attaches_first_and_then_grants_the_first_credits() -> None:
    messages = Outbox("abc", 4).messages(60.0, lambda: None)
    assert next(messages) == pb.StreamRequest(attach=pb.Attach(session_id="abc"))
    assert next(messages) == pb.StreamRequest(credit=pb.Credit(num_batches=4))


def test_credits_and_releases_are_coalesced() -> None:
    consumer = Consumer()
    messages = consumer.outbox.messages(60.0, lambda: None)
    next(messages)
    for step in (5, 6, 9):
        consumer.returned.append(Memory(step))
        consumer.dequeue()
    assert next(messages) == pb.StreamRequest(
        credit=pb.Credit(num_batches=3, released_steps=[5, 6, 9])
    )
    release: Any = consumer.outbox.release
    release(Memory(10))
    assert next(messages) == pb.StreamRequest(release=pb.Release(steps=[10]))


def test_memory_is_free_before_the_daemon_hears_of_it() -> None:
    consumer, memory = Consumer(), Memory(5)
    messages = consumer.outbox.messages(60.0, lambda: None)
    next(messages)
    release: Any = consumer.outbox.release
    release(memory)
    assert [memory.is_free, bool(next(messages)), memory.is_free] == [False, True, True]
    assert not consumer.returned


def test_many_releases_are_split_below_the_limit_of_a_control_message() -> None:
    consumer = Consumer()
    messages = consumer.outbox.messages(60.0, lambda: None)
    next(messages)
    first = 2**40
    consumer.returned += [Memory(step) for step in range(first, first + MAX_RELEASES + 1)]
    message = next(messages)
    assert len(message.release.steps) == MAX_RELEASES
    assert message.ByteSize() < 64 << 10
    assert list(next(messages).release.steps) == [first + MAX_RELEASES]


def test_silence_becomes_heartbeats_and_each_wake_is_reported() -> None:
    num_wakes = 0

    def on_wake() -> None:
        nonlocal num_wakes
        num_wakes += 1

    messages = Outbox("abc", 0).messages(0.001, on_wake)
    next(messages)
    assert [next(messages).WhichOneof("event") for _ in range(3)] == ["heartbeat"] * 3
    assert num_wakes >= 3


def test_a_larger_grant_is_credit_and_a_smaller_one_is_kept_back() -> None:
    consumer = Consumer(4, num_together=2)
    outbox = consumer.outbox
    messages = outbox.messages(60.0, lambda: None)
    assert [next(messages).WhichOneof("event") for _ in range(2)] == ["attach", "credit"]
    outbox.grant(4, num_together=4)
    assert next(messages).credit.num_batches == 4
    outbox.grant(-4, num_together=2)
    assert outbox.num_given == 8
    consumer.dequeue(6)
    assert next(messages).credit.num_batches == 2
    consumer.dequeue(2)
    assert next(messages).credit.num_batches == 2
    assert outbox.num_given == 12


def test_closing_ends_it() -> None:
    outbox = Outbox("abc", 0)
    wakes: list[bool] = []
    messages = outbox.messages(60.0, lambda: wakes.append(outbox.is_closed))
    next(messages)
    outbox.close()
    assert list(messages) == []
    assert wakes == [True], "who watches can end the streams"


def test_waiting_time_is_sent_once_with_the_credit_that_ended_it() -> None:
    consumer = Consumer(num_together=2)
    messages = consumer.outbox.messages(60.0, lambda: None)
    next(messages)
    consumer.dequeue(1, waited_s=0.5)
    consumer.returned += [Memory(1), Memory(2)]
    assert next(messages) == pb.StreamRequest(
        credit=pb.Credit(num_batches=1, waited_s=0.5, released_steps=[1, 2])
    )
    consumer.dequeue(2, waited_s=0.5)
    assert next(messages) == pb.StreamRequest(credit=pb.Credit(num_batches=2, waited_s=0.5))


def test_a_long_wait_is_reported_before_it_ends() -> None:
    consumer = Consumer(num_together=2)
    messages = consumer.outbox.messages(0.001, lambda: None)
    next(messages)
    consumer.waited_s = LONG_WAIT_S
    assert next(messages) == pb.StreamRequest(credit=pb.Credit(waited_s=LONG_WAIT_S))
    consumer.waited_s += LONG_WAIT_S / 2
    assert next(messages) == pb.StreamRequest(heartbeat=pb.Heartbeat()), "a short one waits"
    consumer.dequeue(2, waited_s=LONG_WAIT_S / 4)
    assert next(messages) == pb.StreamRequest(
        credit=pb.Credit(num_batches=2, waited_s=LONG_WAIT_S * 3 / 4)
    )


def test_a_few_credits_wait_for_more_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    consumer = Consumer(4, num_together=3)
    messages = consumer.outbox.messages(60.0, lambda: None)
    assert [next(messages).WhichOneof("event") for _ in range(2)] == ["attach", "credit"]
    assert not consumer.is_due()
    consumer.dequeue(2)
    assert not consumer.is_due()
    now_s += 2 * LONG_WAIT_S
    assert consumer.is_due()
    assert consumer.is_due(), "an interrupt may have come before the sending thread was woken"
    assert next(messages).credit.num_batches == 2
    consumer.dequeue(3)
    assert consumer.is_due(), "as many as are worth a message"
    assert next(messages).credit.num_batches == 3
    consumer.returned += [Memory(0, 2), Memory(2, 2)]
    assert consumer.is_due(num_per_group=2)


def test_the_daemon_is_told_how_many_batches_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_client.batches.attachment.REPORT_S", 0.001)
    taken = iter([0, 0, 7, 7, 9])
    outbox = Outbox("abc", 0, consumed=lambda: Consumed(num_taken=next(taken)))
    messages = outbox.messages(60.0, lambda: None)
    next(messages)
    assert next(messages) == pb.StreamRequest(heartbeat=pb.Heartbeat(), num_taken=7), (
        "silence where there is no news"
    )
    assert next(messages) == pb.StreamRequest(heartbeat=pb.Heartbeat(), num_taken=9)
