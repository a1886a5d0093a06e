"""`gyre convert --engine ray://`, on three raylets: one is killed, and so is the driver.

As root, they are in a network namespace of their own. Each raylet is a node to Ray, with a private
daemon of its own.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.tokenizers import make_tokenizer
from tests.waiting import until

REPOSITORY = Path(__file__).parents[3]
PART, NUM_PARTS, FIRST_GATE, SECOND_GATE = 20, 18, 5, 12


@dataclass(frozen=True)
class Cluster:
    """Three raylets.

    Attributes:
        address: For `--engine`.
        raylets: Their process ids.
        prefix: A command that runs others where they are.
        environment: For those.
    """

    address: str
    raylets: Sequence[int]
    prefix: Sequence[str]
    environment: dict[str, str]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with (
        contextlib.ExitStack() as stack,
        # Not in pytest's folder: the paths of Ray's sockets may have 107 characters.
        tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder,
    ):
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": folder,
            "RAY_TMPDIR": folder,
            "HOME": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "GYRE_TRANSFORM_DEADLINE_S": "600",
            # Ray's limits are for a machine that is not busy.
            "RAY_raylet_start_wait_time_s": "240",
            "RAY_agent_register_timeout_ms": "240000",
            "RAY_worker_register_timeout_seconds": "240",
            # A killed raylet is noticed within some seconds; the default is a minute.
            "RAY_health_check_initial_delay_ms": "60000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "20000",
            "RAY_health_check_failure_threshold": "3",
        }
        environment.pop("GYRE_ADDRESS", None)
        prefix: list[str] = []
        if os.geteuid() == 0 and shutil.which("unshare"):
            up = "ip link set lo up && echo up && exec cat"
            space = stack.enter_context(
                subprocess.Popen(
                    ["unshare", "-n", "sh", "-c", up],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            assert space.stdout
            assert space.stdout.readline() == "up\n"
            prefix = ["nsenter", "-t", str(space.pid), "-n"]
        command = [*prefix, sys.executable, str(Path(__file__).with_name("raylets.py"))]
        raylets = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        )
        assert raylets.stdout
        found = json.loads(raylets.stdout.readline())
        yield Cluster(found["address"], found["raylets"], prefix, environment)
        raylets.communicate("")
        until(lambda: not processes_of(folder))


def processes_of(folder: str) -> list[str]:
    """The command lines of processes that name a folder, or whose environment does."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if folder in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(" ".join(process.cmdline()))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_raylet_and_a_killed_driver_cost_no_finished_part(
    tmp_path: Path, cluster: Cluster
) -> None:
    """Samples of later parts wait at a gate each, where the one and the other are killed."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    lines = []
    for number in range(PART * NUM_PARTS):
        word = "first" if number >= PART * FIRST_GATE else ""
        word = "second" if number >= PART * SECOND_GATE else word
        lines.append(json.dumps({"text": f"{word} the cat number {number} sat" * (number % 5)}))
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    gate = "--transform", "tests.probe_transforms:Gate", "field=json"
    gates = [(*gate, f"word={word} the", f"file={tmp_path}/{word}") for word in ("first", "second")]
    command = [sys.executable, "-m", "gyre_client", "convert", str(tmp_path / "corpus.jsonl")]
    options = [
        *("--json", "--to", "tokens", "--dtype", "uint16", "--samples-per-shard", str(PART)),
        *(word for gate in gates for word in gate),
        *("--transform", "tokenize", "field=json", "key=text", f"tokenizer={tokenizer}"),
        *("end=1", "engine=library"),  # an engine would be tried on samples that wait
    ]

    def start(target: str, *more: str) -> "subprocess.Popen[str]":
        arguments = [*cluster.prefix, *command, str(tmp_path / target), *options, *more]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            arguments, stdout=pipe, stderr=pipe, text=True, env=cluster.environment, cwd=REPOSITORY
        )

    unfinished = tmp_path / ".on-ray.unfinished"

    def num_done() -> int:
        return len(list((unfinished / "results").glob("[0-9]*.json")))

    ray = ["--engine", cluster.address]
    with start("on-ray", *ray) as driver:
        until(lambda: driver.poll() is not None or num_done() == FIRST_GATE, 240)
        assert driver.poll() is None, driver.communicate()
        os.kill(cluster.raylets[-1], signal.SIGKILL)
        (tmp_path / "first").touch()
        until(lambda: driver.poll() is not None or num_done() == SECOND_GATE, 240)
        assert driver.poll() is None, driver.communicate()
        driver.kill()
    kept = {path.name: path.stat().st_mtime_ns for path in (unfinished / "files").iterdir()}
    assert len(kept) == SECOND_GATE
    (tmp_path / "second").touch()
    with start("on-ray", *ray) as again:
        text, error = again.communicate(timeout=300)
    assert again.returncode == 0, error
    assert json.loads(text)["num_files"] == NUM_PARTS
    assert not unfinished.exists()
    for name, written_ns in kept.items():
        assert (tmp_path / "on-ray" / name).stat().st_mtime_ns == written_ns
    with start("here") as here:
        _, error = here.communicate(timeout=300)
    assert here.returncode == 0, error
    assert contents(tmp_path / "on-ray") == contents(tmp_path / "here")
