"""Without an address, a job's ranks share one private daemon, however often a service restarts."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gyre_trainer.training.history import read

from tests.daemons import private_daemons
from tests.preloaded.interpreter import Interpreter
from tests.train_jobs import IMPORTS, Job, Jobs

DEADLINE_S = 450.0
CONFIG = """
[run]
out = "{out}"
steps = 6
log_every = 1
device = "cpu"
threads = 1
[data]
dataset = "{tokens}"
format = "tokens"
options = {{ dtype = "uint16", sequence_length = 9 }}
batch_size = 4
sequence_length = 8
[model]
vocab_size = 64
num_layers = 1
dim = 16
num_heads = 2
num_kv_heads = 2
hidden_dim = 32
[eval]
dataset = "{tokens}"
every = 3
"""

Start = Callable[..., Job]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    interpreter = Interpreter(IMPORTS)
    yield interpreter
    interpreter.close()


@pytest.fixture
def start(tmp_path: Path, interpreter: Interpreter) -> Iterator[Start]:
    (np.arange(4000) % 64).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    path = tmp_path / "train.toml"
    path.write_text(CONFIG.format(out=tmp_path / "run", tokens=tmp_path / "tokens.bin"))
    environment = {name: value for name, value in os.environ.items() if name != "GYRE_ADDRESS"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    jobs = Jobs(interpreter, tmp_path)

    def run(*flags: str) -> Job:
        return jobs.start("run", str(path), "--nproc", "2", *flags, environment=environment)

    yield run
    jobs.end(DEADLINE_S)


def daemons_while(process: Job, temporary: Path) -> set[int]:
    """The pids of all private daemons that ran until a process ended."""
    pids: set[int] = set()
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None:
        assert time.monotonic() < deadline
        pids |= {daemon.pid for daemon in private_daemons(temporary)}
        time.sleep(0.2)
    return pids


def test_a_service_may_restart_a_run_that_has_no_checkpoint_yet(
    start: Start, tmp_path: Path
) -> None:
    # as if it had ended before its first checkpoint
    interrupted = start("--resume-if-any", "--set", "checkpoint.every=0")
    assert len(daemons_while(interrupted, tmp_path)) == 1
    assert interrupted.returncode == 0
    assert start("--resume-if-any").wait(DEADLINE_S) == 0
    assert [record.step for record in read(tmp_path / "run" / "history.jsonl").steps] == list(
        range(6)
    )
    assert read(tmp_path / "run" / "history.jsonl").resumed_at == [0]
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == 6
    assert not list(tmp_path.glob("gyred-*"))


def test_the_shared_daemon_is_gone_after_the_launcher_was_killed(
    start: Start, tmp_path: Path
) -> None:
    launcher = start("--set", "run.steps=1000000", "--set", "eval.every=0")
    history = tmp_path / "run" / "history.jsonl"
    deadline = time.monotonic() + DEADLINE_S
    while not history.exists() or not history.stat().st_size:
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (daemon,) = private_daemons(tmp_path)
    os.kill(launcher.pid, signal.SIGKILL)
    daemon.wait(DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while list(tmp_path.glob("gyred-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
