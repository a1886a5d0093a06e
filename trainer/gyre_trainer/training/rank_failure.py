"""How a rank tells its launcher why it failed, before its teardown can be mistaken for the cause.

A launcher gives each rank a pipe and names it in the environment; a rank under torchrun has none, and prints instead.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass

LAUNCHER_VARIABLE = "GYRE_TRAIN_LAUNCHER"
_PR_SET_PDEATHSIG = 1
_MAX_TEXT = 10_000  # characters, of at most 6 bytes each in JSON: fewer than the 64 KiB that a pipe holds without a reader


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank failed.

    Attributes:
        time_s: on the monotonic clock, which all processes of a machine share: the earliest is the cause.
        status: the exit status that follows: 2 for what the user can mend, else 1.
        text: one sentence, or a traceback.
    """

    time_s: float
    status: int
    text: str


class FailurePipe:
    """A rank's end of the pipe to the process that launched it."""

    def __init__(self, pid: int, pipe_fd: int) -> None:
        self._pid = pid
        self._pipe_fd = pipe_fd

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> "FailurePipe | None":
        """The launcher that `environment` names, taken out of it so that no child takes itself for a rank; or None."""
        text = environment.pop(LAUNCHER_VARIABLE, "")
        if not text:
            return None
        pid, pipe_fd = map(int, text.split(":"))
        os.set_inheritable(pipe_fd, False)
        return cls(pid, pipe_fd)

    def die_with_launcher(self) -> None:
        """From now on the kernel kills this process when its launcher is gone, however that came about."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != self._pid:
            sys.exit("gyre-train: the launcher is gone")

    def send(self, status: int, text: str) -> None:
        """Hand over the last words; a launcher that is gone needs none."""
        failure = RankFailure(time.monotonic(), status, text[-_MAX_TEXT:])
        try:
            os.write(self._pipe_fd, json.dumps(asdict(failure), ensure_ascii=False).encode(errors="replace"))
        except BrokenPipeError:
            return


def read(pipe_fd: int) -> RankFailure | None:
    """What a rank that has ended left in its pipe; None where it had no time to speak."""
    chunks = []
    while chunk := os.read(pipe_fd, 1 << 16):
        chunks.append(chunk)
    return RankFailure(**json.loads(b"".join(chunks))) if chunks else None
