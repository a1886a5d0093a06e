"""A daemon process and its operator: addresses, locks, health, logs, shutdown."""

import os
import pty
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from gyre_client import Loader
from gyre_client.errors import UnknownDataset
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel, is_serving
from tests.conftest import GyredCommand, StartDaemon, daemons_in, to_toml
from tests.preloaded.interpreter import Interpreter
from tests.waiting import until

SERVICE = "gyre_protos.v1.Loader"
HOMELESS_UID = 54321
# `gyred` as a user without a name and a home.
AS_HOMELESS = f"""
import os, sys
import difflib, importlib.metadata, shtab, tomllib  # this interpreter may be closed to others
from gyre_daemon import cli
os.setgroups([])
os.setgid({HOMELESS_UID})
os.setuid({HOMELESS_UID})
cli.main(sys.argv[1:])
"""


def tokens_dataset(folder: Path) -> dict[str, object]:
    return {"uri": str(folder), "format": "tokens", "dtype": "uint16", "sequence_length": 10}


def test_health_and_datasets(gyred: StartDaemon, token_files: Path) -> None:
    daemon = gyred({"datasets": {"tokens": tokens_dataset(token_files)}})
    with identified_channel(daemon.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=120)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

        stub = pb_grpc.LoaderStub(channel)
        (summary,) = stub.ListDatasets(pb.ListDatasetsRequest(), timeout=120).datasets
        assert (summary.name, summary.format, summary.open) == ("tokens", "tokens", False)
        description = stub.DescribeDataset(
            pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="tokens")), timeout=120
        )
        assert (description.num_samples, description.num_shards, description.num_bytes) == (
            100 + 70 + 0 + 130,
            4,
            6006,
        )


def test_a_daemon_without_datasets_says_what_to_do(
    gyred: StartDaemon, token_files: Path, gyred_command: GyredCommand
) -> None:
    daemon = gyred({})
    (warning,) = (each for each in daemon.events() if each["event"] == "configuration warning")
    assert warning["level"] == "warning"
    assert "no dataset is configured" in warning["reason"]
    assert f"to {daemon.config_path}, and let the daemon read it again" in warning["reason"]
    assert "name the file with --config" in gyred_command("check-config").stderr
    daemon = gyred({"datasets": {"tokens": tokens_dataset(token_files)}})
    assert not [each for each in daemon.events() if each["event"] == "configuration warning"]


@pytest.mark.parametrize("uri", ["data", "data/*.bin", "data/{a,b}.bin", "./d[a]ta/{a,b}.*"])
def test_the_name_of_the_file_s_folder_is_no_pattern(
    tmp_path: Path, interpreter: Interpreter, uri: str
) -> None:
    """Its relative paths may be patterns; what stands before them is as it is."""
    folder = tmp_path / "run[1] {x,y} \\n"
    folder.mkdir()
    address = f"unix:{tmp_path}/gyre.sock"
    config = {"listen": [address], "datasets": {"tokens": tokens_dataset(folder) | {"uri": uri}}}
    with daemons_in(folder, interpreter) as start:
        data = start(config).config_path.parent / "data"
        data.mkdir()
        for name in "ab":
            (data / f"{name}.bin").write_bytes(bytes(400))
        with identified_channel(address) as channel:
            request = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="tokens"))
            found = pb_grpc.LoaderStub(channel).DescribeDataset(request, timeout=120)
    assert (found.num_samples, found.num_shards) == (40, 2)


def test_a_plan_needs_no_reads(gyred: StartDaemon, token_files: Path) -> None:
    daemon = gyred({"datasets": {"tokens": tokens_dataset(token_files)}})
    with identified_channel(daemon.address) as channel:
        stub = pb_grpc.LoaderStub(channel)

        def plan(step: int, rank: int = 0, world_size: int = 1) -> list[int]:
            order = pb.OrderSpec(seed=3, global_batch_size=100, tail=pb.TAIL_WRAP)
            request = pb.PlanStepRequest(
                dataset=pb.DatasetRef(name="tokens"),
                order=order,
                step=step,
                rank=rank,
                world_size=world_size,
            )
            return list(stub.PlanStep(request, timeout=120).sample_ids)

        epoch = plan(0) + plan(1) + plan(2)
        assert sorted(epoch) == list(range(300))
        assert epoch != sorted(epoch)
        assert plan(1) == plan(1, 0, 2) + plan(1, 1, 2)
        reads = [
            count
            for count in stub.GetStatus(pb.GetStatusRequest(), timeout=120).storage
            if count.kind == "read"
        ]
        # only the shards' headers and the fingerprint's probes were read, no sample
        assert sum(count.num_requests for count in reads) == 8


def test_sockets_are_private_and_removed_at_the_end(gyred: StartDaemon, token_files: Path) -> None:
    daemon = gyred({"datasets": {"tokens": tokens_dataset(token_files)}})
    path = Path(daemon.address.removeprefix("unix:"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert daemon.stop() == 0
    assert list(path.parent.iterdir()) == []
    assert [event["event"] for event in daemon.events()] == ["ready", "draining", "stopped"]


def test_second_daemon_on_a_socket_is_refused_and_harms_nothing(
    gyred: StartDaemon, gyred_command: GyredCommand
) -> None:
    daemon = gyred({})
    assert daemon.process
    second = gyred_command("serve", "--config", str(daemon.config_path))
    assert second.returncode == 2
    assert f"another daemon (process {daemon.process.pid})" in second.stderr
    assert is_serving(daemon.address)


def test_socket_of_a_killed_daemon_is_taken_over(gyred: StartDaemon) -> None:
    daemon = gyred({})
    daemon.kill()
    assert Path(daemon.address.removeprefix("unix:")).exists()
    daemon.restart()
    assert is_serving(daemon.address)


def test_tcp_port_is_never_shared(
    gyred: StartDaemon, tmp_path: Path, gyred_command: GyredCommand
) -> None:
    daemon = gyred({"listen": ["tcp:127.0.0.1:0"]})
    (address,) = next(event for event in daemon.events() if event["event"] == "ready")["listen"]
    assert is_serving(address)
    second = gyred_command("serve", "--listen", address)
    assert second.returncode == 2
    assert "cannot listen on" in second.stderr


def test_an_address_open_to_other_hosts_is_refused(
    tmp_path: Path, gyred_command: GyredCommand
) -> None:
    refused = gyred_command("serve", "--listen", "tcp:0.0.0.0:0")
    assert refused.returncode == 2
    assert "open to other hosts" in refused.stderr


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("memory_bugdet = 1", "did you mean `memory_budget`?"),
        ('prefetch_batches = "many"', "expected `int`"),
        ('[datasets.x]\nuri = "/x"\nformat = "parquette"', "unknown format `parquette`"),
        (
            '[datasets.x]\nuri = "/x"\nformat = "tokens"\nsequence_lenght = 3',
            "did you mean `sequence_length`?",
        ),
        (
            '[datasets.x]\nuri = "s3://me:secret@b/x"\nformat = "tokens"\nsequence_length = 3',
            "must not contain a password",
        ),
        (
            '[datasets.x]\nuri = "file:///x::s3://y"\nformat = "tokens"\nsequence_length = 3',
            "chained URLs",
        ),
        ("listen = [", "is not valid TOML"),
    ],
)
def test_a_bad_configuration_is_refused_before_anything_is_bound(
    tmp_path: Path, text: str, complaint: str, gyred_command: GyredCommand
) -> None:
    path = tmp_path / "gyre.toml"
    path.write_text(text)
    for command in ("check-config", "serve"):
        refused = gyred_command(command, "--config", str(path))
        assert refused.returncode == 2
        assert complaint in refused.stderr
        assert "Traceback" not in refused.stderr


def test_check_config_prints_values_and_origins(tmp_path: Path) -> None:
    path = tmp_path / "gyre.toml"
    path.write_text(
        'prefetch_batches = 3\n[datasets.x]\nuri = "s3://bucket/x?key=hunter2"\n'
        'format = "tokens"\nsequence_length = 3\nstorage = { secret_access_key = "hunter2" }'
    )
    command = [
        sys.executable,
        "-m",
        "gyre_daemon",
        "check-config",
        "--config",
        str(path),
        "--memory-budget",
        "64MiB",
    ]
    environment = {**os.environ, "GYRE_LEASE_S": "7"}
    printed = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=True
    ).stdout
    assert "prefetch_batches = 3  # file" in printed
    assert "memory_budget = 67108864  # flag" in printed
    assert "lease_s = 7.0  # environment" in printed
    assert "hunter2" not in printed


def config_of(folder: Path, **datasets: object) -> Path:
    path = folder / "gyre.toml"
    path.touch(0o600)  # some hold secrets
    path.write_text(to_toml({"index_dir": str(folder / "index"), "datasets": datasets}))
    return path


def test_check_config_warns_of_missing_files(
    tmp_path: Path, token_files: Path, gyred_command: GyredCommand
) -> None:
    there = tokens_dataset(token_files)
    missing = {**there, "uri": f"{token_files}/{{a,zz}}.bin"}
    os.mkfifo(tmp_path / "pipe.bin")
    pipe, remote = ({**there, "uri": uri} for uri in (f"{tmp_path}/pipe.bin", "s3://bucket/x"))
    path = config_of(tmp_path, there=there, missing=missing, pipe=pipe, remote=remote)
    checked = gyred_command("check-config", "--config", str(path))
    assert checked.returncode == 0, "the other datasets can be served"
    warnings = sorted(checked.stderr.splitlines())
    assert len(warnings) == 2
    assert "warning: dataset `missing` cannot be served now: shard " in warnings[0]
    assert "zz.bin does not exist" in warnings[0]
    assert "warning: dataset `pipe` cannot be served now: " in warnings[1]
    assert "pipe.bin is no regular file" in warnings[1]


@pytest.mark.parametrize(("arguments", "is_json"), [((), False), (("--log-format", "json"), True)])
def test_the_log_is_text_on_a_terminal_unless_told_otherwise(
    tmp_path: Path, arguments: tuple[str, ...], is_json: bool
) -> None:
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "gyre_daemon",
        "serve",
        "--listen",
        f"unix:{tmp_path}/gyre.sock",
        *arguments,
    ]
    with (
        os.fdopen(ours, "rb", buffering=0) as terminal,
        subprocess.Popen(command, stderr=theirs) as daemon,
    ):
        os.close(theirs)
        text = b""
        while b"ready" not in text or not text.endswith(b"\n"):
            text += terminal.read(1000)
        daemon.terminate()
        assert daemon.wait(30) == 0
    line = text.decode().splitlines()[-1]
    assert line.startswith("{") == is_json
    assert is_json or f"INFO    ready  listen=unix:{tmp_path}/gyre.sock  pid={daemon.pid}" in line


def test_the_service_manager_is_notified(gyred: StartDaemon, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        daemon = gyred({}, {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"})
        states = [manager.recv(100) for _ in range(3)]
        assert b"READY=1" in states
        assert states.count(b"WATCHDOG=1") == 2
        daemon.stop()
        while manager.recv(100) != b"STOPPING=1":
            pass


def test_daemon_imports_neither_torch_nor_webdataset() -> None:
    program = (
        "import sys, gyre_daemon.cli; "
        "print(sorted({'torch', 'webdataset', 'gyre_client'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without a home")
@pytest.mark.parametrize("key", ["", "index_dir", "XDG_CACHE_HOME"])
def test_a_user_without_a_home_is_told_which_key_to_set(tmp_path: Path, key: str) -> None:
    folder = Path("/tmp") / f"gyre-homeless-{os.getpid()}"  # pytest's own is closed to others
    folder.mkdir(mode=0o700)
    os.chown(folder, HOMELESS_UID, HOMELESS_UID)
    (folder / "gyre.toml").write_text(f'index_dir = "{folder}/i"' if key == "index_dir" else "")
    environment = {"XDG_CACHE_HOME": str(folder)} if key == "XDG_CACHE_HOME" else {}
    try:
        checked = subprocess.run(
            [sys.executable, "-c", AS_HOMELESS, "check-config", "--config", folder / "gyre.toml"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        shutil.rmtree(folder)
    assert checked.returncode == (0 if key else 2), checked.stderr
    assert ("Set `index_dir`, or XDG_CACHE_HOME" in checked.stderr) == (not key)


def test_the_log_of_debug_says_what_the_daemon_does(gyred: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 100)
    config = {"datasets": {"x": {"uri": str(tmp_path / "a.jsonl")}}, "log_level": "debug"}
    daemon = gyred(config)
    with Loader("x", batch_size=10, address=daemon.address) as loader:
        assert len(list(loader)) == 10
    with pytest.raises(UnknownDataset):
        Loader("absent", batch_size=10, address=daemon.address)
    daemon.reconfigure(daemon.config_path.read_text())
    until(lambda: any(event["event"] == "shards closed" for event in daemon.events()))
    lines = [event for event in daemon.events() if event["level"] == "debug"]
    assert {line["event"] for line in lines} == {
        "call",
        "call refused",
        "session reads",
        "shard indexed",
        "shards closed",
    }
    refused = [line["error"] for line in lines if line["event"] == "call refused"]
    assert "UnknownDataset" in refused
    assert "OpenSession" in [line.get("method") for line in lines]
    assert len(lines) < 30
