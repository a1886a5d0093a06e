"""The line on rank 0 that says how a run is doing.

On a terminal it is rewritten in place; elsewhere a new line appears every few seconds.
"""

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from gyre_trainer.training.records.history import StepRecord

# Seconds between two lines where a line cannot be rewritten. A shorter interval fills the log; a
# much longer one makes a reader doubt that the run is alive.
_LINE_INTERVAL_S = 5.0


class Progress:
    """Shows records as they come."""

    def __init__(
        self, num_steps: int, stream: TextIO, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._stream = stream
        self._clock_s = clock_s
        self._rewrites = stream.isatty()
        self._shown_at_s = float("-inf")
        self._width = 0
        self._is_gone = False

    def show(self, records: Sequence[StepRecord]) -> None:
        """Show one line about the records since the last call; the last step is always shown."""
        is_last = records[-1].step + 1 == self._num_steps
        if (
            not self._rewrites
            and not is_last
            and self._clock_s() - self._shown_at_s < _LINE_INTERVAL_S
        ):
            return
        self._shown_at_s = self._clock_s()
        line = describe(records, self._num_steps)
        if self._rewrites:
            self._write("\r" + line.ljust(self._width) + ("\n" if is_last else ""))
            self._width = len(line)
        else:
            self._write(line + "\n")

    def say(self, text: str) -> None:
        """Write a whole line."""
        ended = "\n" if self._rewrites and self._width else ""
        self._width = 0
        self._write(f"{ended}{text}\n")

    def _write(self, text: str) -> None:
        """Write, unless nobody reads any more: a run does not end with its terminal."""
        if not self._is_gone:
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError:
                self._is_gone = True


def describe(records: Sequence[StepRecord], num_steps: int) -> str:
    """Step, mean loss, tokens/s, share of time waiting for data, and time left."""
    last = records[-1]
    elapsed_s = max(sum(record.elapsed_s for record in records), 1e-9)
    loss = sum(record.loss for record in records) / len(records)
    tokens_per_s = sum(record.num_targets for record in records) / elapsed_s
    wait_share = sum(record.data_wait_s for record in records) / elapsed_s
    left_s = elapsed_s / len(records) * (num_steps - last.step - 1)
    return (
        f"step {last.step + 1:>{len(str(num_steps))}}/{num_steps}  loss {loss:.4f}  lr "
        f"{last.lr:.2e}  "
        f"{tokens_per_s:,.0f} tokens/s  data wait {wait_share:.1%}  left {_clock(left_s)}"
    )


def _clock(seconds: float) -> str:
    minutes, whole_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_s:02}" if hours else f"{minutes}:{whole_s:02}"
