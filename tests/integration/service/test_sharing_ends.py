"""What a job held when it ended, was killed or frozen stays intact, or is used again at last."""

import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.integration.service.token_jobs import (
    BATCH,
    LENGTH,
    WINDOW,
    ids_of,
    loader,
    right,
    token_config,
)
from tests.waiting import until


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    return gyred(token_config(tmp_path))


READER = """
import sys
from gyre_client import Loader
loader = Loader(
    "tokens",
    batch_size=32,
    seed=3,
    address=sys.argv[1],
    job=sys.argv[2],
    reattach_timeout_s=10,
)
kept = [next(iter(loader)) for _ in range(3)]
print("ready", flush=True)
sys.stdin.readline()
print(kept[0]["sample_id"].tolist(), kept[0]["tokens"].long().sum().item(), flush=True)
print(next(iter(loader))["sample_id"].tolist(), flush=True)
"""


@pytest.fixture
def reader(daemon: Daemon) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds three batches and waits for a line."""
    command = [sys.executable, "-c", READER, daemon.address, "other"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process
        if process.poll() is None:
            process.kill()


def test_killed_job_leaves_no_hole_in_shared_memory(daemon: Daemon) -> None:
    with loader(daemon, "a") as survivor:
        next(iter(survivor))
        for _ in range(3):
            command = [sys.executable, "-c", READER, daemon.address, "victim"]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as victim:
                assert victim.stdout
                assert victim.stdout.readline() == "ready\n"
                victim.send_signal(signal.SIGKILL)
                victim.wait()
            assert all(right(daemon, next(iter(survivor))) for _ in range(100))
        slot_bytes = -(-(BATCH * LENGTH * 4 + BATCH * 8) // 4096) * 4096

        def has_no_hole() -> bool:
            session, *others = status(daemon).sessions
            num_batches = session.num_ready + session.num_held
            is_full = not others and not session.num_in_flight
            # of a batch group that was sent in parts, a part may be released already
            num_released = 2 * (WINDOW // 3)
            return is_full and session.memory_bytes <= (num_batches + num_released) * slot_bytes

        until(has_no_hole, 120)


def test_frozen_job_wakes_to_intact_bytes_beside_one_that_went_on(
    daemon: Daemon, reader: "subprocess.Popen[str]"
) -> None:
    assert reader.stdin
    assert reader.stdout
    with loader(daemon, "a") as survivor:
        batches = [next(iter(survivor)) for _ in range(4)]
        wanted = ids_of(batches)
        total = batches[0]["tokens"].long().sum().item()
        del batches
        reader.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while len(status(daemon).sessions) > 1:
            assert right(daemon, next(iter(survivor)))
            assert time.monotonic() < deadline, "a frozen client's session must end with its lease"
        assert all(right(daemon, next(iter(survivor))) for _ in range(500))
        os.kill(reader.pid, signal.SIGCONT)
        reader.stdin.write("go on\n")
        reader.stdin.flush()
        assert reader.stdout.readline().strip() == f"{wanted[0]} {total}"
        assert reader.stdout.readline().strip() == str(wanted[3])
        assert reader.wait(120) == 0
        assert all(right(daemon, next(iter(survivor))) for _ in range(300))


def test_what_a_session_held_stays_beside_one_that_went_on_until_its_client_goes(
    daemon: Daemon,
) -> None:
    """Its session is over, and its connection to the side channel is not."""
    request = pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="tokens"),
        order=pb.OrderSpec(global_batch_size=BATCH, seed=3),
        reader=pb.Reader(job="b", world_size=1),
        transport=pb.TRANSPORT_ARENA,
        prefetch_batches=WINDOW,
    )
    with (
        identified_channel(daemon.address) as channel,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as side,
    ):
        side.settimeout(60)
        side.connect(daemon.address.removeprefix("unix:") + ".side")
        stub, metadata = pb_grpc.LoaderStub(channel), (("gyre-side-token", side.recv(100)),)
        opened = stub.OpenSession(request, metadata=metadata, timeout=60)
        _, (descriptor,), _, _ = socket.recv_fds(side, 100, 1)
        with loader(daemon, "a") as survivor:
            assert right(daemon, next(iter(survivor)))
            assert [each.num_sharing for each in status(daemon).sessions] == [2, 2]
            said: queue.SimpleQueue[pb.StreamRequest | None] = queue.SimpleQueue()
            said.put(pb.StreamRequest(attach=pb.Attach(session_id=opened.session_id)))
            said.put(pb.StreamRequest(credit=pb.Credit(num_batches=1)))
            heard = stub.Stream(iter(said.get, None), timeout=60)
            groups = next(each.batches.groups for each in heard if each.HasField("batches"))
            begin = groups[0].arena.offsets_bytes[0]
            held = slice(begin, begin + BATCH * LENGTH * 4)
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as arena:
                os.close(descriptor)
                before = arena[held]
                said.put(None)
                stub.CloseSession(pb.CloseSessionRequest(session_id=opened.session_id), timeout=60)
                for _ in range(5 * WINDOW):
                    assert right(daemon, next(iter(survivor)))
                assert arena[held] == before
                side.close()
                for _ in range(20 * WINDOW):
                    assert right(daemon, next(iter(survivor)))
                assert arena[held] != before, "the place is used again"
