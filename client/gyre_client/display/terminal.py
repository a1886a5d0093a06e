"""A terminal for repeated drawing, restored however the program ends; and a progress bar."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO, Any, NoReturn, Self

from gyre_protos.text import printable

from gyre_client.display.formatting import cut, is_watched

_ENTER = "\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_NO_CHARACTER = b"\x00"  # disables a special character, see termios(3)
_QUIT = b"qQ"


class LiveTerminal:
    """The terminal that `live_terminal` yields."""

    def __init__(self, output: IO[str], keys: int | None) -> None:
        """Draws on `output`, and reads keys from the descriptor `keys` if there is one."""
        self._output = output
        self._keys = keys

    @property
    def size(self) -> os.terminal_size:
        """Its columns and lines at this moment."""
        return os.get_terminal_size(self._output.fileno())

    def draw(self, lines: Sequence[str]) -> None:
        """Shows these lines and nothing else."""
        body = "\n".join(line + _END_OF_LINE for line in lines)
        self._output.write(_HOME + body + _END_OF_SCREEN)
        self._output.flush()

    def pause(self, seconds: float) -> bool:
        """Waits; returns False as soon as the user presses q or closes the input."""
        if self._keys is None:
            time.sleep(seconds)
            return True
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self._keys], [], [], left_s)
            if ready:
                pressed = os.read(self._keys, 64)
                if not pressed or any(key in _QUIT for key in pressed):
                    return False
        return True


@contextlib.contextmanager
def live_terminal(output: IO[str]) -> Iterator[LiveTerminal]:
    """Yields the terminal that `output` is; keys come from standard input if it is one too.

    Afterwards the terminal is as before, also after an exception, Ctrl-C and SIGTERM. Ctrl-Z does
    nothing meanwhile.
    """
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if keys is None else termios.tcgetattr(keys)
    previous_handler = signal.signal(signal.SIGTERM, _exit)
    try:
        output.write(_ENTER)
        output.flush()
        if keys is not None:
            _read_single_keys(keys)
        yield LiveTerminal(output, keys)
    finally:
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        output.write(_LEAVE)
        output.flush()
        signal.signal(signal.SIGTERM, previous_handler)


def _read_single_keys(keys: int) -> None:
    tty.setcbreak(keys, termios.TCSADRAIN)
    attributes: list[Any] = termios.tcgetattr(keys)
    attributes[6][termios.VSUSP] = _NO_CHARACTER
    termios.tcsetattr(keys, termios.TCSADRAIN, attributes)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


_MAX_NOTE_COLUMNS = 40


class ProgressBar:
    """How much of a task is done, on a terminal or in a notebook; use it in a `with`."""

    def __init__(self, unit: str) -> None:
        """Shows nothing done yet.

        Args:
            unit: The counted things, in the plural.
        """
        from tqdm.auto import tqdm  # noqa: PLC0415  # most commands draw no bar

        self._bar = tqdm(unit=f" {unit}", leave=False, dynamic_ncols=True, disable=not is_watched())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def update(self, num_done: int, num_all: int, note: str = "") -> None:
        """Shows how many of all are done, and a note on the last one."""
        if self._bar.total != num_all:
            self._bar.total = num_all
        if note:
            self._bar.set_postfix_str(cut(printable(note), _MAX_NOTE_COLUMNS), refresh=False)
        self._bar.update(num_done - self._bar.n)
