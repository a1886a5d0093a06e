"""The output of commands: tables, histograms, pictures for people, in colours; JSON for programs.

Bytes of datasets are decoded only where this is asked for, only as one of a few kinds of images,
and only after their size was checked. A terminal for repeated drawing is restored however the
program ends.
"""

import contextlib
import io
import json
import os
import re
import select
import shutil
import signal
import sys
import termios
import textwrap
import time
import tty
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import NotInstalled
from gyre_client.page.watch import PROCESSOR_BOUND, STORAGE_BOUND, TRAINER_BOUND

_DECODABLE = ("JPEG", "PNG", "GIF", "WEBP")
# An image is decoded whole before it is made smaller: 64 million pixels take 192 MiB.
_MAX_PIXELS = 64 << 20
_UPPER_HALF = "\u2580"  # its upper half in the text's colour, its lower half in the background's
_END = "\x1b[0m"

Pixel = tuple[int, int, int]


class Picture(NamedTuple):
    """A small image: rows of red, green and blue; an even number of rows of one length."""

    rows: list[list[Pixel]]

    def drawn(self) -> str:
        """Returns the lines for a terminal of true colours: two rows in each."""
        lines = []
        for upper, lower in zip(self.rows[::2], self.rows[1::2], strict=True):
            cells = [
                f"\x1b[38;2;{above[0]};{above[1]};{above[2]};48;2;{below[0]};{below[1]};{below[2]}m"
                f"{_UPPER_HALF}"
                for above, below in zip(upper, lower, strict=True)
            ]
            lines.append("".join(cells) + _END)
        return "\n".join(lines)


def shows_colours(output: IO[str]) -> bool:
    """Whether `output` is a terminal with colours, on which pictures can be drawn, too.

    Users who want no colours set NO_COLOR (https://no-color.org).
    """
    return output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def thumbnail(data: bytes, num_columns: int, num_lines: int) -> Picture | None:
    """Returns an image in at most these columns and lines; None for other bytes and too large ones.

    Raises:
        NotInstalled: Pillow is missing.
    """
    try:
        from PIL import Image  # noqa: PLC0415  # only pictures need it
    except ImportError:
        raise NotInstalled.needs("drawing images", "Pillow", "images") from None
    size = num_columns, 2 * num_lines
    try:
        with Image.open(io.BytesIO(data), formats=_DECODABLE) as image:
            if image.width * image.height > _MAX_PIXELS:
                return None
            image.draft("RGB", size)
            small = image.convert("RGB")
            small.thumbnail(size)
            pixels = small.tobytes()
    except Exception:  # a damaged image can fail in any way
        return None
    width, height = small.size
    triples = [
        (pixels[place], pixels[place + 1], pixels[place + 2]) for place in range(0, len(pixels), 3)
    ]
    rows = [triples[row * width : (row + 1) * width] for row in range(height)]
    if height % 2:
        rows.append([(0, 0, 0)] * width)
    return Picture(rows)


_BOLD, _RED, _GREEN, _YELLOW, _MAGENTA, _PLAIN = (
    f"\x1b[{code}m" for code in (1, 31, 32, 33, 35, 0)
)
_OF_WORDS = {
    STORAGE_BOUND: _YELLOW,
    PROCESSOR_BOUND: _MAGENTA,
    TRAINER_BOUND: _GREEN,
    "draining": _RED,
}
_WORD = re.compile("|".join(_OF_WORDS))
_HEADER = re.compile(r"^[A-Z][A-Z/ ]+$", re.MULTILINE)


def painted(text: str, output: IO[str]) -> str:
    """Returns the text with coloured headers and bottlenecks if `output` shows colours."""
    if not shows_colours(output):
        return text
    text = _HEADER.sub(lambda found: f"{_BOLD}{found[0]}{_PLAIN}", text)
    return _WORD.sub(lambda found: f"{_OF_WORDS[found[0]]}{found[0]}{_PLAIN}", text)


_ELLIPSIS = "\u2026"
_GAP = 2  # columns of a terminal between two columns of a table
_WIDTH = 80  # of a page for no terminal
_MIN_WIDTH = 20  # of a value, however narrow the terminal is


class CommandOutput(NamedTuple):
    """The output of a command.

    `value` is JSON-ready, and `text` is for people; `more` is below it.
    """

    value: Any
    text: str
    status: int = 0
    more: Sequence[str | Picture] = ()


def emit(*parts: str | Picture) -> None:
    """Prints text, in colours on a terminal, and pictures on one that shows them.

    Nothing in the text moves the cursor.

    Raises:
        OSError: The output cannot be written; see `program.run_program`.
    """
    for part in parts:
        if isinstance(part, str):
            print(painted(printable(part, kept="\n"), sys.stdout), flush=True)
        elif shows_colours(sys.stdout):
            print(part.drawn(), flush=True)


def to_json(value: Any) -> str:
    """Returns one JSON document, on one line, in visible ASCII."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def page_width() -> int:
    """Returns the columns of the terminal or page; COLUMNS in the environment overrides it."""
    return shutil.get_terminal_size((_WIDTH, 24)).columns


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns the rows under their header; columns of numbers are aligned to the right."""
    cells = _cells(header, rows)
    columns = list(zip(*cells, strict=True))
    widths = [max(map(width, column)) for column in columns]
    is_number = [_is_number_column(column[1:]) for column in columns]
    return "\n".join(_row(row, widths, is_number) for row in cells)


def stacked(
    header: Sequence[str], rows: Iterable[Sequence[object]], num_keys: int, num_columns: int
) -> list[str]:
    """Returns tables no wider than a page: columns without room go to the next one.

    The first `num_keys` columns come first in each of the tables.
    """
    cells = _cells(header, rows)
    keys, others = list(range(num_keys)), list(range(num_keys, len(header)))
    if _table_width(cells, [*keys, *others]) > num_columns:
        cells = [
            [cut(cell, num_columns // 4) for cell in row[:num_keys]] + row[num_keys:]
            for row in cells
        ]
    groups = [list(keys)]
    for column in others:
        if len(groups[-1]) > num_keys and _table_width(cells, [*groups[-1], column]) > num_columns:
            groups.append(list(keys))
        groups[-1].append(column)
    tables = []
    for group in groups:
        heads, *body = [[row[column] for column in group] for row in cells]
        lines = table(heads, body).split("\n")
        tables.append("\n".join(cut(line, num_columns) for line in lines))
    return tables


def _cells(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[list[str]]:
    return [list(header), *([printable(str(cell)) for cell in row] for row in rows)]


def cut(line: str, num_columns: int) -> str:
    """Returns the line, or as much of it as fits into `num_columns` with an ellipsis."""
    if width(line) <= num_columns:
        return line
    while line and width(line) >= num_columns:
        line = line[:-1]
    return line + _ELLIPSIS if num_columns > 0 else ""


def width(text: str) -> int:
    """Returns how many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF")
        for each in text
    )


def _table_width(cells: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    widths = [max(width(row[column]) for row in cells) for column in columns]
    return sum(widths) + _GAP * (len(columns) - 1)


def _row(row: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    padded = []
    for cell, wanted, right in zip(row, widths, is_number, strict=True):
        padding = " " * (wanted - width(cell))
        padded.append(padding + cell if right else cell + padding)
    return (" " * _GAP).join(padded).rstrip()


def facts(pairs: Iterable[tuple[str, object]], num_columns: int | None = None) -> str:
    """Returns one line per name and value, with the values aligned.

    With `num_columns`, longer values are wrapped.
    """
    named = [(name, printable(str(value))) for name, value in pairs]
    name_width = max(len(name) for name, _ in named)
    if num_columns is None:
        return "\n".join(f"{name.ljust(name_width)}  {value}" for name, value in named)
    room = max(num_columns - name_width - _GAP, _MIN_WIDTH)
    lines = []
    for name, value in named:
        first, *rest = textwrap.wrap(value, room, break_on_hyphens=False) or [""]
        lines.append(f"{name.ljust(name_width)}  {first}")
        lines += [f"{' ' * name_width}  {part}" for part in rest]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Returns a duration in words: 3700 is "1 h 1 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _is_number_column(cells: Sequence[str]) -> bool:
    """Whether a column is of numbers; a dash stands for a value not known yet."""
    return any(cell[:1].isdigit() for cell in cells) and all(
        cell[:1].isdigit() or cell == "-" for cell in cells
    )


_ENTER = "\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_NO_CHARACTER = b"\x00"  # disables a special character, see termios(3)
_QUIT = b"qQ"


class LiveTerminal:
    """The terminal that `live_terminal` yields."""

    def __init__(self, output: IO[str], keys: int) -> None:
        """Draws on `output`, and reads keys from the descriptor `keys`."""
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
    """Yields the terminal that `output` and standard input are.

    Afterwards the terminal is as before, also after an exception, Ctrl-C and SIGTERM. Ctrl-Z does
    nothing meanwhile.
    """
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    previous_handler = signal.signal(signal.SIGTERM, _exit)
    try:
        output.write(_ENTER)
        output.flush()
        tty.setcbreak(keys, termios.TCSADRAIN)
        attributes: list[Any] = termios.tcgetattr(keys)
        attributes[6][termios.VSUSP] = _NO_CHARACTER
        termios.tcsetattr(keys, termios.TCSADRAIN, attributes)
        yield LiveTerminal(output, keys)
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
        output.write(_LEAVE)
        output.flush()
        signal.signal(signal.SIGTERM, previous_handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL = "\u2588"
_MAX_CELLS = 40


def histogram_text(histogram: pb.LengthHistogram, num_columns: int) -> str:
    """Returns a bar for each bin, no wider than a terminal."""
    labels = [
        f"{first:,}" if first + 1 >= behind else f"{first:,} to {behind - 1:,}"
        for first, behind in pairwise(histogram.bounds)
    ]
    width = max(map(len, labels))
    counts = [f"{count:,}" for count in histogram.counts]
    room = max(8, min(_MAX_CELLS, num_columns - width - max(map(len, counts)) - 4))
    most = max(*histogram.counts, 1)
    lines = [
        f"{label.rjust(width)}  {_bar(count / most * room).ljust(room)}  {shown}".rstrip()
        for label, count, shown in zip(labels, histogram.counts, counts, strict=True)
    ]
    title = (
        f"lengths of {printable(histogram.field)}: {histogram.least:,} to {histogram.greatest:,}, "
        f"mean {histogram.mean:,.1f}, of {counted(histogram.num_samples, 'sample', ',')}"
    )
    return "\n".join(cut(line, num_columns) for line in [title, *lines])


def _bar(cells: float) -> str:
    whole, part = divmod(round(cells * 8), 8)
    return _FULL * whole + (_EIGHTHS[part] if part else "")


def mount_line(mount: pb.Mount) -> str:
    """Returns which mount hangs and since when, in one line."""
    name = f"{printable(mount.path)} ({printable(mount.file_system)})"
    return f"{name} has not answered for {duration(mount.hangs_since_s)}"
