"""Probes of a daemon that starts, serves and drains."""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import GyredCommand, StartDaemon, to_toml
from tests.fuse_folder import FuseFolder, why_not
from tests.waiting import until

DEADLINE_S = 150.0


def probe(address: str, path: str) -> tuple[int, str]:
    """Status and body of an answer; 0 where nothing listens."""
    url = f"http://{address.removeprefix('tcp:')}/-/{path}"
    try:
        with urllib.request.urlopen(url, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_a_daemon_that_drains_is_healthy_but_not_ready(
    gyred: StartDaemon, gyred_command: GyredCommand, token_files: Path
) -> None:
    dataset = {"format": "tokens", "dtype": "uint16", "sequence_length": 10}
    daemon = gyred(
        {
            "health_listen": "tcp:127.0.0.1:0",
            "drain_timeout_s": 600.0,
            "lease_s": 600.0,
            "datasets": {"tokens": {"uri": str(token_files), **dataset}},
        }
    )
    address = next(event for event in daemon.events() if event["event"] == "ready")["health"]
    assert probe(address, "healthy") == (200, "healthy\n")
    assert probe(address, "ready") == (200, "ready\n")
    with identified_channel(daemon.address) as channel:
        stub = pb_grpc.LoaderStub(channel)
        request = pb.OpenSessionRequest(
            dataset=pb.DatasetRef(name="tokens"),
            order=pb.OrderSpec(mode=pb.ORDER_MODE_FULL, tail=pb.TAIL_WRAP, global_batch_size=20),
            reader=pb.Reader(job="stays", world_size=1),
        )
        session = stub.OpenSession(request, timeout=DEADLINE_S).session_id
        assert daemon.process
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: probe(address, "ready") == (503, "not ready: draining\n"))
        assert probe(address, "healthy") == (200, "healthy\n")
        asked = gyred_command("health", "--address", daemon.address)
        assert (asked.returncode, asked.stdout) == (1, "not serving\n")
        stub.CloseSession(pb.CloseSessionRequest(session_id=session), timeout=DEADLINE_S)
    assert daemon.process.wait(120) == 0
    assert probe(address, "healthy") == (0, "")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_daemon_that_starts_is_healthy_but_not_ready(tmp_path: Path) -> None:
    """It waits for the mount of its cache."""
    for name in ("source", "mount"):
        (tmp_path / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp:127.0.0.1:{port}"
    with FuseFolder(tmp_path / "source", tmp_path / "mount") as folder:
        config = {
            "listen": [f"unix:{tmp_path}/run/gyre.sock"],
            "health_listen": address,
            "cache_dir": str(folder.path / "cache"),
        }
        (tmp_path / "gyre.toml").write_text(to_toml(config))
        command = [sys.executable, "-m", "gyre_daemon", "serve", "--config"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "home")}
        folder.stop()
        try:
            with subprocess.Popen(
                [*command, str(tmp_path / "gyre.toml")], env=environment
            ) as process:
                until(lambda: probe(address, "ready") == (503, "not ready: starting\n"))
                assert probe(address, "healthy") == (200, "healthy\n")
                until(lambda: probe(address, "ready") == (200, "ready\n"))
                process.send_signal(signal.SIGTERM)
                assert process.wait(DEADLINE_S) == 0
        finally:
            folder.go_on()


def test_health_is_asked_without_other_packages(gyred: StartDaemon) -> None:
    daemon = gyred({})

    def imported(*arguments: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
        return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}

    packages = imported("-m", "gyre_daemon", "health", "--address", daemon.address)
    packages -= imported("-c", "") | sys.stdlib_module_names
    assert packages == {"gyre_daemon", "gyre_protos"}


def test_health_of_a_daemon_that_is_frozen_and_of_another_server(
    gyred: StartDaemon, gyred_command: GyredCommand
) -> None:
    daemon = gyred({"health_listen": "tcp:127.0.0.1:0"})
    address = next(event for event in daemon.events() if event["event"] == "ready")["health"]
    other = gyred_command("health", "--address", address)
    assert other.returncode == 1
    assert other.stderr.endswith("no gRPC server listens there\n")
    assert daemon.process
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        frozen = gyred_command("health", "--address", daemon.address)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert frozen.returncode == 1
    assert frozen.stderr.endswith("no answer in 5 s\n")
    assert gyred_command("health", "--address", daemon.address).returncode == 0
