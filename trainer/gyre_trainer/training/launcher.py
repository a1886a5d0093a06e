"""All ranks of one machine under one process: a small torchrun that leaves no process behind.

The ranks stay in the launcher's process group, so a terminal's Ctrl-C and a kill of the group reach
them all. If the launcher alone is killed, the kernel kills its ranks (`PR_SET_PDEATHSIG`). The
rendezvous store lives in the launcher, on a port that the kernel chose and that is never free in
between, so two jobs that start together cannot meet.

torchrun would do most of this, but its agent loses the message of a rank that fails while another
rank fails too, and it puts its ranks into sessions of their own.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gyre_trainer.training import rank_failure
from gyre_trainer.training.rank_failure import LAUNCHER_VARIABLE

# How long a rank may take to end after SIGTERM before it is killed. A shorter time would cut off
# tracebacks and open files on a busy machine; a longer one makes every failed job end later.
_GRACE_S = 5.0
# How often the launcher looks whether a rank has ended. A look is one system call per rank. A
# longer interval blurs which of two ranks ended first, and so which of them is named.
_POLL_INTERVAL_S = 0.02
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class _Rank:
    """The process of one rank, and the pipe that its failure arrives in."""

    index: int
    process: "subprocess.Popen[bytes]"
    pipe_fd: int


class Launcher:
    """The ranks of one job; `run` starts them and waits."""

    def __init__(self, command: Sequence[str], num_ranks: int) -> None:
        self._command = command
        self._num_ranks = num_ranks
        self._ranks: list[_Rank] = []
        self._ended: list[_Rank] = []  # in the order of their end
        self._signal: int | None = None
        self._deadline_s = float("inf")

    def run(self) -> int:
        """Run one process per rank until all have ended; the first failure ends the others.

        Returns:
            The exit status for the shell: 0; or that of the rank whose failure came first, after
                its message on stderr; or 128 + the signal that was passed on to the ranks.
        """
        with _signals_to(self._forward_signal):
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            try:
                for index in range(self._num_ranks):
                    if self._signal is None:
                        self._start(index, store.port)
                self._wait()
            finally:
                self._kill_all()
            try:
                return self._report_failure() if self._signal is None else 128 + self._signal
            finally:
                for rank in self._ranks:
                    os.close(rank.pipe_fd)

    def _start(self, index: int, port: int) -> None:
        read_fd, write_fd = os.pipe()
        environment = os.environ | {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists; rank 0 must not open one
            LAUNCHER_VARIABLE: f"{os.getpid()}:{write_fd}",
        }
        process = subprocess.Popen(
            self._command, env=environment, pass_fds=(write_fd,), stdin=subprocess.DEVNULL
        )
        os.close(write_fd)
        self._ranks.append(_Rank(index, process, read_fd))

    def _wait(self) -> None:
        """Return when all ranks have ended, or when the deadline of a stop has passed."""
        while len(self._ended) < len(self._ranks) and time.monotonic() < self._deadline_s:
            running = [rank for rank in self._ranks if rank not in self._ended]
            ended = [rank for rank in running if rank.process.poll() is not None]
            # A rank that a signal ended did not react to another rank's end, so it comes first.
            self._ended += sorted(ended, key=lambda rank: rank.process.returncode >= 0)
            if self._deadline_s == float("inf") and any(rank.process.returncode for rank in ended):
                self._stop(signal.SIGTERM)
            if not ended:
                time.sleep(_POLL_INTERVAL_S)

    def _stop(self, signum: int) -> None:
        """Ask every living rank to end, and set the time after which `run` kills them."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + _GRACE_S)
        for rank in self._ranks:
            rank.process.send_signal(signum)  # does nothing once the process was waited for

    def _forward_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or signum
        self._stop(signum)

    def _kill_all(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()

    def _report_failure(self) -> int:
        """The status of the rank that failed first; its message goes to stderr."""
        failed = [rank for rank in self._ended if rank.process.returncode != 0]
        if not failed:
            return 0
        failures = [(rank_failure.read(rank.pipe_fd), rank.index) for rank in failed]
        if failures[0][0] is None:  # its end is the cause, whatever the others say
            told = f"rank {failed[0].index} {_describe_end(failed[0].process.returncode)}"
            print(f"gyre-train: {told}; the other ranks were stopped", file=sys.stderr)
            return 1
        first, index = min(
            ((failure, index) for failure, index in failures if failure),
            key=lambda each: each[0].time_s,
        )
        text = f"rank {index} failed:\n\n{first.text.rstrip()}"
        told = f"error: {first.text}" if first.status == 2 else text
        print(f"gyre-train: {told}", file=sys.stderr)
        return first.status


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
