"""A progress bar with the rate and the time left, on a terminal or in a notebook.

tqdm draws it where it is installed.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, Self

from gyre_protos.text import printable

from gyre_client.display.formatting import cut, duration, page_width, show_progress

_BAR_CELLS = 24
_MAX_NOTE_COLUMNS = 40
_MIN_PAUSE_S = 0.1  # more often, a terminal would take longer than the work
# The rate is that of the last seconds: steps done before the start of the work, such as shards
# whose index was kept, do not tell how long the rest takes.
_RATE_OVER_S = 10.0


class Bar(Protocol):
    """Shows how much of a task is done, until its `with` ends."""

    def __enter__(self) -> Self:
        """Show nothing yet."""

    def __exit__(self, *exception: object) -> None:
        """Remove the bar."""

    def update(self, num_done: int, num_all: int, note: str = "") -> None:
        """Show how many of all are done, and a note on the last one."""


def is_watched() -> bool:
    """Whether a person may see a bar: standard error is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def progress_bar(unit: str) -> Bar:
    """Make a bar of tqdm if it is installed, else one of Gyre.

    Args:
        unit: The counted things, in the plural.
    """
    try:
        from tqdm.auto import tqdm  # noqa: PLC0415  # it is optional
    except ImportError:
        return ProgressBar(unit)
    return TqdmBar(tqdm(unit=f" {unit}", leave=False, dynamic_ncols=True, disable=not is_watched()))


class TqdmBar:
    """A bar that tqdm draws."""

    def __init__(self, bar: Any) -> None:
        """Take over a bar of tqdm."""
        self._bar = bar

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def update(self, num_done: int, num_all: int, note: str = "") -> None:
        """See `Bar.update`."""
        if self._bar.total != num_all:
            self._bar.total = num_all
        if note:
            self._bar.set_postfix_str(cut(printable(note), _MAX_NOTE_COLUMNS), refresh=False)
        self._bar.update(num_done - self._bar.n)


class ProgressBar:
    """The last line of a terminal while something is done; use it in a `with`."""

    def __init__(
        self,
        unit: str,
        show: Callable[[str], None] = show_progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Shows nothing yet.

        Args:
            unit: The counted things, in the plural.
            show: Shows a line in place of the one before; nothing for an empty one.
            clock: Returns the time in seconds.
        """
        self._unit = unit
        self._show = show
        self._clock = clock
        self._shown_at = float("-inf")
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._show("")

    def update(self, num_done: int, num_all: int, note: str = "") -> None:
        """Shows how many of all are done, and a note about the last one."""
        now = self._clock()
        self._marks.append((now, num_done))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _RATE_OVER_S:
            self._marks.popleft()
        if now - self._shown_at < _MIN_PAUSE_S and num_done < num_all:
            return
        self._shown_at = now
        self._show(cut(self._line(num_done, num_all, note), page_width() - 1))

    def _line(self, num_done: int, num_all: int, note: str) -> str:
        part = num_done / num_all if num_all else 1.0
        num_full = int(part * _BAR_CELLS)
        bar = f"[{'#' * num_full}{'.' * (_BAR_CELLS - num_full)}] {part:4.0%}"
        words = [f"{num_done:,}/{num_all:,} {self._unit}"]
        (since, before), (now, _) = self._marks[0], self._marks[-1]
        if now > since and num_done > before:
            rate = (num_done - before) / (now - since)
            words.append(f"{rate:,.1f}/s" if rate < 100 else f"{rate:,.0f}/s")
            if num_done < num_all:
                words.append(f"{duration((num_all - num_done) / rate)} left")
        return f"{bar} {', '.join(words)}{f', {note}' if note else ''}"
