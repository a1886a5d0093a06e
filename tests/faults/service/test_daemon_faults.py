"""Faults around a daemon: the right error reaches the client, and all other clients are served."""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from gyre_client import Loader
from gyre_client.errors import (
    Fenced,
    InvalidRequest,
    Overloaded,
    UnknownDataset,
)
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.faults.served_tokens import TOKENS, read_some
from tests.waiting import eventually


@pytest.fixture
def stub(tokens: Daemon) -> Iterator[pb_grpc.LoaderStub]:
    """A stub of that daemon's service."""
    with identified_channel(tokens.address) as channel:
        yield pb_grpc.LoaderStub(channel)


def open_request(job: str, generation: int = 0, batch_size: int = 20) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="tokens"),
        order=pb.OrderSpec(seed=1, global_batch_size=batch_size),
        reader=pb.Reader(job=job, rank=0, world_size=1, generation=generation),
    )


def reason_of(error: grpc.RpcError) -> str:
    status = rpc_status.from_call(cast("grpc.Call", error))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "gyre"
    return str(info.reason)


def test_an_unknown_dataset_is_answered_with_the_known_ones(tokens: Daemon) -> None:
    with pytest.raises(
        UnknownDataset, match="no dataset is named 'tokns'; this daemon serves: tokens"
    ):
        Loader("tokns", batch_size=4, address=tokens.address)
    assert read_some(tokens)


def test_ranks_that_do_not_divide_the_batch(tokens: Daemon) -> None:
    with pytest.raises(InvalidRequest, match="divi"):
        next(iter(Loader("tokens", batch_size=20, rank=0, world_size=3, address=tokens.address)))
    assert read_some(tokens)


def read_for_ever(address: str, started: "multiprocessing.Queue[int]") -> None:
    with Loader("tokens", batch_size=20, seed=7, job="victim", address=address) as loader:
        for batch in loader.stream():
            started.put(len(batch))


def test_the_memory_of_a_killed_client_is_freed(tokens: Daemon, stub: pb_grpc.LoaderStub) -> None:
    assert tokens.process
    read_some(tokens)
    daemon = psutil.Process(tokens.process.pid)
    descriptors = threads = 0
    context = multiprocessing.get_context("spawn")
    for round_ in range(3):
        started: multiprocessing.Queue[int] = context.Queue()
        client = context.Process(target=read_for_ever, args=(tokens.address, started))
        client.start()
        for _ in range(50):
            started.get(timeout=120)
        assert [
            session.reader.job for session in stub.GetStatus(pb.GetStatusRequest()).sessions
        ] == ["victim"]
        assert client.pid
        os.kill(client.pid, signal.SIGKILL)
        client.join()
        # well before its lease ends
        assert eventually(lambda: not stub.GetStatus(pb.GetStatusRequest()).sessions, 20.0)
        assert stub.GetStatus(pb.GetStatusRequest()).memory_reserved_bytes == 0
        assert eventually(
            lambda: "gyre-arena" not in Path(f"/proc/{daemon.pid}/maps").read_text(), 120
        )
        if round_ == 0:  # the pools start, and open files, when a client reads at full speed
            descriptors, threads = daemon.num_fds(), daemon.num_threads()
    assert eventually(lambda: daemon.num_fds() <= descriptors, 120)
    assert daemon.num_threads() <= threads + 2
    assert read_some(tokens)


def test_a_terminated_daemon_delivers_batches_in_flight_and_exits_cleanly(
    gyred: StartDaemon, token_files: Path
) -> None:
    daemon = gyred({"datasets": {"tokens": {"uri": str(token_files), **TOKENS}}})
    wanted = read_some(daemon, 90)
    with Loader("tokens", batch_size=20, seed=1, address=daemon.address) as loader:
        seen = [
            sample_id for _ in range(30) for sample_id in next(iter(loader))["sample_id"].tolist()
        ]
        assert daemon.stop() == 0
        daemon.restart()
        seen += [
            sample_id for _ in range(60) for sample_id in next(iter(loader))["sample_id"].tolist()
        ]
    assert seen == wanted


def test_a_silent_client_loses_its_lease(tokens: Daemon, stub: pb_grpc.LoaderStub) -> None:
    session = stub.OpenSession(open_request("silent"), timeout=120)
    messages: queue.SimpleQueue[pb.StreamRequest | None] = queue.SimpleQueue()
    messages.put(pb.StreamRequest(attach=pb.Attach(session_id=session.session_id)))
    stream = stub.Stream(iter(messages.get, None), timeout=120)
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        for response in stream:
            assert response.WhichOneof("event") == "heartbeat"
    messages.put(None)
    assert caught.value.code() == grpc.StatusCode.ABORTED
    assert reason_of(caught.value) == "LeaseExpired"
    assert time.monotonic() - began > 1.9  # not before the lease ends
    assert stub.GetStatus(pb.GetStatusRequest()).memory_reserved_bytes == 0
    assert read_some(tokens)


def test_a_lease_does_not_run_before_the_client_knows_of_its_session(
    gyred: StartDaemon, token_files: Path
) -> None:
    """As on a node so busy that a session takes longer to start than its lease."""
    tokens = {"uri": str(token_files), **TOKENS}
    daemon = gyred({"lease_s": 0.0005, "datasets": {"tokens": tokens}})
    with identified_channel(daemon.address) as channel:
        stub = pb_grpc.LoaderStub(channel)
        for n in range(20):
            request = open_request(f"slow-{n}", batch_size=20_000)
            assert stub.OpenSession(request, timeout=120).session_id


def test_a_newer_session_fences_the_older(tokens: Daemon, stub: pb_grpc.LoaderStub) -> None:
    with Loader(
        "tokens", batch_size=20, job="twice", prefetch_batches=1, address=tokens.address
    ) as older:
        next(iter(older))
        with pytest.raises(grpc.RpcError) as caught:
            stub.OpenSession(open_request("twice", generation=0), timeout=120)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(caught.value) == "Fenced"
        next(iter(older))
        stub.OpenSession(open_request("twice", generation=1 << 53), timeout=120)
        with pytest.raises(Fenced, match="rank 0 of job 'twice' has taken over"):
            for _ in range(5):
                next(iter(older))


def test_a_full_budget_refuses_the_next_session_and_no_other(
    gyred: StartDaemon, token_files: Path
) -> None:
    daemon = gyred(
        {
            "memory_budget": "1MiB",
            "prefetch_batches": 2,
            "datasets": {"tokens": {"uri": str(token_files), **TOKENS}},
        }
    )
    with Loader("tokens", batch_size=300, address=daemon.address) as first:
        next(iter(first))
        refused = Loader(
            "tokens", batch_size=60_000, address=daemon.address, reattach_timeout_s=0.5
        )
        with pytest.raises(Overloaded, match=r"memory_budget of 1048576 bytes") as caught, refused:
            next(iter(refused))
        assert (
            int(caught.value.facts["needed_bytes"])
            > int(caught.value.facts["limit_bytes"])
            == 1048576
        )
        for _ in range(5):
            next(iter(first))


def test_an_invalid_message_ends_only_its_own_stream(
    tokens: Daemon, stub: pb_grpc.LoaderStub
) -> None:
    with Loader("tokens", batch_size=20, address=tokens.address) as bystander:
        next(iter(bystander))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Stream(iter([pb.StreamRequest(heartbeat=pb.Heartbeat())]), timeout=120))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            list(
                stub.Stream(
                    iter([pb.StreamRequest(attach=pb.Attach(session_id="none"))]), timeout=120
                )
            )
        assert reason_of(caught.value) == "LeaseExpired"
        session = stub.OpenSession(open_request("odd"), timeout=120)
        attach = pb.StreamRequest(attach=pb.Attach(session_id=session.session_id))
        unknown = pb.StreamRequest(release=pb.Release(steps=[0, 0, 1 << 63]))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Stream(iter([attach, unknown, attach]), timeout=120))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        for _ in range(20):
            next(iter(bystander))


def test_long_errors_and_invalid_options_reach_the_client(
    gyred: StartDaemon, token_files: Path
) -> None:
    daemon = gyred({"datasets": {"ä" * 1500: {"uri": str(token_files), **TOKENS}}})
    with pytest.raises(UnknownDataset, match="no dataset is named"):
        Loader("ö" * 300, batch_size=4, address=daemon.address)
    with identified_channel(daemon.address) as channel:
        stub = pb_grpc.LoaderStub(channel)
        deep = pb.OptionValue(integer=1)
        for _ in range(20):
            deep = pb.OptionValue(list=pb.OptionList(values=[deep]))
        many = pb.OptionValue(list=pb.OptionList(values=[pb.OptionValue(integer=1)] * 5000))
        nothing = pb.OptionValue()
        for options in ({"a": deep}, {"a": many}, {"a": nothing}, {"a" * 200: many}):
            ref = pb.DatasetRef(ad_hoc=pb.AdHocDataset(uri="/x", format="tokens", options=options))
            with pytest.raises(grpc.RpcError) as caught:
                stub.DescribeDataset(pb.DescribeDatasetRequest(dataset=ref), timeout=120)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


SIGNALLED = """
import os, signal, socket, time
from gyre_daemon.workers.supervisor import spawn_python, start_spawner

start_spawner()
ours, theirs = socket.socketpair()
ours.settimeout(30)
theirs.setblocking(False)
signal.set_wakeup_fd(theirs.fileno())  # as event loops do
signal.signal(signal.SIGTERM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as while a thread starts
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)  # another thread could take it now
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
assert ours.recv(1) == bytes([signal.SIGTERM])

child = "import os, signal, sys; os.write(int(sys.argv[1]), bytes(signal.pthread_sigmask(0, ())))"
spawn_python(["-c", child + "; os.write(int(sys.argv[1]), b'!')"], os.environ, theirs.fileno())
assert ours.recv(9) == b"!", "it blocks signals"
"""


def test_a_signal_reaches_the_event_loop_while_a_thread_starts() -> None:
    """The thread that starts programs lacks the loop's descriptor. Programs block no signal."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], timeout=120, check=False)
    assert done.returncode == 0
