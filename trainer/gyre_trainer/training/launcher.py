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

import contextlib
import errno
import json
import os
import re
import reprlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from gyre_protos.program import die_with
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gyre_trainer.errors import ConfigError

# How long a rank may take to end after SIGTERM before it is killed. A shorter time would cut off
# tracebacks and open files on a busy machine; a longer one makes every failed job end later.
_GRACE_S = 5.0
# How often the launcher looks whether a rank has ended. A look is one system call per rank. A
# longer interval blurs which of two ranks ended first, and so which of them is named.
_POLL_INTERVAL_S = 0.02
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(slots=True)
class _Rank:
    """The process of one rank.

    Attributes:
        index: its rank.
        pid: of its process.
        failure_fd: where its failure arrives.
        port_fd: where it waits for the port of the store.
        status: as `os.waitstatus_to_exitcode` has it; None while it is not known to have ended.
    """

    index: int
    pid: int
    failure_fd: int
    port_fd: int
    status: int | None = None

    def has_ended(self) -> bool:
        return self._wait(os.WNOHANG)

    def kill(self) -> None:
        """End the process if it still runs, and wait for that."""
        self.send_signal(signal.SIGKILL)
        self._wait(0)

    def send_signal(self, signum: int) -> None:
        """Does nothing once the process was waited for: its pid may be another's."""
        if self.status is None:
            os.kill(self.pid, signum)

    def _wait(self, options: int) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, options)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None


class Launcher:
    """The ranks of one job: `fork` starts them, and where it returns None, `wait` waits."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: list[_Rank] = []
        self._ended: list[_Rank] = []  # in the order of their end
        self._signal: int | None = None
        self._deadline_s = float("inf")

    def fork(self) -> "FailurePipe | None":
        """Start one process per rank; like `os.fork`, return in each of them.

        The environment of a rank says its place, as torchrun does. A rank returns once all have
        been started.

        Returns:
            In a rank, where to send its failure; None in the launcher.

        Raises:
            OSError: the machine has no room for so many processes.
        """
        launcher_pid = os.getpid()
        try:
            for index in range(self._num_ranks):
                failure_fd, failure_write_fd = os.pipe()
                port_read_fd, port_fd = os.pipe()
                pid = os.fork()
                if pid == 0:
                    for rank in self._ranks:
                        os.close(rank.failure_fd)
                        os.close(rank.port_fd)
                    os.close(failure_fd)
                    os.close(port_fd)
                    pipe = FailurePipe(launcher_pid, failure_write_fd)
                    pipe.die_with_launcher()
                    self._become_rank(index, port_read_fd)
                    return pipe
                os.close(failure_write_fd)
                os.close(port_read_fd)
                self._ranks.append(_Rank(index, pid, failure_fd, port_fd))
        except OSError:
            self._kill_all()
            raise
        return None

    def wait(self) -> int:
        """Let the ranks begin, and wait until all have ended; the first failure ends the others.

        Returns:
            The exit status for the shell: 0; or that of the rank whose failure came first, after
                its message on stderr; or 128 + the signal that was passed on to the ranks.
        """
        with _signals_to(self._forward_signal):
            try:
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                for rank in self._ranks:
                    with contextlib.suppress(BrokenPipeError):  # it was killed already
                        os.write(rank.port_fd, str(store.port).encode())
                self._wait()
            finally:
                self._kill_all()
            try:
                return self._report_failure() if self._signal is None else 128 + self._signal
            finally:
                for rank in self._ranks:
                    os.close(rank.failure_fd)
                    os.close(rank.port_fd)

    def _become_rank(self, index: int, port_fd: int) -> None:
        # The title that `ps` and `top` show; all ranks have the launcher's command line.
        Path("/proc/self/comm").write_text(f"gyre-rank-{index}")
        null_fd = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null_fd, 0)
        os.close(null_fd)
        port = os.read(port_fd, 16).decode()
        os.close(port_fd)
        os.environ.update(
            {
                "RANK": str(index),
                "LOCAL_RANK": str(index),
                "WORLD_SIZE": str(self._num_ranks),
                "LOCAL_WORLD_SIZE": str(self._num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                # the store exists; rank 0 must not open one
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        )

    def _wait(self) -> None:
        """Return when all ranks have ended, or when the deadline of a stop has passed."""
        while len(self._ended) < len(self._ranks) and time.monotonic() < self._deadline_s:
            running = [rank for rank in self._ranks if rank not in self._ended]
            ended = [rank for rank in running if rank.has_ended()]
            # A rank that a signal ended did not react to another rank's end, so it comes first.
            self._ended += sorted(ended, key=lambda rank: (rank.status or 0) >= 0)
            if self._deadline_s == float("inf") and any(rank.status for rank in ended):
                self._stop(signal.SIGTERM)
            if not ended:
                time.sleep(_POLL_INTERVAL_S)

    def _stop(self, signum: int) -> None:
        """Ask every living rank to end, and set the time after which `run` kills them."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + _GRACE_S)
        for rank in self._ranks:
            rank.send_signal(signum)

    def _forward_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or signum
        self._stop(signum)

    def _kill_all(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def _report_failure(self) -> int:
        """The status of the rank that failed first; its message goes to stderr."""
        failed = [rank for rank in self._ended if rank.status]
        if not failed:
            return 0
        failures = [(read_failure(rank.failure_fd), rank.index) for rank in failed]
        if failures[0][0] is None:  # its end is the cause, whatever the others say
            told = f"rank {failed[0].index} {_describe_end(failed[0].status or 0)}"
            print(f"gyre-train: {told}; the other ranks were stopped", file=sys.stderr)
            return 1
        first, index = min(
            ((failure, index) for failure, index in failures if failure),
            key=lambda each: each[0].time_s,
        )
        text = first.text.rstrip()
        if not first.names_rank:
            text = f"rank {index} failed:\n\n{text}"
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


# Characters of a message. Each takes at most 6 bytes in JSON, so a message fits into the 64 KiB
# that a pipe holds without a reader. A longer message would block the rank for ever if the launcher
# is busy.
_MAX_TEXT = 10_000


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank failed.

    Attributes:
        time_s: on the monotonic clock, which all processes of a machine share: the earliest failure
            is the cause.
        status: the exit status that follows: 2 for an error that the user can correct, else 1.
        text: one sentence; with GYRE_TRACEBACK=1 a traceback may follow.
        names_rank: whether the text begins with the rank at fault, which may be another one.
    """

    time_s: float
    status: int
    text: str
    names_rank: bool = False


class FailurePipe:
    """A rank's end of the pipe to the process that launched it."""

    def __init__(self, pid: int, pipe_fd: int) -> None:
        """Take over the pipe.

        Args:
            pid: of the launcher.
            pipe_fd: where a failure is written.
        """
        self._pid = pid
        self._pipe_fd = pipe_fd

    def die_with_launcher(self) -> None:
        """Let the kernel kill this process when its launcher ends, however that comes about."""
        try:
            die_with(self._pid)
        except ProcessLookupError:
            sys.exit("gyre-train: the launcher is gone")

    def send(self, status: int, text: str, *, names_rank: bool = False) -> None:
        """Send the failure to the launcher, if it still exists; see `RankFailure`."""
        failure = RankFailure(time.monotonic(), status, text[-_MAX_TEXT:], names_rank)
        try:
            os.write(
                self._pipe_fd,
                json.dumps(asdict(failure), ensure_ascii=False).encode(errors="replace"),
            )
        except BrokenPipeError:
            return


def read_failure(pipe_fd: int) -> RankFailure | None:
    """The failure that an ended rank left in its pipe; None where it left nothing."""
    chunks = []
    while chunk := os.read(pipe_fd, 1 << 16):
        chunks.append(chunk)
    return RankFailure(**json.loads(b"".join(chunks))) if chunks else None


_LARGEST = 2**31 - 1
_ADVICE = "start the ranks with torchrun, or unset RANK and use --nproc"


def require_rank(environment: Mapping[str, str]) -> None:
    """Check the variables of one rank, before torch reads them.

    Raises:
        ConfigError: a variable is missing, is no number, or does not fit the others.
    """
    world_size = _number(environment, "WORLD_SIZE", 1, _LARGEST)
    _number(environment, "RANK", 0, world_size - 1)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", 1, world_size, missing=1)
    _number(environment, "LOCAL_RANK", 0, local_world_size - 1, missing=0)
    _number(environment, "MASTER_PORT", 1, 2**16 - 1)
    if not environment.get("MASTER_ADDR", "").strip():
        raise ConfigError(f"RANK is set, but MASTER_ADDR is not; {_ADVICE}")


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int, missing: int | None = None
) -> int:
    text = environment.get(name)
    if text is None and missing is not None:
        return missing
    if text is None:
        raise ConfigError(f"RANK is set, but {name} is not; {_ADVICE}")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(
            f"{name} is {reprlib.repr(text)}: expected a number from {least} to {most}; {_ADVICE}"
        )
    return int(text)


_CPU = re.compile(r"you tried to allocate (\d+) bytes")
_CUDA = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
_TORCH_WORDS = ("can't allocate memory", "out of memory", "not enough memory")
_TORCH_ERROR = "OutOfMemoryError"  # of torch, which is not imported only to be told from others


def explained(error: BaseException) -> str:
    """One sentence about an error; empty if it is not about memory."""
    if not _is_about_memory(error):
        return ""
    return (
        f"memory ran out{_asked_for(str(error))}; use more ranks, make `data.batch_size` or "
        "`data.sequence_length` smaller or `optimizer.accumulation_steps` larger, or set "
        '`memory.recompute = "layer"`; `gyre-train plan CONFIG` shows what a step needs'
    )


def _is_about_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == _TORCH_ERROR:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _TORCH_WORDS)


def _asked_for(text: str) -> str:
    if found := _CPU.search(text):
        return f": {int(found[1]) / 2**30:,.2f} GiB more were asked for"
    found = _CUDA.search(text)
    return f": {found[1]} more were asked for" if found else ""
