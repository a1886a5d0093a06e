"""Ends a process with the one that started it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Let the kernel kill this process once its parent has ended, however that comes about.

    Linux counts the thread that forked as the parent. It must live on as long as this process
    should.

    Args:
        parent: the process id of the one that forked this process.

    Raises:
        ProcessLookupError: the parent has ended already.
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise ProcessLookupError(f"process {parent} has ended")
