"""All ranks of one machine under one process: a small torchrun that leaves no process behind.

The launcher imports what a rank needs and forks: so the imports, some seconds of a core's time, are
made once and not by each rank, and their pages are shared. It forks before it has threads, and it
never touches CUDA, which a forked process could not use then.

The ranks stay in the launcher's process group, so a terminal's Ctrl-C and a kill of the group reach
them all. If the launcher alone is killed, the kernel kills its ranks (`PR_SET_PDEATHSIG`). The
rendezvous store lives in the launcher, on a port that the kernel chose and never free in
between, so two jobs that start together cannot meet.

torchrun would do most of this, but its agent loses the message of a rank that fails while another
rank fails too, and it puts its ranks into separate sessions.

A rank tells the launcher why it failed through a pipe, before its teardown is mistaken for the
cause. A rank under torchrun prints it instead.
"""

import errno
import importlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NamedTuple

from gyre_client.errors import GyreError
from gyre_protos.program import die_with, internal_error
from gyre_protos.text import printable
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gyre_trainer.comm.ring import abort_all
from gyre_trainer.errors import RingError, TrainError

# How long a rank may take to end after SIGTERM before it is killed. A shorter time would cut off
# tracebacks and open files on a busy machine; a longer one makes every failed job end later.
_GRACE_S = 5.0
# How often the launcher looks whether a rank has ended. A look is one system call per rank. A
# longer interval blurs which of two ranks ended first, and so which of them is named.
_POLL_INTERVAL_S = 0.02
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Characters of a message, which the connection to a busy launcher holds without a reader.
_MAX_TEXT = 10_000


class RankFailure(NamedTuple):
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


Tell = Callable[[int, str], None]
"""Takes the status and the text of a rank's failure."""


def on_ranks(num_ranks: int, work: Callable[[], None]) -> int:
    """Do the work of the rank that RANK names, or else that of ``num_ranks`` ranks, forked here.

    Returns:
        The exit status, as of `launch`.
    """
    if "RANK" in os.environ:
        return _be_rank(work)
    # Once for all ranks. Torch imports it when it makes an optimizer.
    importlib.import_module("torch._dynamo")
    try:
        return launch(num_ranks, partial(_be_rank, work))
    except OSError as error:
        print(f"gyre-train: the ranks cannot be started: {error.strerror}", file=sys.stderr)
        return 1


def launch(num_ranks: int, be_rank: Callable[[Tell], int]) -> int:
    """Fork one process per rank, and wait until all have ended; a failure ends the others.

    Args:
        num_ranks: of the job.
        be_rank: is called in the process of each rank, and returns its exit status.

    Returns:
        The exit status for the shell: 0; or that of the rank whose failure came first, after its
            message on stderr; or 128 + the signal that was passed on to the ranks.

    Raises:
        OSError: the machine has no room for this number of processes.
    """
    context, launcher = get_context("fork"), os.getpid()
    ranks: list[ForkProcess] = []
    pipes: list[Connection] = []
    signals: list[int] = []
    try:
        for index in range(num_ranks):
            here, there = context.Pipe()
            place = index, num_ranks, launcher, there
            rank = context.Process(target=_become_rank, args=(*place, be_rank))
            rank.start()
            there.close()
            ranks.append(rank)
            pipes.append(here)
        with _signals_in(signals):
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for pipe in pipes:
                with suppress(BrokenPipeError):  # the rank was killed already
                    pipe.send(store.port)
            statuses = _wait_for_first(ranks, signals)
            _end(ranks, signals[0] if signals else signal.SIGTERM)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    if signals:
        return 128 + signals[0]
    return _report_failure(statuses, pipes) if any(statuses) else 0


def _become_rank(
    index: int, num_ranks: int, launcher: int, pipe: Connection, be_rank: Callable[[Tell], int]
) -> None:
    """Be a process like one of torchrun, which dies with its launcher however that comes about."""
    try:
        die_with(launcher)
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
            "MASTER_PORT": str(pipe.recv()),
            # the store exists; rank 0 must not open one
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )

    def tell(status: int, text: str) -> None:
        sent = text[-_MAX_TEXT:].encode(errors="replace").decode()
        with suppress(BrokenPipeError):  # the launcher is gone
            pipe.send(RankFailure(time.monotonic(), status, sent))

    sys.exit(be_rank(tell))


def _wait_for_first(ranks: Sequence[ForkProcess], signals: Sequence[int]) -> list[int | None]:
    """Wait for a failure, a signal, or the end of all ranks; return their statuses then."""
    while True:
        statuses = [rank.exitcode for rank in ranks]
        if signals or any(statuses) or None not in statuses:
            return statuses
        time.sleep(_POLL_INTERVAL_S)


def _end(ranks: Sequence[ForkProcess], signum: int) -> None:
    """Ask every living rank to end, and give it time."""
    deadline_s = time.monotonic() + _GRACE_S
    for rank in ranks:
        if rank.exitcode is None and rank.pid is not None:
            os.kill(rank.pid, signum)
    while time.monotonic() < deadline_s and None in [rank.exitcode for rank in ranks]:
        time.sleep(_POLL_INTERVAL_S)


def _report_failure(statuses: Sequence[int | None], pipes: Sequence[Connection]) -> int:
    """The status of the rank that failed first; its message goes to stderr."""
    # One that a signal ended, below 0, did not react to another rank's end, so it comes first.
    status, first = min((status, index) for index, status in enumerate(statuses) if status)
    failures = [_failure_in(pipe) for pipe in pipes]
    if failures[first] is None:  # its end is the cause, whatever the others say
        told = f"ended with exit status {status}"
        if status == -signal.SIGKILL:
            told = "was ended by SIGKILL (by hand, or because memory ran out)"
        elif status < 0:
            told = f"was ended by {signal.Signals(-status).name}"
        print(f"gyre-train: rank {first} {told}; the other ranks were stopped", file=sys.stderr)
        return 1
    cause = min(filter(None, failures))
    print(f"gyre-train: {cause.text.rstrip()}", file=sys.stderr)
    return cause.status


def _failure_in(pipe: Connection) -> RankFailure | None:
    """The message of an ended rank; None where it sent none, or not all of it."""
    if not pipe.poll():  # a process that it left behind has the pipe, too
        return None
    try:
        failure: RankFailure = pipe.recv()
    except (EOFError, OSError):
        return None
    return failure


@contextmanager
def _signals_in(received: list[int]) -> Iterator[None]:
    """A context in which signals that end a job are appended to ``received``."""
    before = {
        signum: signal.signal(signum, lambda signum, _: received.append(signum))
        for signum in _FORWARDED
    }
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def _be_rank(work: Callable[[], None], tell: Tell | None = None) -> int:
    """Do a rank's work. A failure ends the process at once, so that no rank waits for it."""
    try:
        work()
    except Exception as error:
        rank, is_expected = os.environ["RANK"], isinstance(error, TrainError | GyreError)
        status = 2 if is_expected and not isinstance(error, RingError) else 1
        text = one_line(error) if is_expected else explained(error) or internal_error(error)
        if tell is None:
            print(f"gyre-train: rank {rank}: {text}", file=sys.stderr)
        elif status == 2:
            tell(status, f"error: {text}")
        else:  # that of a ring begins with the rank at fault
            tell(status, text if is_expected else f"rank {rank}: {text}")
        sys.stdout.flush()
        sys.stderr.flush()
        abort_all()  # so that hops on a device end
        os._exit(status)
    return 0


def one_line(error: Exception) -> str:
    """The error's text on one line, without characters that a terminal would obey."""
    return printable(" ".join(str(error).split()))


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
