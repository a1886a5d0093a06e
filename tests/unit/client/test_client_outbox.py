import pytest
from gyre_client.transport.outbox import LONG_WAIT_S, MAX_RELEASES, Outbox
from gyre_protos.v1 import loader_pb2 as pb


def test_it_attaches_first_and_then_grants_the_first_credits() -> None:
    outbox = Outbox("abc", 4)
    messages = outbox.messages(60.0, lambda: None)
    assert next(messages) == pb.StreamRequest(attach=pb.Attach(session_id="abc"))
    assert next(messages) == pb.StreamRequest(credit=pb.Credit(num_batches=4))


def test_credits_and_releases_are_coalesced() -> None:
    outbox = Outbox("abc", 0)
    messages = outbox.messages(60.0, lambda: None)
    next(messages)
    for step in (5, 6, 9):
        outbox.release(step)
        outbox.credit(1)
    assert next(messages) == pb.StreamRequest(
        credit=pb.Credit(num_batches=3, released_steps=[5, 6, 9])
    )
    outbox.release(10)
    assert next(messages) == pb.StreamRequest(release=pb.Release(steps=[10]))


def test_many_releases_are_split_below_the_limit_of_a_control_message() -> None:
    outbox = Outbox("abc", 0)
    messages = outbox.messages(60.0, lambda: None)
    next(messages)
    first = 2**40
    for step in range(first, first + MAX_RELEASES + 1):
        outbox.release(step)
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
    assert num_wakes == 3


def test_a_larger_grant_is_credit_and_a_smaller_one_is_kept_back() -> None:
    outbox = Outbox("abc", 4, num_together=2)
    messages = outbox.messages(60.0, lambda: None)
    assert [next(messages).WhichOneof("event") for _ in range(2)] == ["attach", "credit"]
    outbox.grant(4, num_together=4)
    assert next(messages).credit.num_batches == 4
    outbox.grant(-4, num_together=2)
    outbox.credit(3)
    outbox.credit(3)
    assert next(messages).credit.num_batches == 2
    outbox.credit(2)
    assert next(messages).credit.num_batches == 2


def test_closing_ends_it() -> None:
    outbox = Outbox("abc", 0)
    messages = outbox.messages(60.0, lambda: None)
    next(messages)
    outbox.close()
    assert list(messages) == []


def test_waiting_time_is_sent_once_with_the_credit_that_ended_it() -> None:
    outbox = Outbox("abc", 0, num_together=2)
    messages = outbox.messages(60.0, lambda: None)
    next(messages)
    outbox.credit(1, waited_s=0.5)
    outbox.release(1)
    outbox.release(2)
    assert next(messages) == pb.StreamRequest(
        credit=pb.Credit(num_batches=1, waited_s=0.5, released_steps=[1, 2])
    )
    outbox.credit(1, waited_s=0.25)
    outbox.credit(1, waited_s=0.25)
    assert next(messages) == pb.StreamRequest(credit=pb.Credit(num_batches=2, waited_s=0.5))


def test_a_long_wait_is_reported_before_it_ends() -> None:
    outbox = Outbox("abc", 0, num_together=2)
    messages = outbox.messages(0.001, lambda: None)
    next(messages)
    outbox.note_wait(LONG_WAIT_S)
    assert next(messages) == pb.StreamRequest(credit=pb.Credit(waited_s=LONG_WAIT_S))
    assert next(messages) == pb.StreamRequest(heartbeat=pb.Heartbeat())
    messages = outbox.messages(60.0, lambda: None)
    next(messages)
    outbox.note_wait(LONG_WAIT_S / 2)
    outbox.credit(2, waited_s=LONG_WAIT_S / 4)
    assert next(messages) == pb.StreamRequest(
        credit=pb.Credit(num_batches=2, waited_s=LONG_WAIT_S * 3 / 4)
    )


def test_a_few_credits_wait_for_more_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    outbox = Outbox("abc", 4, num_together=3)
    messages = outbox.messages(0.0, lambda: None)
    assert [next(messages).WhichOneof("event") for _ in range(2)] == ["attach", "credit"]
    due = []
    for wait_s in (0.0, 0.0, 2 * LONG_WAIT_S):
        now_s += wait_s
        outbox.credit(1, waited_s=0.5)
        due.append(outbox._is_due)
        if due[-1]:
            assert next(messages).credit.num_batches == 1 + (wait_s > 0)
    assert due == [True, False, True], "how long the trainer waited first is told at once"


def test_the_daemon_is_told_how_many_batches_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_client.transport.outbox.REPORT_S", 0.001)
    taken = iter([0, 0, 7, 7, 9])
    outbox = Outbox("abc", 0, num_taken=lambda: next(taken))
    messages = outbox.messages(60.0, lambda: None)
    next(messages)
    assert next(messages) == pb.StreamRequest(heartbeat=pb.Heartbeat(), num_taken=7), (
        "silence where there is no news"
    )
    assert next(messages) == pb.StreamRequest(heartbeat=pb.Heartbeat(), num_taken=9)
