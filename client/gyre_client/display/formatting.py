"""The output of commands: tables, sizes and pictures for people, in colours; JSON for programs.

Datasets, sessions and mounts come in words: fields, histograms, rates, bottlenecks, progress.

Bytes of datasets are decoded only where this is asked for, only as one of a few kinds of images,
and only after their size was checked. A terminal for repeated drawing is restored however the
program ends.
"""

import base64
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn, Self

from google.protobuf.message import Message
from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import NotInstalled

_SIGNATURES = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
    (b"\xff\xf3", "audio/mpeg"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}
_DECODABLE = ("JPEG", "PNG", "GIF", "WEBP")
# An image is decoded whole before it is made smaller: 64 million pixels take 192 MiB.
_MAX_PIXELS = 64 << 20
_MAX_MEDIUM_BYTES = 8 << 20  # larger images and sounds are named, not put into pages
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


def media_type(data: bytes) -> str | None:
    """Returns the type of an image or a sound by its first bytes; None if it is neither."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    return next((kind for start, kind in _SIGNATURES if data.startswith(start)), None)


class MediaBudget:
    """How many bytes of images and sounds a page may still have, so that it stays small."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def source(self, kind: str, data: bytes) -> str | None:
        """Returns the bytes as the source of an element; None if there are too many."""
        if len(data) > min(_MAX_MEDIUM_BYTES, self._left):
            return None
        self._left -= len(data)
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shows_pictures(output: IO[str]) -> bool:
    """Whether pictures can be drawn on `output`: a terminal with colours."""
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


STORAGE_BOUND, PROCESSOR_BOUND = "storage-bound", "processor-bound"
TRAINER_BOUND, BALANCED, IDLE = "trainer-bound", "balanced", "idle"
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
    """Returns the text with coloured headers and bottlenecks if `output` is a terminal.

    Users who want no colours set NO_COLOR (https://no-color.org).
    """
    if not output.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    text = _HEADER.sub(lambda found: f"{_BOLD}{found[0]}{_PLAIN}", text)
    return _WORD.sub(lambda found: f"{_OF_WORDS[found[0]]}{found[0]}{_PLAIN}", text)


_ELLIPSIS = "\u2026"
_GAP = 2  # columns of a terminal between two columns of a table
_WIDTH = 80  # of a page for no terminal
_MIN_WIDTH = 20  # of a value, however narrow the terminal is


class CommandOutput(NamedTuple):
    """The output of a command.

    Attributes:
        value: JSON-ready values for programs.
        text: Text for people.
        status: The exit status.
        more: Further text, and pictures, below the text.
    """

    value: Any
    text: str
    status: int = 0
    more: Sequence[str | Picture] = ()


def emit(text: str) -> None:
    """Prints the text of a command, in colours on a terminal; nothing in it moves the cursor.

    Raises:
        OSError: The output cannot be written; see `program.run_program`.
    """
    print(painted(printable(text, kept="\n"), sys.stdout), flush=True)


def emit_more(parts: Sequence[str | Picture]) -> None:
    """Prints further text as `emit` does, and pictures on a terminal that shows them.

    Raises:
        OSError: The output cannot be written.
    """
    for part in parts:
        if isinstance(part, str):
            emit(part)
        elif shows_pictures(sys.stdout):
            print(part.drawn(), flush=True)


def is_watched() -> bool:
    """Whether a person may see progress: standard error is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def plain(message: Message) -> dict[str, Any]:
    """Returns a protocol message as JSON-ready values.

    Every field is there by its name: integers as integers, absent messages and options as None.
    """
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else _plain_value(getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _plain_value(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    return [_plain_value(item) for item in value]


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


def fitted(
    header: Sequence[str], rows: Iterable[Sequence[str]], ranks: Sequence[int], num_columns: int
) -> list[str]:
    """Returns the lines of a table no wider than a terminal.

    Args:
        header: The names of the table's columns.
        rows: Their cells.
        ranks: One rank per column. If there is no room, the columns with the greatest ranks are
            left out; lines that still do not fit are cut.
        num_columns: The width of the terminal.
    """
    cells = _cells(header, rows)
    kept = list(range(len(header)))
    while len(kept) > 1 and _table_width(cells, kept) > num_columns:
        kept.remove(max(kept, key=lambda column: ranks[column]))
    return _cut_table(cells, kept, num_columns)


def stacked(
    header: Sequence[str], rows: Iterable[Sequence[object]], num_keys: int, num_columns: int
) -> str:
    """Returns a table no wider than a page; columns without room go to further tables below it.

    Args:
        header: The names of the table's columns.
        rows: Their cells.
        num_keys: How many columns come first in each of the tables.
        num_columns: The width of the page.
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
    return "\n\n".join("\n".join(_cut_table(cells, group, num_columns)) for group in groups)


def _cells(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[list[str]]:
    return [list(header), *([printable(str(cell)) for cell in row] for row in rows)]


def _cut_table(
    cells: Sequence[Sequence[str]], columns: Sequence[int], num_columns: int
) -> list[str]:
    header, *rows = [[row[column] for column in columns] for row in cells]
    return [cut(line, num_columns) for line in table(header, rows).split("\n")]


def cut(line: str, num_columns: int) -> str:
    """Returns the line, or as much of it as fits into `num_columns` with an ellipsis."""
    if width(line) <= num_columns:
        return line
    while line and width(line) >= num_columns:
        line = line[:-1]
    return line + _ELLIPSIS if num_columns > 0 else ""


def width(text: str) -> int:
    """Returns how many columns of a terminal the text takes."""
    return sum(_columns_of(character) for character in text)


def _columns_of(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


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


def size(num_bytes: float) -> str:
    """Returns a size in binary units: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} PiB"


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


def facts_of(description: pb.DatasetDescription, *, is_path: bool) -> list[tuple[str, str]]:
    """Returns names and values of a dataset, for the head of a text or page."""
    least, greatest = description.least_shard_bytes, description.greatest_shard_bytes
    sizes = f": {size(least)} to {size(greatest)}" if description.num_shards > 1 else ""
    packing = description.packing
    packed = [("packed", _packed(packing))] if description.HasField("packing") else []
    return [
        ("name", "-" if is_path else description.name),
        ("format", description.format),
        ("uri", description.uri),
        ("samples", f"{description.num_samples:,}{_left_out(description)}"),
        ("shards", f"{description.num_shards:,}{sizes}"),
        ("size", size(description.num_bytes)),
        ("fingerprint", description.fingerprint),
        *([("grows", "by shards behind all others (append)")] if description.grows else []),
        *packed,
        *([("transforms", ", ".join(description.transforms))] if description.transforms else []),
    ]


def fields_of(fields: Iterable[pb.Field]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the heads and the rows of the table of fields."""
    heads, has_media = ("FIELD", "DTYPE", "SHAPE"), any(field.media_type for field in fields)
    rows = [(field.name, field.dtype, _shape(field)) for field in fields]
    if not has_media:
        return heads, list(rows)
    media = [field.media_type for field in fields]
    return (*heads, "MEDIA TYPE"), [(*row, each) for row, each in zip(rows, media, strict=True)]


def _packed(packing: pb.Packing) -> str:
    """Returns how well documents fill the sequences, and how many were cut or left out."""
    ends = {"drop": "left out", "truncate": "cut short", "split": "split"}
    filled = f"{packing.length:,}, of which {packing.efficiency:.2%} is filled"
    documents = counted(packing.num_documents, "document", ",")
    parts = [f"{documents} by {packing.field} into sequences of {filled}"]
    if packing.num_overlong:
        parts.append(f"{packing.num_overlong:,} longer ones {ends[packing.overlong]}")
    if packing.num_empty:
        parts.append(f"{packing.num_empty:,} empty ones left out")
    return "; ".join(parts)


def _left_out(description: pb.DatasetDescription) -> str:
    number = description.num_left_out
    return f"; the filter leaves {number:,} out" if number else ""


def _shape(field: pb.Field) -> str:
    sizes = (["*"] if field.ragged else []) + [str(length) for length in field.shape]
    return f"[{', '.join(sizes)}]"


_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL = "\u2588"
_MAX_CELLS = 40


def title(histogram: pb.LengthHistogram) -> str:
    """Returns the title of a histogram."""
    return (
        f"lengths of {printable(histogram.field)}: {histogram.least:,} to {histogram.greatest:,}, "
        f"mean {histogram.mean:,.1f}, of {counted(histogram.num_samples, 'sample', ',')}"
    )


def as_text(histogram: pb.LengthHistogram, num_columns: int) -> str:
    """Returns a bar for each bin, no wider than a terminal."""
    labels = [_label(histogram, number) for number in range(len(histogram.counts))]
    width = max(map(len, labels))
    counts = [f"{count:,}" for count in histogram.counts]
    room = max(8, min(_MAX_CELLS, num_columns - width - max(map(len, counts)) - 4))
    most = max(*histogram.counts, 1)
    lines = [
        f"{label.rjust(width)}  {_bar(count / most * room).ljust(room)}  {shown}".rstrip()
        for label, count, shown in zip(labels, histogram.counts, counts, strict=True)
    ]
    return "\n".join(cut(line, num_columns) for line in [title(histogram), *lines])


def _label(histogram: pb.LengthHistogram, number: int) -> str:
    first, last = histogram.bounds[number], histogram.bounds[number + 1] - 1
    return f"{first:,}" if first >= last else f"{first:,} to {last:,}"


def _bar(cells: float) -> str:
    whole, part = divmod(round(cells * 8), 8)
    return _FULL * whole + (_EIGHTHS[part] if part else "")


def mount_line(mount: pb.Mount) -> str:
    """Returns which mount hangs and since when, in one line."""
    name = f"{printable(mount.path)} ({printable(mount.file_system)})"
    return f"{name} has not answered for {duration(mount.hangs_since_s)}"


# Window occupancies that count as empty and as full. Credits and reads come in quarters of a
# window, so a window is hardly ever quite empty or quite full.
_EMPTY, _NEARLY_FULL = (0.25, 0.75)
# A trainer that lacks a batch for less of its time than this loses nothing worth a search.
STARVED = 0.05
_MIN_ELAPSED_S = 0.1  # a shorter time says nothing about a rate


@dataclass(frozen=True, slots=True)
class SessionRates:
    """One session over its last ten seconds, or since it began.

    Attributes:
        batches_per_s: Batches that the trainer took.
        bytes_per_s: Payload of those batches.
        occupancy: The mean share of the prefetch window that was ready, in [0, 1]; None if there
            was no window.
        starved: The share of the time that the trainer had no batch to go on with, in [0, 1], as
            its client reports.
        wait_storage: The share of the time that the client had credit and no batch was ready
            because storage had not answered.
        wait_processor: The same, because no processor was free to copy or decode the batch.
        wait_trainer: The share of the time that a batch was ready and the client had no credit.
    """

    batches_per_s: float
    bytes_per_s: float
    occupancy: float | None
    starved: float
    wait_storage: float
    wait_processor: float
    wait_trainer: float

    @property
    def meaning(self) -> str:
        """The bottleneck of the session.

        An empty window waits for storage or for a processor, a full one for its trainer. So does an
        empty one whose trainer never waits: it has its batches already, or asks for no more yet.
        """
        if self.occupancy is None:
            return IDLE
        if self.occupancy <= _EMPTY and self.starved >= STARVED:
            return PROCESSOR_BOUND if self.wait_processor > self.wait_storage else STORAGE_BOUND
        return BALANCED if _EMPTY < self.occupancy < _NEARLY_FULL else TRAINER_BOUND

    def to_plain(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return {**asdict(self), "meaning": self.meaning}


def session_rates(session: pb.SessionState) -> SessionRates | None:
    """Returns the rates of a session; None if it has just begun."""
    lately = session.lately
    elapsed_s = lately.elapsed_s
    if elapsed_s < _MIN_ELAPSED_S:
        return None
    size_s = lately.window_size_batch_s
    return SessionRates(
        batches_per_s=lately.batches_per_s,
        bytes_per_s=lately.bytes_per_s,
        occupancy=_share(lately.window_ready_batch_s, size_s) if size_s > 0 else None,
        starved=_share(lately.trainer_waited_s, elapsed_s),
        wait_storage=_share(lately.wait_storage_s, elapsed_s),
        wait_processor=_share(lately.wait_processor_s, elapsed_s),
        wait_trainer=_share(lately.wait_trainer_s, elapsed_s),
    )


def _share(part: float, whole: float) -> float:
    """Returns a share in [0, 1]: a wait is reported when it ends, so it may exceed the interval."""
    return min(max(part / whole, 0.0), 1.0)


def measuring_line(state: pb.MeasuringState) -> str:
    """Returns a line such as `wiki: 1,200 of 40,000 samples (3.0%), 85/s, 456 s left`."""
    done, whole = state.num_done, max(state.num_samples, 1)
    line = (
        f"{printable(state.dataset)}: {done:,} of {counted(state.num_samples, 'sample', ',')} "
        f"({done / whole:.1%})"
    )
    num_new = done - state.num_reused
    if num_new <= 0 or state.elapsed_s <= 0:
        return line
    rate = num_new / state.elapsed_s
    left_s = max(state.num_samples - done, 0) / rate
    return f"{line}, {rate:,.0f}/s, {left_s:,.0f} s left"
