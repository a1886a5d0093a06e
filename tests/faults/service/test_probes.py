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

from tests.channels import identified_channel, is_serving
from tests.conftest import StartDaemon, to_toml
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
    gyred: StartDaemon, token_files: Path
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
        assert not is_serving(daemon.address)
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
