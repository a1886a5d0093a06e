"""`gyre convert`, `index`, `measure` and `lint` with `--engine`: as on one machine, byte for byte.

On three raylets, one is killed, and so is the driver; as root, they are in a network namespace of
their own. Each raylet is a node to Ray, with a private daemon of its own. Of a Ray on this machine,
the head is killed.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tokenizers import make_tokenizer
from tests.waiting import until

REPOSITORY = Path(__file__).parents[3]
NUM_UNITS, FIRST_GATE, SECOND_GATE = 18, 5, 12
PIPE = subprocess.PIPE
# Ray's limits are for a machine that is not busy.
PATIENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "240",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "240",
    "TIMEOUT_FOR_SPECIFIC_SERVER_S": "240",
}
# A killed raylet is noticed within some seconds; the default is a minute.
WATCHED = {
    "RAY_health_check_initial_delay_ms": "60000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass
class Cluster:
    """Three raylets.

    Attributes:
        address: For `--engine`.
        process: That started them.
        prefix: A command that runs others where they are.
        environment: For those.
        raylets: Process ids of those that may be killed.
    """

    address: str
    process: "subprocess.Popen[str]"
    prefix: Sequence[str]
    environment: dict[str, str]
    raylets: list[int] = field(default_factory=list)

    def fill(self) -> None:
        """Starts raylets until there are three."""
        assert self.process.stdin
        assert self.process.stdout
        while len(self.raylets) < 2:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self.raylets.append(int(self.process.stdout.readline()))

    def kill_one(self) -> None:
        os.kill(self.raylets.pop(), signal.SIGKILL)


def environment_in(folder: str) -> dict[str, str]:
    """An environment whose processes `processes_of` finds."""
    found = {**os.environ, **PATIENT, "PYTHONPATH": str(REPOSITORY)}
    for name in ("XDG_CACHE_HOME", "GYRE_ADDRESS", "GYRE_INDEX_DIR", "RAY_ADDRESS"):
        found.pop(name, None)
    return found | {"TMPDIR": folder, "RAY_TMPDIR": folder, "HOME": folder}


@pytest.fixture(scope="module")
def short_folder() -> Iterator[str]:
    """Not in pytest's folder: the paths of Ray's sockets may have 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        yield folder
        until(lambda: not processes_of(folder))


@pytest.fixture(scope="module")
def cluster(short_folder: str) -> Iterator[Cluster]:
    environment = environment_in(short_folder) | WATCHED
    with contextlib.ExitStack() as stack:
        prefix: list[str] = []
        if os.geteuid() == 0 and shutil.which("unshare"):
            up = "ip link set lo up && echo up && exec cat"
            command = ["unshare", "-n", "sh", "-c", up]
            space = stack.enter_context(
                subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
            )
            assert space.stdout
            assert space.stdout.readline() == "up\n"
            prefix = ["nsenter", "-t", str(space.pid), "-n"]
        command = [*prefix, sys.executable, str(Path(__file__).with_name("raylets.py"))]
        raylets = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        )
        assert raylets.stdout
        yield Cluster(raylets.stdout.readline().strip(), raylets, prefix, environment)
        raylets.communicate("")


def processes_of(folder: str) -> list[str]:
    """The command lines of processes that name a folder, or whose environment does."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if folder in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(" ".join(process.cmdline()))
    return found


def write_tars(folder: Path, bad: bytes) -> None:
    """One file a unit; a few documents are bad."""
    folder.mkdir()
    for shard in range(NUM_UNITS):
        with tarfile.open(folder / f"{shard:02}.tar", "w") as archive:
            for number in range(20 * shard, 20 * shard + 20):
                document = bad if number % 100 == 7 else b"{}"
                text = b"the cat number %d sat" % number * (number % 5)
                for extension, data in (("txt", text), ("json", document)):
                    member = tarfile.TarInfo(f"{number:06}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def arguments_of(command: str, folder: Path) -> list[str]:
    """The arguments of a command about the files in a folder, without its engine."""
    source = str(folder / "tars")
    tokenize = {"name": "tokenize", "field": "txt", "tokenizer": str(folder / "tokenizer.json")}
    (folder / "chain.json").write_text(json.dumps([tokenize]))
    chain = ["--transforms", str(folder / "chain.json")]
    if command == "convert":
        options = ["--to", "tokens", "--column", "tokens", "--samples-per-shard", "20"]
        return ["convert", source, str(folder / "here"), "--json", *options, *chain]
    return [command, source, "--json", *(chain if command == "measure" else [])]


def stored(folder: Path) -> dict[str, bytes]:
    """What a command leaves in the folder of its output, or of indexes.

    Without the joined scans: a dataset that was opened has them, one that was checked has not.
    """
    suffixes = ".bin", ".gyre-index", ".gyre-lengths", ".gyre-damage"
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in suffixes}
    return {name: data for name, data in found.items() if b"rows of each shard" not in data}


def prepare(command: str, folder: Path) -> tuple[list[str], list[str]]:
    """Writes the files of a test.

    Returns:
        The command, and the same behind gates.
    """
    write_tars(folder / "tars", b"{" if command == "lint" else b"{}")
    make_tokenizer(folder / "tokenizer.json")
    gates = folder / "gates"
    (gates / "done").mkdir(parents=True)
    (gates / "gates").write_text(f"{FIRST_GATE} {SECOND_GATE}")
    script = "from tests.faults.client.gated import main; main()"
    arguments = arguments_of(command, folder)
    here = [sys.executable, "-m", "gyre_client", *arguments]
    return here, [sys.executable, "-c", script, str(gates), *arguments]


def done_in(folder: Path) -> set[tuple[str, ...]]:
    """The units that were done, with an id of each time."""
    return {tuple(path.name.split()) for path in (folder / "gates" / "done").iterdir()}


def start(command: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, stdout=PIPE, stderr=PIPE, text=True, env=environment, cwd=REPOSITORY
    )


def outcome(command: Sequence[str], environment: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """The exit status of a command, and its output without what was done before it.

    On a busy machine a process that Ray starts for a driver may end at once: it is tried again.
    """
    for _ in range(3):
        with start(command, environment) as process:
            text, error = process.communicate(timeout=300)
        if "Starting Ray client server failed" not in error:
            break
    assert text, error
    before = "num_reused", "num_measured", "shards", "folder", "seconds"
    value = json.loads(text)
    return process.returncode, {key: each for key, each in value.items() if key not in before}


@pytest.mark.parametrize("command", ["convert", "index", "measure", "lint"])
def test_a_killed_raylet_and_a_killed_driver_cost_no_finished_unit(
    command: str, tmp_path: Path, cluster: Cluster
) -> None:
    """Later units wait at a gate each, where the one and the other are killed."""
    cluster.fill()
    local, gated = prepare(command, tmp_path)
    on_ray = [each.replace(f"{tmp_path}/here", f"{tmp_path}/on-ray") for each in gated]
    on_ray = [*cluster.prefix, *on_ray, "--engine", cluster.address]
    environment = dict(cluster.environment)
    if command != "convert":
        environment["GYRE_INDEX_DIR"] = str(tmp_path / "on-ray")
    results = "on-ray/units-*/results" if command != "convert" else ".on-ray.unfinished/results"

    def num_done() -> int:
        return len(list(tmp_path.glob(f"{results}/[0-9]*.json")))

    with start(on_ray, environment) as driver:
        until(lambda: driver.poll() is not None or num_done() == FIRST_GATE, 240)
        assert driver.poll() is None, driver.communicate()
        cluster.kill_one()
        (tmp_path / "gates" / str(FIRST_GATE)).touch()
        until(lambda: driver.poll() is not None or num_done() == SECOND_GATE, 240)
        assert driver.poll() is None, driver.communicate()
        driver.kill()
    before = done_in(tmp_path)
    (tmp_path / "gates" / str(SECOND_GATE)).touch()
    found = outcome(on_ray, environment)
    work = "index" if command == "measure" else command
    again = {int(each[1]) for each in done_in(tmp_path) - before if each[0] == work}
    assert again == set(range(SECOND_GATE, NUM_UNITS))
    if command != "convert":
        environment["GYRE_INDEX_DIR"] = str(tmp_path / "here")
    assert found == outcome([*cluster.prefix, *local], environment)
    if command == "lint":
        assert [each["sample_id"] for each in found[1]["findings"]] == [7, 107, 207, 307]
    assert not list(tmp_path.glob(results))
    assert stored(tmp_path / "on-ray") == stored(tmp_path / "here")
    if command != "lint":
        assert len(stored(tmp_path / "on-ray")) >= 1


def test_a_command_ends_with_the_head_of_its_ray(tmp_path: Path, short_folder: str) -> None:
    """With status 1; the same command does the rest. Without a folder for all, nothing begins."""
    local, gated = prepare("lint", tmp_path)
    environment = environment_in(short_folder)
    on_ray = [*gated, "--engine", "ray"]
    with start(on_ray, environment) as refused:
        _, error = refused.communicate(timeout=240)
    assert refused.returncode == 2
    assert "GYRE_INDEX_DIR is not set" in error
    environment["GYRE_INDEX_DIR"] = str(tmp_path / "index")
    # Ray's own limit, a minute by default.
    with start(on_ray, {**environment, "RAY_gcs_rpc_server_reconnect_timeout_s": "10"}) as command:
        until(lambda: command.poll() is not None or len(done_in(tmp_path)) == FIRST_GATE, 240)
        assert command.poll() is None, command.communicate()
        (head,) = [
            each
            for each in psutil.Process(command.pid).children(recursive=True)
            if "gcs_server" in each.name()
        ]
        head.kill()
        _, error = command.communicate(timeout=240)
    assert command.returncode == 1, error
    assert "The same command does the rest" in error
    for gate in (FIRST_GATE, SECOND_GATE):
        (tmp_path / "gates" / str(gate)).touch()
    assert outcome(on_ray, environment) == outcome(local, environment)
