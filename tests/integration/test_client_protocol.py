"""The client against a server that does what no daemon of ours would, over real gRPC."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from gyre_client.batches.attachment import Attachment, Session
from gyre_client.batches.stream import BatchStream
from gyre_client.errors import DaemonFault, DaemonUnavailable
from gyre_client.targets.target import Target
from gyre_client.transport.address import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

LEASE_S = 0.4

Script = Callable[["Server", int], Iterator[pb.StreamResponse]]


def batch(step: int, num_bytes: int = 8) -> pb.StreamResponse:
    layout = pb.Layout(
        tensors=[pb.Tensor(name="x", dtype="uint8", shape=[num_bytes])], num_bytes=num_bytes
    )
    group = pb.BatchGroup(
        first_step=step,
        layouts=[layout],
        cursors=pb.Cursors(own=[b"%d" % (step + 1)]),
        inline=pb.InlinePayload(),
    )
    return pb.StreamResponse(batches=pb.Batches(groups=[group]))


END = pb.StreamResponse(end_of_stream=pb.EndOfStream())


class Server:
    """Plays one script per session.

    Sends the payload frames it was given, and hangs where there is None.
    """

    def __init__(self, script: Script, payload: list[bytes | None]) -> None:
        self.script = script
        self.payload = payload
        self.stopping = threading.Event()
        self.opened: list[pb.OpenSessionRequest] = []
        self.said: list[pb.StreamRequest] = []

    def open_session(self, request: pb.OpenSessionRequest, context: Any) -> pb.SessionOpened:
        self.opened.append(request)
        step = int(request.cursor or b"0")
        return pb.SessionOpened(
            session_id=str(len(self.opened)),
            first_step=step,
            cursor=b"%d" % step,
            lease_s=LEASE_S,
            max_queued_batches=2,
        )

    def stream(
        self, request_iterator: Iterator[pb.StreamRequest], context: Any
    ) -> Iterator[pb.StreamResponse]:
        self.said.append(next(request_iterator))
        for response in self.script(self, len(self.opened) - 1):
            yield response
            if response == END:
                self.said.extend(request_iterator)

    def handlers(self) -> dict[str, Any]:
        return {
            "OpenSession": grpc.unary_unary_rpc_method_handler(
                self.open_session,
                pb.OpenSessionRequest.FromString,
                pb.SessionOpened.SerializeToString,
            ),
            "Stream": grpc.stream_stream_rpc_method_handler(
                self.stream, pb.StreamRequest.FromString, pb.StreamResponse.SerializeToString
            ),
            "ReadPayload": grpc.unary_stream_rpc_method_handler(
                self.read_payload, pb.ReadPayloadRequest.FromString
            ),
            "CloseSession": grpc.unary_unary_rpc_method_handler(
                self.close_session,
                pb.CloseSessionRequest.FromString,
                pb.CloseSessionResponse.SerializeToString,
            ),
        }

    def read_payload(self, request: pb.ReadPayloadRequest, context: Any) -> Iterator[bytes]:
        for frame in self.payload:
            if frame is None:
                self.stopping.wait(20)
            else:
                yield frame

    def close_session(
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        return pb.CloseSessionResponse()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., tuple[BatchStream, Server]]]:
    closing: list[Callable[[], object]] = []

    def start(
        script: Script, payload: list[bytes | None], reattach_timeout_s: float = 5.0
    ) -> tuple[BatchStream, Server]:
        service = Server(script, payload)
        server = grpc.server(ThreadPoolExecutor(8))
        server.add_registered_method_handlers("gyre_protos.v1.Loader", service.handlers())  # type: ignore[attr-defined]
        address = parse_address(f"unix:{tmp_path}/s.sock")
        server.add_insecure_port(address.target)
        server.start()
        stream = BatchStream(
            Target(address),
            pb.OpenSessionRequest(reader=pb.Reader(generation=7)),
            reattach_timeout_s,
        )
        closing.extend([stream.close, service.stopping.set, lambda: server.stop(0).wait()])
        return stream, service

    yield start
    for close in closing:
        close()


def frame(data: bytes) -> bytes:
    return pb.PayloadChunk(data=data).SerializeToString()


def values(stream: BatchStream) -> list[int]:
    taken = stream.take()
    assert taken is not None
    values: list[int] = taken.tensors["x"].to(torch.int64).tolist()
    return values


def test_chunks_are_put_together_and_released_and_the_end_is_not_an_error(connect: Any) -> None:
    def script(server: Server, session: int) -> Iterator[pb.StreamResponse]:
        yield pb.StreamResponse(heartbeat=pb.Heartbeat())
        yield batch(0)
        yield batch(1, 0)
        yield batch(2, 3)
        yield END

    stream, server = connect(
        script, [frame(b"\1\2\3"), frame(b""), frame(b"\4\5\6\7\x08"), frame(b"abc")]
    )
    assert values(stream) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert values(stream) == []
    assert values(stream) == [97, 98, 99]
    assert stream.take() is None
    assert stream.take() is None
    stream.close()
    assert [message.WhichOneof("event") for message in server.said[:1]] == ["attach"]


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        ([b"\x12\1a"], "not a PayloadChunk"),
        ([frame(b"123456789")], "9 bytes came where 8 end the batch"),
    ],
)
def test_an_invalid_payload_is_a_fault_and_not_retried(
    connect: Any, payload: list[bytes], complaint: str
) -> None:
    stream, server = connect(lambda server, session: iter([batch(0)]), payload)
    with pytest.raises(DaemonFault, match=complaint):
        stream.take()
    assert len(server.opened) == 1


def test_a_payload_of_an_unknown_kind_is_a_fault(connect: Any) -> None:
    response = pb.StreamResponse(batches=pb.Batches(groups=[pb.BatchGroup(first_step=4)]))
    stream, _ = connect(lambda server, session: iter([response]), [])
    with pytest.raises(DaemonFault, match="payload of step 4"):
        stream.take()


def test_a_batch_that_was_on_its_way_when_the_client_gave_up_is_no_fault(tmp_path: Path) -> None:
    """A frozen client wakes and gives its session up, while gRPC still has batches of it."""
    opened = pb.SessionOpened(session_id="1", lease_s=LEASE_S, max_queued_batches=2)
    group = pb.BatchGroup(
        first_step=3,
        cursors=pb.Cursors(own=[b"4"]),
        layouts=[pb.Layout(num_bytes=8)],
        arena=pb.ArenaSlot(offsets_bytes=[0]),
    )
    with Connection(parse_address(f"unix:{tmp_path}/nobody.sock")) as connection:
        attachment = Attachment(connection, Session(opened, None, {}), 1, lambda: None, lambda: 0)
        with pytest.raises(DaemonFault, match="payload of step 3"):
            next(attachment._receive(group))
        attachment.close()
        with pytest.raises(DaemonUnavailable, match="longer than the lease"):
            next(attachment._receive(group))


def test_a_batch_that_stops_half_way_is_asked_for_again(connect: Any) -> None:
    def script(server: Server, session: int) -> Iterator[pb.StreamResponse]:
        if session == 0:
            yield batch(0)
            yield batch(1)  # and the payload ends in the middle
        else:
            server.payload = [frame(b"second!!")]
            yield batch(1)
            yield END

    stream, server = connect(script, [frame(b"first!!!"), frame(b"sec")])
    assert bytes(values(stream)) == b"first!!!"
    assert bytes(values(stream)) == b"second!!"
    assert stream.take() is None
    assert [(request.cursor, request.reader.generation) for request in server.opened] == [
        (b"", 8),
        (b"1", 9),
    ]


def test_goodbye_is_followed_by_a_new_session_after_the_requested_pause(connect: Any) -> None:
    def script(server: Server, session: int) -> Iterator[pb.StreamResponse]:
        yield batch(session)
        yield (
            END
            if session
            else pb.StreamResponse(goodbye=pb.Goodbye(reason="stopping", retry_after_s=0.1))
        )

    stream, server = connect(script, [frame(b"12345678")])
    assert len(values(stream)) == 8
    assert len(values(stream)) == 8
    assert stream.take() is None
    assert [request.cursor for request in server.opened] == [b"", b"1"]


def test_sessions_that_end_at_once_do_not_go_on_for_ever(connect: Any) -> None:
    stream, server = connect(lambda server, session: iter([]), [], reattach_timeout_s=0.3)
    with pytest.raises(DaemonUnavailable, match=r"without a word \(gave up after 0\.3 s"):
        stream.take()
    assert len(server.opened) > 1


def hang(server: Server, session: int) -> Iterator[pb.StreamResponse]:
    server.stopping.wait(20)
    yield END


def test_a_daemon_that_opens_sessions_and_says_nothing_is_away(connect: Any) -> None:
    stream, server = connect(hang, [], reattach_timeout_s=LEASE_S)
    with pytest.raises(
        DaemonUnavailable, match=r"was silent for .* longer than the lease of 0.4 s \(gave up"
    ):
        stream.take()
    assert len(server.opened) == 2


def test_a_payload_that_never_comes_is_silence_whatever_the_control_stream_says(
    connect: Any,
) -> None:
    def script(server: Server, session: int) -> Iterator[pb.StreamResponse]:
        yield batch(0)
        while not server.stopping.wait(LEASE_S / 4):
            yield pb.StreamResponse(heartbeat=pb.Heartbeat())

    stream, _ = connect(script, [None], reattach_timeout_s=0.1)
    with pytest.raises(DaemonUnavailable, match=r"was silent for"):
        stream.take()
