"""The launcher names the rank that failed and leaves nothing behind; ranks are small scripts."""

import contextlib
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.preloaded.interpreter import Interpreter

PREAMBLE = """
import os, sys, time
from pathlib import Path
from gyre_trainer.training.launcher import launch

def be_rank(tell):
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[2])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    exec(SCRIPT, globals() | locals())
    return 0

sys.exit(launch(int(sys.argv[1]), be_rank))
"""
PROGRAM = "import os, runpy, sys; os.setsid(); del sys.argv[0]; runpy.run_path(sys.argv[0])"
DEADLINE_S = 150.0


class Job:
    """A launcher process in a session of its own, and the ranks it started."""

    def __init__(self, interpreter: Interpreter, folder: Path, script: str, num_ranks: int) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        path = folder / "rank.py"
        path.write_text(f"SCRIPT = {textwrap.dedent(script)!r}\n{PREAMBLE}")
        command = ["-c", PROGRAM, str(path), str(num_ranks), str(folder)]
        self._errors = folder / "errors"
        with self._errors.open("wb") as errors:
            self.process = interpreter.start(command, errors, os.environ)

    def ranks(self) -> list[psutil.Process]:
        """The processes of all ranks, once all have begun."""
        paths = [self._folder / f"pid-{rank}" for rank in range(self._num_ranks)]
        deadline_s = time.monotonic() + DEADLINE_S
        while not all(path.exists() and path.read_text() for path in paths):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        return [psutil.Process(int(path.read_text())) for path in paths]

    def end(self) -> tuple[int, str]:
        """Wait for the launcher to end; return its exit status and standard error."""
        status = self.process.wait(DEADLINE_S)
        return status, self._errors.read_text()

    def clean_up(self) -> None:
        """End all processes, even after a failure."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(DEADLINE_S)


StartJob = Callable[[str, int], Job]


@pytest.fixture
def start(tmp_path: Path, trainer_interpreter: Interpreter) -> Iterator[StartJob]:
    jobs: list[Job] = []

    def start(script: str, num_ranks: int) -> Job:
        jobs.append(Job(trainer_interpreter, tmp_path, script, num_ranks))
        return jobs[-1]

    yield start
    for job in jobs:
        job.clean_up()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not alive


def test_every_rank_knows_its_place_and_meets_the_others_at_one_store(
    tmp_path: Path, start: StartJob
) -> None:
    script = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    everyone = [None] * dist.get_world_size()
    local_rank, local_world_size = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    dist.all_gather_object(everyone, (dist.get_rank(), local_rank, local_world_size))
    (folder / f"seen-{rank}").write_text(repr(everyone))
    dist.destroy_process_group()
    """
    assert start(script, 3).end() == (0, "")
    expected = repr([(rank, str(rank), "3") for rank in range(3)])
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in range(3)] == [expected] * 3


def test_the_rank_that_failed_first_is_named_with_its_traceback_though_others_end_before_it(
    start: StartJob,
) -> None:
    script = """
    if rank == 1:
        tell(1, "rank 1: Traceback: the cause")
        (folder / "failed").touch()
        time.sleep(0.5)  # a slow teardown
        sys.exit(1)
    while not (folder / "failed").exists():
        time.sleep(0.02)
    tell(1, "rank 0: Traceback: only an echo")
    sys.exit(1)
    """
    status, errors = start(script, 2).end()
    assert status == 1
    assert errors == "gyre-train: rank 1: Traceback: the cause\n"
    assert "echo" not in errors


def test_an_error_that_the_user_can_correct_is_one_sentence_and_status_2(start: StartJob) -> None:
    status, errors = start("tell(2, 'error: no dataset of that name'); sys.exit(2)", 2).end()
    assert (status, errors) == (2, "gyre-train: error: no dataset of that name\n")


def test_a_traceback_longer_than_a_pipe_is_cut_at_its_beginning(start: StartJob) -> None:
    script = """tell(1, chr(1) * 100_000 + chr(0xD800) * 100_000 + "the end"); sys.exit(1)"""
    status, errors = start(script, 1).end()
    assert status == 1
    assert errors.endswith("the end\n")
    assert len(errors) < 20_000


def test_a_killed_rank_ends_the_others_though_they_ignore_sigterm(
    tmp_path: Path, start: StartJob
) -> None:
    script = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"deaf-{rank}").touch()
    time.sleep(600)
    """
    job = start(script, 2)
    ranks = job.ranks()
    while not (tmp_path / "deaf-0").exists():
        time.sleep(0.02)
    ranks[1].kill()
    status, errors = job.end()
    assert status == 1
    assert "rank 1 was ended by SIGKILL" in errors
    assert_gone(ranks)


def test_a_rank_that_just_exits_is_named(tmp_path: Path, start: StartJob) -> None:
    script = """
    while rank == 0 or not (folder / "go").exists():
        time.sleep(0.02)
    os._exit(7)
    """
    job = start(script, 2)
    ranks = job.ranks()
    (tmp_path / "go").touch()
    status, errors = job.end()
    assert status == 1
    assert "rank 1 ended with exit status 7" in errors
    assert_gone(ranks)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_pass_through_to_the_ranks(tmp_path: Path, start: StartJob, signum: int) -> None:
    script = f"""
    import signal
    def leave(signum, frame):
        (folder / f"signal-{{rank}}").write_text(str(int(signum)))
        sys.exit(0)
    signal.signal({int(signum)}, leave)
    (folder / f"ready-{{rank}}").touch()
    time.sleep(600)
    """
    job = start(script, 2)
    ranks = job.ranks()
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        time.sleep(0.02)
    job.process.send_signal(signum)
    status, errors = job.end()
    assert (status, errors) == (128 + signum, "")
    assert [(tmp_path / f"signal-{rank}").read_text() for rank in range(2)] == [
        str(int(signum))
    ] * 2
    assert_gone(ranks)


def test_ranks_end_with_a_launcher_that_is_killed(start: StartJob) -> None:
    job = start("time.sleep(600)", 2)
    ranks = job.ranks()
    job.process.kill()
    job.end()
    assert_gone(ranks)


def test_a_kill_of_the_group_reaches_every_rank(start: StartJob) -> None:
    job = start("time.sleep(600)", 2)
    ranks = job.ranks()
    os.killpg(job.process.pid, signal.SIGKILL)
    job.end()
    assert_gone(ranks)


def test_a_process_that_a_rank_left_behind_holds_up_no_report(start: StartJob) -> None:
    """It has the rank's connection, which so has no end."""
    script = """
    if rank == 1:
        if not os.fork():
            time.sleep(600)
            os._exit(0)
        os._exit(5)
    time.sleep(600)
    """
    status, told = start(script, 2).end()
    assert status == 1
    assert told.startswith("gyre-train: rank 1 ended with exit status 5;")
