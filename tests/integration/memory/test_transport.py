"""How batches reach a client: through shared memory where it works, through gRPC elsewhere."""

import contextlib
import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from gyre_client import Loader
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon


@pytest.fixture
def daemon(gyred: StartDaemon, token_files: Path) -> Daemon:
    tokens = {
        "uri": str(token_files),
        "format": "tokens",
        "dtype": "int16",
        "sequence_length": 10,
        "allow": "anyone",  # also over TCP
    }
    listen = [f"unix:{token_files.parent}/daemon-0/run/gyre.sock", "tcp:127.0.0.1:0"]
    return gyred({"listen": listen, "datasets": {"tokens": tokens}})


def side_path(daemon: Daemon) -> Path:
    return Path(daemon.address.removeprefix("unix:") + ".side")


def transports(daemon: Daemon) -> list[int]:
    with Connection(parse_address(daemon.address)) as connection:
        return [session.transport for session in connection.status().sessions]


class LossyRelay:
    """A side channel that loses descriptors, as where a security policy forbids them."""

    def __init__(self, path: Path) -> None:
        self._behind = path.with_name("side.behind")
        path.rename(self._behind)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self.num_lost = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Take no further client; a second time, do nothing."""
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listener.close()
            self._behind.unlink()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,)).start()

    def _carry(self, client: socket.socket) -> None:
        """Carry messages from the daemon to one client, until one of them hangs up."""
        with (
            client,
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon,
        ):
            daemon.connect(str(self._behind))
            while select.select([client, daemon], [], [], 120)[0] == [daemon]:
                message, descriptors, _, _ = socket.recv_fds(daemon, 256, 1)
                if not message:
                    return
                for descriptor in descriptors:
                    os.close(descriptor)
                    self.num_lost += 1
                client.send(message)


@pytest.fixture
def relay(daemon: Daemon) -> Iterator[LossyRelay]:
    relay = LossyRelay(side_path(daemon))
    yield relay
    relay.close()


def read(address: str, num_batches: int) -> list[torch.Tensor]:
    with Loader("tokens", batch_size=20, seed=3, address=address) as loader:
        return [next(loader)["tokens"].clone() for _ in range(num_batches)]


def same(batches: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(batch, other) for batch, other in zip(batches, others, strict=True))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of the client but for warnings of outages and what it says of datasets."""
    return [
        record.message
        for record in caplog.records
        if record.name == "gyre_client"
        and record.levelno == logging.INFO
        and not record.message.startswith("dataset ")
    ]


def test_memory_is_shared_with_the_process_that_the_kernel_names(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gyre_client")
    with Loader("tokens", batch_size=20, address=daemon.address) as loader:
        batch = next(loader)
        arenas = [
            [int(address, 16) for address in line.split()[0].split("-")]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "gyre-arena" in line
        ]
        for tensor in batch.values():
            assert any(first <= tensor.data_ptr() < end for first, end in arenas), (
                "tensors lie where the daemon put them"
            )
        assert transports(daemon) == [pb.TRANSPORT_ARENA]
    (shared,) = (event for event in daemon.events() if event["event"] == "arena shared")
    assert (shared["pid"], shared["uid"]) == (os.getpid(), os.getuid())
    assert said(caplog) == []


def test_a_call_over_a_unix_socket_needs_the_token_of_a_live_connection(daemon: Daemon) -> None:
    request = pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="tokens"),
        order=pb.OrderSpec(global_batch_size=20),
        reader=pb.Reader(job="guess", world_size=1),
        transport=pb.TRANSPORT_ARENA,
    )
    needed = (grpc.StatusCode.PERMISSION_DENIED, "the daemon cannot tell which user calls")
    ended = (grpc.StatusCode.ABORTED, "the client's connection to the daemon's side channel has")
    with (
        grpc.insecure_channel(daemon.address) as channel,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as side,
    ):
        stub = pb_grpc.LoaderStub(channel)
        side.connect(str(side_path(daemon)))
        given = side.recv(100).decode()
        for token in (None, "", "0" * 32, given[:-1], given.upper() + "x"):
            metadata = () if token is None else (("gyre-side-token", token),)
            calls: list[Callable[..., object]] = [
                partial(stub.OpenSession, request),
                partial(stub.GetStatus, pb.GetStatusRequest()),
                lambda **options: list(stub.ReadPayload(pb.ReadPayloadRequest(), **options)),
                lambda **options: list(stub.Stream(iter(()), **options)),
            ]
            for call in calls:
                with pytest.raises(grpc.RpcError) as refused:
                    call(metadata=metadata, timeout=120)
                code, text = ended if token else needed
                assert refused.value.code() == code
                assert str(refused.value.details()).startswith(text)
        metadata = (("gyre-side-token", given),)
        assert stub.OpenSession(request, metadata=metadata, timeout=120).arena_bytes
        side.close()
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=120)
    assert len([event for event in daemon.events() if event["event"] == "arena shared"]) == 1


def test_over_tcp_batches_come_through_grpc(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = read(daemon.address, 30)
    caplog.set_level(logging.INFO, "gyre_client")
    address = next(event["listen"][1] for event in daemon.events() if event["event"] == "ready")
    assert same(read(address, 30), wanted)
    assert said(caplog) == [
        f"batches from {address} come through gRPC: there is no memory to share"
    ]


def test_a_client_waits_for_a_side_channel_that_was_removed(daemon: Daemon) -> None:
    """The daemon makes it again; until then nobody knows who the client is."""
    wanted = read(daemon.address, 30)
    side_path(daemon).unlink()
    assert same(read(daemon.address, 30), wanted)


def test_if_descriptors_get_lost_batches_come_through_grpc(
    daemon: Daemon, relay: LossyRelay, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gyre_client")
    with Loader(
        "tokens", batch_size=20, seed=3, prefetch_batches=2, address=daemon.address, job="there"
    ) as loader:
        batches = [next(loader)["tokens"].clone() for _ in range(10)]
        assert transports(daemon) == [pb.TRANSPORT_INLINE]
        command = [sys.executable, "-m", "gyre_client", "status", "--address", daemon.address]
        status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert status.split().count("inline") == 1
        daemon.kill()
        # The daemon makes its own side channel. A relay that went on could connect to itself.
        relay.close()
        daemon.restart()
        batches += [next(loader)["tokens"].clone() for _ in range(20)]
        assert transports(daemon) == [pb.TRANSPORT_INLINE], (
            "shared memory that failed once is not tried again"
        )
    assert relay.num_lost == 1
    (line,) = said(caplog)
    assert (
        "come through gRPC: the descriptor of the daemon's memory does not reach this process"
        in line
    )
    assert same(batches, read(daemon.address, 30))


def test_small_batches_share_a_read_and_a_message_and_credit_bounds_them(daemon: Daemon) -> None:
    messages: queue.SimpleQueue[pb.StreamRequest | None] = queue.SimpleQueue()
    request = pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="tokens"),
        order=pb.OrderSpec(global_batch_size=20),
        reader=pb.Reader(job="hand", world_size=1),
        prefetch_batches=60,
    )
    with identified_channel(daemon.address) as channel:
        stub = pb_grpc.LoaderStub(channel)
        opened = stub.OpenSession(request, timeout=120)

        def session() -> pb.SessionState:
            status: pb.DaemonStatus = stub.GetStatus(pb.GetStatusRequest(), timeout=120)
            return status.sessions[0]

        deadline = time.monotonic() + 120
        while session().num_ready < 2 + 2 * 20:  # the first ones come alone
            assert time.monotonic() < deadline
            time.sleep(0.01)
        messages.put(pb.StreamRequest(attach=pb.Attach(session_id=opened.session_id)))
        messages.put(pb.StreamRequest(credit=pb.Credit(num_batches=50)))
        stream: Any = stub.Stream(iter(messages.get, None), timeout=120)
        groups: list[pb.BatchGroup] = []
        while sum(len(group.cursors.own) for group in groups) < 50:
            groups += next(stream).batches.groups
        assert [(group.first_step, len(group.cursors.own)) for group in groups] == [
            (0, 1),
            (1, 1),
            (2, 20),
            (22, 20),
            (42, 8),
        ]
        assert all(len(group.layouts) == 1 for group in groups), "all batches have one layout"
        state = session()
        assert (state.credits, state.num_batches_sent, state.num_held) == (0, 50, 50)
        messages.put(
            pb.StreamRequest(
                credit=pb.Credit(num_batches=3, released_steps=[0, 1, 2, 22, 42, 42, 43, 7])
            )
        )
        (group,) = next(stream).batches.groups
        assert (group.first_step, len(group.cursors.own)) == (50, 3), (
            "what is left of a batch group travels by itself"
        )
        assert session().num_held == 3
        explained = stub.ExplainStep(
            pb.ExplainStepRequest(dataset=pb.DatasetRef(name="tokens"), step=5), timeout=120
        )
        assert explained.timings[0].stop_step - explained.timings[0].first_step == 20, (
            "a third of the window is read at once"
        )
        messages.put(None)
        stream.cancel()
