"""What a program says of an error of the system that nothing else explained."""

import errno
import os
import signal
from collections.abc import Iterator

import pytest
from gyre_protos.program import run_program

ERRORS = [
    (OSError(errno.ENOSPC, "No space left"), 1, "x: the output cannot be written: No space left\n"),
    (OSError(errno.EBADF, "Bad"), 1, "x: the output cannot be written: Bad\n"),
    (FileNotFoundError(errno.ENOENT, "Gone", "/a\x1bb"), 1, "x: /a\\x1bb: Gone\n"),
    (OSError(errno.ENOSPC, "Full", b"/disk"), 1, "x: /disk: Full\n"),
    (ConnectionResetError(errno.ECONNRESET, "Reset"), 70, "x: internal error: ConnectionReset"),
    (TimeoutError("late"), 70, "x: internal error: TimeoutError: late; set GYRE_TRACEBACK=1"),
    (OSError(errno.EMFILE, "Too many"), 70, "x: internal error: OSError: "),
    (BrokenPipeError(errno.EPIPE, "Broken"), 141, ""),
]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_only_an_error_of_the_output_is_called_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for error, status, told in ERRORS:

        def fail(error: OSError = error) -> int:
            raise error

        assert run_program("x", fail) == status
        said = capsys.readouterr().err
        assert said.startswith(told)
        assert said.count("\n") == (1 if told else 0), os.strerror(error.errno or 0)
