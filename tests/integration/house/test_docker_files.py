"""The files in docker/: the commands there run, also under the unit's filter of system calls."""

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gyre_client import Loader
from gyre_trainer.training.config import load as load_training

from tests.secure_daemons import free_port

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
IMAGE_ADDRESS = "unix:/run/gyre/gyre.sock"
DEADLINE_S = 150.0

PR_SET_NO_NEW_PRIVS, PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 38, 65, 1  # linux/prctl.h
SCMP_ACT_ALLOW, SCMP_ACT_EPERM = 0x7FFF0000, 0x00050001  # seccomp.h


@dataclass(frozen=True)
class Node:
    """A small machine: the paths that docker/ names, inside a temporary folder."""

    root: Path
    health_port: int = field(default_factory=free_port)

    @property
    def address(self) -> str:
        return f"unix:{self.root}/run/gyre.sock"

    def here(self, command: Sequence[str]) -> list[str]:
        """A command of docker/ with this node's paths and the environment's own commands."""
        commands = Path(sys.executable).parent
        program = str(commands / Path(command[0]).name)
        return [program, *(self._moved(argument) for argument in command[1:])]

    def set_up(self) -> "Node":
        """Install docker/gyre.toml and 64 samples of its dataset."""
        (self.root / "data").mkdir()
        tokens = np.arange(64 * 256 + 1) % 251
        tokens.astype(np.uint8).tofile(self.root / "data" / "part.bin")
        (self.root / "gyre.toml").write_text(self._moved((DOCKER / "gyre.toml").read_text()))
        return self

    def _moved(self, text: str) -> str:
        return (
            text.replace("/etc/gyre/", f"{self.root}/")
            .replace("/run/gyre/", f"{self.root}/run/")
            .replace("/data/", f"{self.root}/data/")
            # several tests use this machine at once
            .replace("127.0.0.1:9847", "127.0.0.1:0")
            .replace("9848", str(self.health_port))
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path).set_up()


@contextmanager
def running(
    node: Node, command: Sequence[str], confine: Callable[[], None] | None = None
) -> Iterator["Service"]:
    """A daemon started as systemd does it, with a notify socket; waits for READY."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(node.root / "notify"))
        listener.settimeout(DEADLINE_S)
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(node.root / "notify"),
            "XDG_CACHE_HOME": str(node.root / "cache"),
        }
        # Between fork and exec `confine` only makes system calls, so it needs no lock that another
        # thread may hold.
        with subprocess.Popen(node.here(command), env=environment, preexec_fn=confine) as process:  # noqa: PLW1509
            try:
                yield Service(process, listener)
            finally:
                if process.poll() is None:
                    process.kill()


@dataclass(frozen=True)
class Service:
    """A running daemon and the socket on which it notifies the service manager."""

    process: subprocess.Popen[bytes]
    manager: socket.socket

    def told(self) -> str:
        return self.manager.recv(4096).decode()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order, each on one line."""
    text = re.sub(r"^#.*\n", "", (DOCKER / dockerfile).read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines) if word]


def last_json(dockerfile: str, instruction: str) -> list[str]:
    """The command in exec form that an instruction ends with."""
    texts = [rest for word, rest in instructions(dockerfile) if word == instruction]
    command: list[str] = json.loads(texts[-1][texts[-1].index("[") :])
    return command


def unit(key: str) -> list[str]:
    """The values of a key of the systemd unit, in order."""
    lines = (DOCKER / "systemd" / "gyred.service").read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def check_health(node: Node) -> int:
    return subprocess.run(
        node.here(last_json("Dockerfile.daemon", "HEALTHCHECK")), timeout=DEADLINE_S, check=False
    ).returncode


def test_the_daemon_image_serves_reports_its_health_and_ends_on_its_stop_signal(node: Node) -> None:
    command = last_json("Dockerfile.daemon", "ENTRYPOINT") + last_json("Dockerfile.daemon", "CMD")
    assert ("STOPSIGNAL", "SIGTERM") in instructions("Dockerfile.daemon")
    with running(node, command) as service:
        assert service.told() == "READY=1"
        assert check_health(node) == 0
        assert service.stop() == 0
    assert check_health(node) == 1


def test_the_trainer_image_checks_its_daemon(node: Node) -> None:
    command = node.here(last_json("Dockerfile.trainer", "HEALTHCHECK"))
    environment = {**os.environ, "GYRE_ADDRESS": node.address}
    assert (
        f"GYRE_ADDRESS={IMAGE_ADDRESS}" in dict(instructions("Dockerfile.trainer"))["ENV"].split()
    )
    with running(node, shlex.split(unit("ExecStart")[0])) as service:
        assert service.told() == "READY=1"
        assert (
            subprocess.run(command, env=environment, timeout=DEADLINE_S, check=False).returncode
            == 0
        )
    assert subprocess.run(command, env=environment, timeout=DEADLINE_S, check=False).returncode == 1


def test_the_unit_s_daemon_reports_readiness_watchdog_pings_and_its_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unit("Type") == ["notify"]
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    subprocess.run(node.here(shlex.split(unit("ExecStartPre")[0])), timeout=DEADLINE_S, check=True)
    with running(node, shlex.split(unit("ExecStart")[0])) as service:
        assert sorted(service.told() for _ in range(4)) == [
            "READY=1",
            "WATCHDOG=1",
            "WATCHDOG=1",
            "WATCHDOG=1",
        ]
        assert service.stop() == 0
        assert set(iter(service.told, "STOPPING=1")) <= {"WATCHDOG=1"}


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"),
    reason="systemd-analyze names the calls in the unit's filter",
)
def test_the_daemon_serves_under_the_unit_s_filter_of_system_calls(node: Node) -> None:
    with running(node, shlex.split(unit("ExecStart")[0]), confinement()) as service:
        assert service.told() == "READY=1"
        status = Path(f"/proc/{service.process.pid}/status").read_text()
        assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)
        with Loader("text", batch_size=16, address=node.address) as loader:
            sums = [int(next(loader)["tokens"].long().sum()) for _ in range(4)]
        samples = np.lib.stride_tricks.sliding_window_view(
            np.fromfile(node.root / "data" / "part.bin", np.uint8), 257
        )[::256]
        assert sum(sums) == samples.sum()  # one epoch: every sample once
        assert service.stop() == 0


def confinement() -> Callable[[], None]:
    """A function that applies the unit's filter of system calls to the process that calls it."""
    assert unit("MemoryDenyWriteExecute") == unit("NoNewPrivileges") == ["yes"]
    libc, seccomp = ctypes.CDLL(None), ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(SCMP_ACT_EPERM))
    for name in allowed_calls():
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # a call of another architecture has no number here
            assert seccomp.seccomp_rule_add(context, SCMP_ACT_ALLOW, number, 0) == 0

    def confine() -> None:
        # Linux before 6.3 refuses this, so it is not tested there
        libc.prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0)
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or seccomp.seccomp_load(context):
            os._exit(99)

    return confine


def allowed_calls() -> set[str]:
    """The system calls that the unit allows."""
    listing = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager"],
        capture_output=True,
        text=True,
        check=True,
    )
    groups: dict[str, list[str]] = {}
    for line in listing.stdout.splitlines():
        if line.startswith("@"):
            members = groups.setdefault(line.strip(), [])
        elif line.startswith("    ") and not line.lstrip().startswith("#"):
            members.append(line.strip())

    def expand(name: str) -> set[str]:
        return set[str]().union(*map(expand, groups[name])) if name in groups else {name}

    allowed = expand("@default")  # always part of an allow list, see systemd.exec(5)
    for entry in unit("SystemCallFilter"):
        names = set[str]().union(*(expand(name) for name in entry.lstrip("~").split()))
        allowed = allowed - names if entry.startswith("~") else allowed | names
    return allowed


def volumes(service: str) -> dict[str, str]:
    """The sources of a service's mounts in compose.yaml, by target."""
    mounts = [
        re.sub(r"\$\{(\w+)[^}]*\}", r"\1", mount)
        for mount in COMPOSE["services"][service]["volumes"]
    ]
    return {mount.split(":")[1]: mount.split(":")[0] for mount in mounts}


def test_compose_gives_daemon_and_trainer_the_socket_s_folder_and_files_that_exist() -> None:
    daemon, trainer = volumes("daemon"), volumes("trainer")
    assert daemon["/run/gyre"] == trainer["/run/gyre"] == "socket"
    assert "uid=10001,gid=10001" in COMPOSE["volumes"]["socket"]["driver_opts"]["o"]
    for mounts in (daemon, trainer):
        files = [source for source in mounts.values() if source.startswith("./")]
        assert files
        assert all((DOCKER / source).is_file() for source in files)
    assert COMPOSE["services"]["trainer"]["depends_on"]["daemon"]["condition"] == "service_healthy"


def test_compose_s_prometheus_reaches_the_daemon_s_metrics() -> None:
    prometheus = COMPOSE["services"]["prometheus"]
    assert prometheus["network_mode"] == "service:daemon"
    options = dict(option.removeprefix("--").split("=") for option in prometheus["command"])
    mounts = volumes("prometheus")
    assert mounts[options["storage.tsdb.path"]] in COMPOSE["volumes"]
    config_path = Path(options["config.file"])
    config = yaml.safe_load(
        (DOCKER / mounts[str(config_path.parent)] / config_path.name).read_text()
    )
    (target,) = (
        target
        for job in config["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    )
    assert f'metrics_listen = "tcp:{target}"' in (DOCKER / "gyre.toml").read_text()
    assert all((DOCKER / "prometheus" / name).is_file() for name in config["rule_files"])


def test_compose_s_grafana_is_provisioned_with_the_dashboard_and_its_prometheus() -> None:
    grafana, mounts = COMPOSE["services"]["grafana"], volumes("grafana")
    assert all((DOCKER / each).exists() for each in mounts.values() if each.startswith("./"))
    provisioning = DOCKER / mounts["/etc/grafana/provisioning"]
    (source,) = _provisioned(provisioning / "datasources")["datasources"]
    assert source["isDefault"]
    assert source["type"] == "prometheus"
    assert grafana["network_mode"] == COMPOSE["services"]["prometheus"]["network_mode"]
    ports = [port.rpartition(":") for port in COMPOSE["services"]["daemon"]["ports"]]
    assert {inside for _, _, inside in ports} == {"3000", source["url"].rpartition(":")[2]}
    assert all(outside.startswith("127.0.0.1:") for outside, _, _ in ports)
    (provider,) = _provisioned(provisioning / "dashboards")["providers"]
    dashboard = mounts[f"{provider['options']['path']}/gyre.json"]
    assert json.loads((DOCKER / dashboard).read_text())["uid"] == "gyre"
    assert mounts["/var/lib/grafana"] in COMPOSE["volumes"]
    named = COMPOSE["services"]["prometheus"], grafana
    assert all(re.search(r":v?\d+\.\d+\.\d+$", each["image"]) for each in named)


def _provisioned(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.yaml")
    value: dict[str, Any] = yaml.safe_load(file.read_text())
    return value


def test_compose_s_training_job_fits_its_dataset() -> None:
    command = COMPOSE["services"]["trainer"]["command"]
    config = load_training(DOCKER / Path(command[1]).name)
    config.require_divisible(int(command[command.index("--nproc") + 1]))
    assert volumes("trainer")[str(Path(config.run.out).parent)] == "runs"
    dataset = subprocess.run(
        [Path(sys.executable).with_name("gyred"), "check-config", "--config", DOCKER / "gyre.toml"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"[datasets.{config.data.dataset}]" in dataset
    assert f"sequence_length = {config.data.sequence_length + 1}" in dataset


@pytest.mark.parametrize("dockerfile", ["Dockerfile.daemon", "Dockerfile.trainer"])
def test_an_image_copies_files_that_exist_and_runs_without_privileges(dockerfile: str) -> None:
    copies = [
        rest.split()
        for word, rest in instructions(dockerfile)
        if word == "COPY" and not rest.startswith("--from")
    ]
    sources = [source for *sources, _ in copies for source in sources]
    allowed = (DOCKER / f"{dockerfile}.dockerignore").read_text().split("\n")
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed
    users = [rest for word, rest in instructions(dockerfile) if word == "USER"]
    assert users
    assert not users[-1].startswith(("0", "root"))
