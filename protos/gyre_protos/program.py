"""Runs a program whose standard streams may fail: no traceback, an exit status in any case.

The reader of its output may go away (`gyre status | head -1`), the disk of its output may be full,
streams may be closed (`gyre status >&-`), the terminal may know few characters, and the user may
press Ctrl-C, even before all modules are imported.

Also: a process that ends with its parent, and a foreign command `gyre`.
"""

import contextlib
import ctypes
import errno
import io
import os
import signal
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from gyre_protos.text import printable

_PR_SET_PDEATHSIG = 1
_OURS = "gyre-ml"
_PACKAGE = b"gyre_client"  # our script `gyre` imports it
_INTERRUPTED = 128 + signal.SIGINT
_READER_GONE = 128 + signal.SIGPIPE
_INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
_TRACEBACK_VARIABLE = "GYRE_TRACEBACK"
_MAX_CHARS = 500  # of an error
# Errors that writing to a stream may raise; other errors without a file are defects.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN)


def run_program(name: str, run: Callable[[], int], *, needs_output: bool = True) -> int:
    """Runs a program in the main thread, and returns its exit status.

    Args:
        name: The program's name, for its messages.
        run: Returns the exit status, or ends with SystemExit. An OSError that leaves it names a
            file, or is one of its output.
        needs_output: Whether it fails where standard output is closed.

    Returns:
        The result of `run`; 130 after Ctrl-C; 141 if the reader of the output is gone; 1 if the
        output cannot be written, and 70 after a defect, which a sentence on standard error says.
    """
    try:
        has_output = _open_streams()
        status = _status_of(run)
        if needs_output and not has_output and status == 0:
            _say(f"{name}: the output cannot be written: standard output is closed")
            status = 1
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BrokenPipeError:
        status = _READER_GONE
    except OSError as error:
        text = _os_error(error)
        _say(f"{name}: {text or internal_error(error)}")
        status = 1 if text else _INTERNAL_ERROR
    except Exception as error:
        _say(f"{name}: {internal_error(error)}")
        status = _INTERNAL_ERROR
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _discard_unwritable()
    return status


def internal_error(error: BaseException) -> str:
    """A defect in one sentence; with GYRE_TRACEBACK=1, the frames after it."""
    text = printable(f"{type(error).__name__}: {error}"[:_MAX_CHARS].removesuffix(": "))
    if os.environ.get(_TRACEBACK_VARIABLE) not in (None, "", "0"):
        import traceback  # noqa: PLC0415 - it takes 7 ms

        lines = "".join(traceback.format_exception(error)).splitlines()
        return "\n".join([f"internal error: {text}; report it", *map(printable, lines)])
    return f"internal error: {text}; set {_TRACEBACK_VARIABLE}=1 to see where, and report it"


def _os_error(error: OSError) -> str:
    """An error of the system in words; empty if it is a defect of the program."""
    reason = printable(error.strerror or str(error))
    if isinstance(error.filename, str | bytes):
        return f"{printable(os.fsdecode(error.filename))}: {reason}"
    return f"the output cannot be written: {reason}" if error.errno in _OUTPUT_ERRORS else ""


def _status_of(run: Callable[[], int]) -> int:
    try:
        return run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def _open_streams() -> bool:
    """Replaces closed streams, and makes sure that every character can be written.

    A closed descriptor is given to /dev/null, so that no socket gets its number. Returns whether
    there was a standard output.
    """
    has_output = sys.stdout is not None
    for descriptor, stream in enumerate(("stdin", "stdout", "stderr")):
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            continue
        os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        setattr(sys, stream, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")
    return has_output


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _discard_unwritable() -> None:
    """Lets go of output without a reader: the interpreter would complain when it ends."""
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output.fileno())
            os.close(nowhere)


def die_with(parent: int) -> None:
    """Let the kernel kill this process once `parent`, which forked it, has ended in any way.

    Linux counts the thread that forked as the parent. It must live on as long as this process
    should.

    Raises:
        ProcessLookupError: the parent has ended already.
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise ProcessLookupError(f"process {parent} has ended")


def foreign_command() -> str:
    """Warn if `gyre` in this environment starts another distribution's program; empty if not.

    The script is read first: only if it is not Gyre's are all distributions searched.
    """
    script = Path(sysconfig.get_path("scripts"), "gyre")
    try:
        if _PACKAGE in script.read_bytes():
            return ""
    except OSError:
        return ""
    from importlib.metadata import entry_points  # noqa: PLC0415 - it takes 10 ms

    owners = {
        each.dist.name for each in entry_points(group="console_scripts", name="gyre") if each.dist
    }
    others = sorted(owners - {_OURS})
    if not others:
        return ""
    return (
        f"the command `gyre` starts a program of {others[0]}, which pip installed over Gyre's. "
        "Type `python -m gyre_client` instead."
    )
