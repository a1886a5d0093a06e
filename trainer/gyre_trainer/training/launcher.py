"""All ranks of one machine under one process: a small torchrun that leaves no process behind.

The ranks stay in the launcher's process group, so a terminal's Ctrl-C and a kill of the group reach
them all; if the launcher alone is killed, the kernel kills its ranks (`PR_SET_PDEATHSIG`). The
rendezvous store lives in the launcher on a port that the kernel chose and that is never free in
between, so two jobs that start together cannot meet.
"""

import os
import selectors
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
from gyre_trainer.training.rank_failure import LAUNCHER_VARIABLE, RankFailure

# How long a rank may take to end after SIGTERM before it is killed. Less would cut off tracebacks
# and open files on a busy machine; more makes every failed job end later.
_GRACE_S = 5.0
# How soon the deadline that a signal sets is noticed: `select` does not return for a signal.
_POLL_INTERVAL_S = 0.5
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(slots=True)
class _Rank:
    """The process of one rank.

    Attributes:
        pidfd: becomes readable when the process ends.
        pipe_fd: where the rank's failure arrives.
        failure: what the rank sent, once it has ended.
    """

    index: int
    process: "subprocess.Popen[bytes]"
    pidfd: int
    pipe_fd: int
    failure: RankFailure | None = None


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
        if self._signal is not None:
            return 128 + self._signal
        return self._report_failure()

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
        process = subprocess.Popen(self._command, env=environment, pass_fds=(write_fd,), stdin=subprocess.DEVNULL)
        os.close(write_fd)
        self._ranks.append(_Rank(index, process, os.pidfd_open(process.pid), read_fd))

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.pidfd, selectors.EVENT_READ, rank)
            while selector.get_map():
                timeout_s = max(0.0, self._deadline_s - time.monotonic())
                events = selector.select(min(timeout_s, _POLL_INTERVAL_S))
                for key, _ in events:
                    selector.unregister(key.fileobj)
                    self._reap(key.data)
                if not events and time.monotonic() >= self._deadline_s:
                    return

    def _reap(self, rank: _Rank) -> None:
        status = rank.process.wait()
        rank.failure = rank_failure.read(rank.pipe_fd)
        self._ended.append(rank)
        if status != 0 and self._deadline_s == float("inf"):
            self._stop(signal.SIGTERM)

    def _stop(self, signum: int) -> None:
        """Ask every living rank to end, and set the time after which `run` kills them."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + _GRACE_S)
        for rank in self._ranks:
            if rank not in self._ended and rank.process.poll() is None:
                rank.process.send_signal(signum)

    def _forward_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or signum
        self._stop(signum)

    def _kill_all(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()
            os.close(rank.pidfd)
            os.close(rank.pipe_fd)

    def _report_failure(self) -> int:
        """The status of the rank that failed first; its message goes to stderr."""
        failed = [rank for rank in self._ended if rank.process.returncode != 0]
        if not failed:
            return 0
        first = failed[0]
        if first.failure is None:
            print(f"gyre-train: rank {first.index} {_describe_end(first.process.returncode)}", file=sys.stderr)
            return 1
        _, index, failure = min((rank.failure.time_s, rank.index, rank.failure) for rank in failed if rank.failure)
        cause = f"error: {failure.text}" if failure.status == 2 else f"rank {index} failed:\n\n{failure.text.rstrip()}"
        print(f"gyre-train: {cause}", file=sys.stderr)
        return failure.status


def _describe_end(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was ended by SIGKILL (by hand, or because memory ran out); the other ranks were stopped"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}; the other ranks were stopped"
    return f"ended with exit status {status}; the other ranks were stopped"


@contextmanager
def _signals_to(handler: "signal._HANDLER") -> Iterator[None]:
    """A context in which signals that end a job go to ``handler``."""
    before = {signum: signal.signal(signum, handler) for signum in _FORWARDED}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
