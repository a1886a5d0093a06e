"""How a rank tells its launcher why it failed, before its teardown is mistaken for the cause.

A launcher gives each rank a pipe. A rank under torchrun has none, and prints instead.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass

from gyre_common.parent import die_with

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


def read(pipe_fd: int) -> RankFailure | None:
    """The failure that an ended rank left in its pipe; None where it left nothing."""
    chunks = []
    while chunk := os.read(pipe_fd, 1 << 16):
        chunks.append(chunk)
    return RankFailure(**json.loads(b"".join(chunks))) if chunks else None
