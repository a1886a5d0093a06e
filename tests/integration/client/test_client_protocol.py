"""One stream of batches against a server that follows a script, over real gRPC."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gyre_client.batches.attachment import Attachment, Consumed, Session
from gyre_client.batches.stream import BatchStream, Terms
from gyre_client.errors import DaemonFault, DaemonUnavailable
from gyre_client.transport.answers import BatchTensors
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_client.transport.target import Target
from gyre_protos.v1 import loader_pb2 as pb

from tests.stub_daemon import (
    BATCH_SIZE,
    END,
    FIELDS,
    LEASE_S,
    StubDaemon,
    batches,
    frame,
    group,
    payload,
)

Script = Callable[[StubDaemon, int], Iterator[pb.StreamResponse]]
Connect = Callable[..., tuple[BatchStream, StubDaemon]]


def batch(step: int) -> pb.StreamResponse:
    message = group(step)
    message.inline.SetInParent()
    return batches(message)


def numbered(step: int) -> bytes:
    """The payload of a batch whose first token is the step."""
    data = bytearray(payload())
    data[64] = step
    return bytes(data)


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """`connect(script, frames)` opens a stream of batches without shared memory."""
    closing: list[Callable[[], object]] = []

    def start(
        script: Script,
        frames: list[bytes | None],
        reattach_timeout_s: float = 5.0,
        max_queued_batches: int = 2,
    ) -> tuple[BatchStream, StubDaemon]:
        stub = StubDaemon(tmp_path)
        stub.max_queued_batches = max_queued_batches
        stub.shares, stub.responses, stub.frames = False, script, frames
        stub.__enter__()
        closing.append(stub.__exit__)
        request = pb.OpenSessionRequest(
            reader=pb.Reader(generation=7, world_size=1),
            order=pb.OrderSpec(global_batch_size=BATCH_SIZE),
            num_epochs=1,
        )
        stream = BatchStream(
            Target(parse_address(stub.address)), request, Terms(reattach_timeout_s)
        )
        closing.append(stream.close)
        stream.open()
        return stream, stub

    yield start
    for close in reversed(closing):
        close()


def first_token(stream: BatchStream) -> int:
    taken = stream.take()
    assert taken is not None
    return int(taken.tensors["tokens"][0, 0])


def test_chunks_are_put_together_and_the_end_is_not_an_error(connect: Connect) -> None:
    def script(stub: StubDaemon, session: int) -> Iterator[pb.StreamResponse]:
        yield pb.StreamResponse(heartbeat=pb.Heartbeat())
        yield batch(0)
        yield batch(1)
        yield batch(2)
        yield END

    first, second = numbered(1), numbered(2)
    stream, stub = connect(
        script,
        [frame(first[:3]), frame(b""), frame(first[3:]), frame(second), frame(numbered(3))],
        max_queued_batches=3,  # all of them, as this script waits for no credit
    )
    assert [first_token(stream) for _ in range(3)] == [1, 2, 3]
    assert stream.take() is None
    assert stream.take() is None
    stream.close()
    assert [message.WhichOneof("event") for message in stub.said[:1]] == ["attach"]


def test_a_batch_that_was_on_its_way_when_the_client_gave_up_is_no_fault(tmp_path: Path) -> None:
    """A frozen client wakes and gives its session up, while gRPC still has batches of it."""
    opened = pb.SessionOpened(
        session_id="1", first_step=3, lease_s=LEASE_S, max_queued_batches=2, fields=FIELDS
    )
    tensors = BatchTensors(opened.fields, BATCH_SIZE, has_mask=False)
    session = Session(opened, {}, tensors, None, is_endless=True, stall_timeout_s=60.0)
    with Connection(parse_address(f"unix:{tmp_path}/nobody.sock")) as connection:
        attachment = Attachment(connection, session, 2, lambda: None, Consumed)
        with pytest.raises(DaemonFault, match="payload of step 3"):
            next(attachment._receive(group(3)))
        attachment.close()
        with pytest.raises(DaemonUnavailable, match="longer than the lease"):
            next(attachment._receive(group(4)))


def test_a_batch_that_stops_half_way_is_asked_for_again(connect: Connect) -> None:
    def script(stub: StubDaemon, session: int) -> Iterator[pb.StreamResponse]:
        if session == 0:
            yield batch(0)
            yield batch(1)  # and the payload ends in the middle
        else:
            stub.frames = [frame(numbered(7))]
            yield batch(1)
            yield END

    stream, stub = connect(script, [frame(numbered(6)), frame(b"sec")])
    assert [first_token(stream) for _ in range(2)] == [6, 7]
    assert stream.take() is None
    assert [(request.cursor, request.reader.generation) for request in stub.opened] == [
        (b"", 8),
        (b"1", 9),
    ]


def test_goodbye_is_followed_by_a_new_session_after_the_requested_pause(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "stopping; open the session again"

    def script(stub: StubDaemon, session: int) -> Iterator[pb.StreamResponse]:
        yield batch(session)
        yield (
            END
            if session
            else pb.StreamResponse(goodbye=pb.Goodbye(reason=reason, retry_after_s=0.1))
        )

    stream, stub = connect(script, [frame(payload())])
    first_token(stream)
    first_token(stream)
    assert stream.take() is None
    assert [request.cursor for request in stub.opened] == [b"", b"1"]
    assert "ended the session: stopping; trying again for up to" in caplog.text


def test_sessions_that_end_at_once_do_not_go_on_for_ever(connect: Connect) -> None:
    stream, stub = connect(lambda stub, session: iter([]), [], reattach_timeout_s=0.3)
    with pytest.raises(DaemonUnavailable, match=r"without a word \(gave up after 0\.3 s"):
        stream.take()
    assert len(stub.opened) > 1


def hang(stub: StubDaemon, session: int) -> Iterator[pb.StreamResponse]:
    stub.stopping.wait(20)
    yield END


def test_a_daemon_that_opens_sessions_and_says_nothing_is_away(connect: Connect) -> None:
    stream, stub = connect(hang, [], reattach_timeout_s=LEASE_S)
    with pytest.raises(
        DaemonUnavailable, match=r"was silent for .* longer than the lease of 0.4 s \(gave up"
    ):
        stream.take()
    assert len(stub.opened) == 2


def test_a_payload_that_never_comes_is_silence_whatever_the_control_stream_says(
    connect: Connect,
) -> None:
    def script(stub: StubDaemon, session: int) -> Iterator[pb.StreamResponse]:
        yield batch(0)
        while not stub.stopping.wait(LEASE_S / 4):
            yield pb.StreamResponse(heartbeat=pb.Heartbeat())

    stream, _ = connect(script, [None], reattach_timeout_s=0.1)
    with pytest.raises(DaemonUnavailable, match=r"was silent for"):
        stream.take()
