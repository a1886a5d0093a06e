"""What a run consumed and learned, one JSON line per step, appended and never rewritten.

A resumed run appends a line `{"resumed_at": step}`. Earlier lines for that step and later steps
then belong to weights that were lost. `committed` reads the file by this rule and leaves exactly
one record for each step. Its `sample_ids` is the digest of the ids that `gyre plan DATASET --step
STEP` prints, where STEP is the step of the data's order: that of the run, and those before it that
`data.skip_steps` leaves out. Evaluations and samples have lines of their
own, to which the same rule applies.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from gyre_trainer.errors import RecordsFailed


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step of the whole job, as one line of the history.

    Attributes:
        step: the step's number, from 0.
        epoch: the epoch of the global batch's first sample.
        loss: the mean over all ranks' targets, in nats.
        lr: the learning rate of this step.
        num_targets: tokens predicted, over all ranks.
        elapsed_s: seconds since the end of the previous step, on rank 0.
        data_wait_s: the part of that time spent waiting for a batch; the longest of all ranks.
        sample_ids: the digest of the global batch's sample ids, in the order of their positions.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    num_targets: int
    elapsed_s: float
    data_wait_s: float
    sample_ids: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation, as one line of the history.

    Attributes:
        evaluated_at: the step whose weights they are, before it is taken.
        eval_loss: the mean over all ranks' targets, in nats.
    """

    evaluated_at: int
    eval_loss: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One text of the model, as one line of the history.

    Attributes:
        sampled_at: the step whose weights they are, before it is taken.
        prompt: what was continued.
        text: the continuation.
    """

    sampled_at: int
    prompt: str
    text: str


Note = TypeVar("Note", Evaluation, Sample)

_NAMES = {field.name for field in fields(StepRecord)}
_NUMBERS = (_NAMES | {"resumed_at", "evaluated_at", "eval_loss", "sampled_at"}) - {"sample_ids"}


def digest(sample_ids: Sequence[int]) -> str:
    """The first 16 hex digits of SHA-256 over the decimal ids, each with a newline."""
    return hashlib.sha256(
        "".join(f"{sample_id}\n" for sample_id in sample_ids).encode()
    ).hexdigest()[:16]


# Seconds that a run waits for the writer before it: the ranks of a launcher that was killed end
# soon after it. A longer wait keeps a second run silent for longer before it is refused.
_WRITER_ENDS_S = 10.0


class History:
    """The file `history.jsonl` of a run, held open and locked by rank 0.

    The kernel drops the lock however the process ends. On file systems without locks there is none.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and cut off what a killed writer left of its last line.

        Raises:
            RecordsFailed: another process writes it.
        """
        self._file = path.open("a", encoding="utf-8")
        try:
            _lock(self._file.fileno(), path)
            _drop_torn_line(path)
        except BaseException:
            self._file.close()
            raise

    def resume_at(self, step: int) -> None:
        """Mark the earlier lines for ``step`` and later steps as belonging to lost weights."""
        self._write({"resumed_at": step})

    def append(self, records: Iterable[StepRecord]) -> None:
        """Add the records of steps that have been taken."""
        for record in records:
            self._write(asdict(record))
        self._file.flush()

    def note(self, note: Evaluation | Sample) -> None:
        """Add an evaluation or a sample."""
        self._write(asdict(note))
        self._file.flush()

    def sync(self) -> None:
        """Make everything appended so far survive a failure of the machine."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def committed(path: Path) -> list[StepRecord]:
    """The records that led to the newest weights, by step, without a torn last line.

    Raises:
        RecordsFailed: a line is damaged; the message has its number.
    """
    records: list[StepRecord] = []
    for entry in _entries(path):
        if "resumed_at" in entry:
            records = [record for record in records if record.step < entry["resumed_at"]]
        elif entry.keys() >= _NAMES:
            records.append(StepRecord(**{name: entry[name] for name in _NAMES}))
    return records


def notes(path: Path, kind: type[Note]) -> list[Note]:
    """The evaluations, or the samples, of the weights that led to the newest ones.

    Raises:
        RecordsFailed: as `committed`.
    """
    names = [field.name for field in fields(kind)]
    found: list[dict[str, Any]] = []
    for entry in _entries(path):
        if "resumed_at" in entry:
            found = [each for each in found if each[names[0]] <= entry["resumed_at"]]
        elif entry.keys() >= set(names):
            found.append(entry)
    return [kind(**{name: entry[name] for name in names}) for entry in found]


def resumes(path: Path) -> list[int]:
    """The steps at which the run was resumed, in the order of the file."""
    return [entry["resumed_at"] for entry in _entries(path) if "resumed_at" in entry]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The object in each whole line."""
    content = path.read_bytes()
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            entry = json.loads(line)
            is_valid = isinstance(entry, dict) and all(
                isinstance(entry.get(name, 0), int | float) for name in _NUMBERS
            )
        except (ValueError, RecursionError):
            is_valid = False
        if not is_valid:
            raise RecordsFailed(
                f"{path} is damaged: line {number} is no record of a step; "
                "remove that line, or move the file away"
            )
        yield entry


def _lock(descriptor: int, path: Path) -> None:
    deadline_s = time.monotonic() + _WRITER_ENDS_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise RecordsFailed(
                    f"another run goes on in {path.parent}: a process holds {path.name}; end that "
                    "run first, or choose another `run.out`"
                ) from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return None


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a killed writer did not finish."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
