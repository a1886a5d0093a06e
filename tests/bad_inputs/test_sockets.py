"""Bytes that are no call: the daemon drops them, and everybody else is served."""

import array
import contextlib
import socket
from pathlib import Path

import grpc
import pytest

from tests.bad_inputs.node import CALL_DEADLINE_S, Node, check_refusal
from tests.bad_inputs.row import Row, cases
from tests.bad_inputs.table import sockets

SERVICE = "/gyre_protos.v1.Loader/"
RAW = (bytes, bytes)  # what makes bytes of a request, and an answer of bytes


@pytest.mark.parametrize("row", cases(sockets.GRPC_ROWS))
def test_bytes_that_are_no_grpc(row: Row, node: Node) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CALL_DEADLINE_S)
        connection.connect(str(node.socket_path))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in row.sent:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            answered = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            assert b"Traceback" not in answered
    assert len(node.read()) == 16


@pytest.mark.parametrize("row", cases(sockets.SIDE_ROWS))
def test_bytes_on_the_side_channel(row: Row, node: Node) -> None:
    with side_channel(node) as connection, contextlib.suppress(OSError):
        for part in row.sent:
            connection.send(part)
    assert len(node.read()) == 16


def test_descriptors_that_are_sent_to_the_side_channel_are_not_kept(node: Node) -> None:
    with (
        Path(__file__).open("rb") as file,
        side_channel(node) as connection,
        contextlib.suppress(OSError),
    ):
        for _ in range(20):
            connection.sendmsg([b"x"], [rights([file.fileno()] * 3)])
    assert len(node.read()) == 16


def test_silent_connections_leave_room_for_others(node: Node) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(node.socket_path))
        assert len(node.read()) == 16


@pytest.mark.parametrize("row", cases(sockets.MALFORMED_ROWS))
def test_bytes_that_are_no_message(row: Row, node: Node) -> None:
    method, data = row.sent
    with pytest.raises(grpc.RpcError) as caught:
        if method == "Stream":
            list(node.channel.stream_stream(SERVICE + method, *RAW)(iter([data]), timeout=30))
        elif method in sockets.STREAMING:
            list(node.channel.unary_stream(SERVICE + method, *RAW)(data, timeout=30))
        else:
            node.channel.unary_unary(SERVICE + method, *RAW)(data, timeout=30)
    check_refusal(caught.value, row)


@pytest.mark.parametrize("method", ["Nothing", "getstatus", "", "GetStatus/x", "../Loader"])
def test_a_method_that_does_not_exist(method: str, node: Node) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        node.channel.unary_unary(SERVICE + method, *RAW)(b"", timeout=CALL_DEADLINE_S)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def side_channel(node: Node) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"{node.socket_path}.side")
    return connection


def rights(descriptors: list[int]) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes()
