"""All ranks of one machine under one process: a small torchrun that leaves no process behind.

The launcher imports what a rank needs and forks: so the imports, some seconds of a core's time, are
made once and not by each rank, and their pages are shared. It forks before it has threads, and it
never touches CUDA, which a forked process could not use then.

The ranks stay in the launcher's process group, so a terminal's Ctrl-C and a kill of the group reach
them all. If the launcher alone is killed, the kernel kills its ranks (`PR_SET_PDEATHSIG`). The
rendezvous store lives in the launcher, on a port that the kernel chose and that is never free in
between, so two jobs that start together cannot meet.

torchrun would do most of this, but its agent loses the message of a rank that fails while another
rank fails too, and it puts its ranks into sessions of their own.

A rank tells the launcher why it failed through a pipe, before its teardown is mistaken for the
cause. A rank under torchrun has none, and prints instead.
"""

import errno
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

from gyre_protos.program import die_with
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# How long a rank may take to end after SIGTERM before it is killed. A shorter time would cut off
# tracebacks and open files on a busy machine; a longer one makes every failed job end later.
_GRACE_S = 5.0
# How often the launcher looks whether a rank has ended. A look is one system call per rank. A
# longer interval blurs which of two ranks ended first, and so which of them is named.
_POLL_INTERVAL_S = 0.02
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# Characters of a message, which the connection to a busy launcher holds without a reader.
_MAX_TEXT = 10_000


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank failed.

    Attributes:
        time_s: on the monotonic clock, which all processes of a machine share: the earliest failure
            is the cause.
        status: the exit status that follows: 2 for an error that the user can correct, else 1.
        text: one sentence; with GYRE_TRACEBACK=1 a traceback may follow.
    """

    time_s: float
    status: int
    text: str


class FailurePipe:
    """A rank's end of the connection to the process that launched it."""

    def __init__(self, launcher: Connection) -> None:
        self._launcher = launcher

    def send(self, status: int, text: str) -> None:
        """Send the failure to the launcher, if it still exists; see `RankFailure`."""
        printable = text[-_MAX_TEXT:].encode(errors="replace").decode()
        with suppress(BrokenPipeError):
            self._launcher.send(RankFailure(time.monotonic(), status, printable))


BeRank = Callable[[FailurePipe], int]
"""Is called in the process of a rank, and returns its exit status."""


def _become_rank(index: int, num_ranks: int, launcher: tuple[int, Connection], be: BeRank) -> None:
    """Be a process like one of torchrun, which dies with its launcher however that comes about."""
    pid, connection = launcher
    try:
        die_with(pid)
    except ProcessLookupError:
        sys.exit("gyre-train: the launcher is gone")
    # The title that `ps` and `top` show; all ranks have the launcher's command line.
    Path("/proc/self/comm").write_text(f"gyre-rank-{index}")
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    os.environ.update(
        {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(connection.recv()),
            # the store exists; rank 0 must not open one
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )
    sys.exit(be(FailurePipe(connection)))


class Launcher:
    """The processes of the ranks of one job."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: list[ForkProcess] = []
        self._connections: list[Connection] = []
        self._ended: list[int] = []  # in the order of their end
        self._signal: int | None = None
        self._deadline_s = float("inf")

    def run(self, be_rank: BeRank) -> int:
        """Fork one process per rank, and wait until all have ended; a failure ends the others.

        Returns:
            The exit status for the shell: 0; or that of the rank whose failure came first, after
                its message on stderr; or 128 + the signal that was passed on to the ranks.

        Raises:
            OSError: the machine has no room for so many processes.
        """
        context = get_context("fork")
        try:
            for index in range(self._num_ranks):
                here, there = context.Pipe()
                launcher = os.getpid(), there
                rank = context.Process(
                    target=_become_rank, args=(index, self._num_ranks, launcher, be_rank)
                )
                rank.start()
                there.close()
                self._ranks.append(rank)
                self._connections.append(here)
            with _signals_to(self._forward_signal):
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                for connection in self._connections:
                    with suppress(BrokenPipeError):  # it was killed already
                        connection.send(store.port)
                self._wait()
        finally:
            for rank in self._ranks:
                rank.kill()
                rank.join()
        return self._report_failure() if self._signal is None else 128 + self._signal

    def _wait(self) -> None:
        """Return when all ranks have ended, or when the deadline of a stop has passed."""
        running = set(range(self._num_ranks))
        while running and time.monotonic() < self._deadline_s:
            ended = [each for each in running if self._ranks[each].exitcode is not None]
            # A rank that a signal ended did not react to another rank's end, so it comes first.
            self._ended += sorted(ended, key=lambda each: self._status(each) >= 0)
            running.difference_update(ended)
            if self._deadline_s == float("inf") and any(map(self._status, ended)):
                self._stop(signal.SIGTERM)
            if not ended:
                time.sleep(_POLL_INTERVAL_S)

    def _status(self, index: int) -> int:
        return self._ranks[index].exitcode or 0

    def _stop(self, signum: int) -> None:
        """Ask every living rank to end, and set the time after which `run` kills them."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + _GRACE_S)
        for rank in self._ranks:
            if rank.exitcode is None and rank.pid is not None:
                os.kill(rank.pid, signum)

    def _forward_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or signum
        self._stop(signum)

    def _report_failure(self) -> int:
        """The status of the rank that failed first; its message goes to stderr."""
        failed = [each for each in self._ended if self._status(each)]
        if not failed:
            return 0
        failures = [self._failure_of(each) for each in failed]
        if failures[0] is None:  # its end is the cause, whatever the others say
            told = f"rank {failed[0]} {_describe_end(self._status(failed[0]))}"
            print(f"gyre-train: {told}; the other ranks were stopped", file=sys.stderr)
            return 1
        first = min(filter(None, failures), key=lambda each: each.time_s)
        print(f"gyre-train: {first.text.rstrip()}", file=sys.stderr)
        return first.status

    def _failure_of(self, index: int) -> RankFailure | None:
        """The message of an ended rank; None where it sent none, or not all of it."""
        connection = self._connections[index]
        if not connection.poll():  # a process that it left behind has the connection, too
            return None
        try:
            failure: RankFailure = connection.recv()
        except (EOFError, OSError):
            return None
        return failure


def _describe_end(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was ended by SIGKILL (by hand, or because memory ran out)"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


@contextmanager
def _signals_to(handler: "signal._HANDLER") -> Iterator[None]:
    """A context in which signals that end a job go to ``handler``."""
    before = {signum: signal.signal(signum, handler) for signum in _FORWARDED}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


_TORCH_WORDS = ("can't allocate memory", "out of memory", "not enough memory")


def explained(error: BaseException) -> str:
    """One sentence about an error; empty if it is not about memory."""
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    of_torch = isinstance(error, RuntimeError) and any(w in str(error) for w in _TORCH_WORDS)
    if not (of_system or of_torch or isinstance(error, MemoryError)):
        return ""
    told = textwrap.shorten(str(error) or type(error).__name__, 200)
    return (
        f"memory ran out: {told}; use more ranks, make `data.batch_size` or `data.sequence_length` "
        'smaller or `optimizer.accumulation_steps` larger, or set `memory.recompute = "layer"`; '
        "`gyre-train plan CONFIG` shows what a step needs"
    )
