"""A run of `gyre-train` by its files: its cursor and data, its losses and spikes."""

import base64
import contextlib
import hashlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest
from gyre_client.transport.answers import MAX_CURSOR_BYTES
from gyre_client.transport.arguments import dataset_ref

_STATUS, _HISTORY = "status.json", "history.jsonl"
_MAX_STATUS_BYTES = 1 << 20
_MAX_RANKS = 1024
_MAX_READ_BYTES = 32 << 20  # of the history in one look
_MAX_STEPS = 500_000  # kept of a run, the newest
_MAX_POINTS = 1500  # of a curve: two in each pixel of a narrow window
# A spike: a loss this many deviations above the median of the steps before it, and this much of it.
# This finds 89 % of jumps of seven deviations 80 steps after the start, and none in 20,000 steps of
# Gaussian noise. 64 steps found 15 %, as they reach back to where the loss fell; 32 found 94 %, and
# three spikes in the noise.
_DEVIATIONS, _RISE = 5.0, 0.05
_WINDOW, _LEAST_BEFORE = 48, 16
_MAX_SPIKES, _SAME_SPIKE_STEPS = 20, 4
_STALE_S = 120.0  # without a new status file a run looks dead, or its steps are that long


class Spike(NamedTuple):
    """A step whose loss is far above those before it.

    `loss` is None if it was no finite number; `usual` is the median of those before it.
    """

    step: int
    loss: float | None
    usual: float

    @property
    def height(self) -> float:
        """How far it rises above the usual."""
        return math.inf if self.loss is None else self.loss - self.usual


class Curve:
    """The losses of a run, step by step, and the spikes among them."""

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=_MAX_STEPS)
        self.losses: deque[float] = deque(maxlen=_MAX_STEPS)
        self._spikes: list[Spike] = []

    def add(self, entry: dict[str, Any]) -> None:
        """Adds a line of the history: a step, or a resume, which takes later steps back."""
        if isinstance(resumed := entry.get("resumed_at"), int):
            while self.steps and self.steps[-1] >= resumed:
                self.steps.pop()
                self.losses.pop()
            self._spikes = [each for each in self._spikes if each.step < resumed]
            return
        step, loss = entry.get("step"), entry.get("loss")
        if not isinstance(step, int) or not isinstance(loss, int | float):
            return
        self._judge(step, float(loss))
        self.steps.append(step)
        self.losses.append(float(loss))

    def _judge(self, step: int, loss: float) -> None:
        num = min(_WINDOW, len(self.losses))
        before = [self.losses[-index] for index in range(1, num + 1)]
        before = [each for each in before if math.isfinite(each)]
        if len(before) < _LEAST_BEFORE:
            return
        usual = median(before)
        spread = 1.4826 * median(abs(each - usual) for each in before)
        bound = usual + max(_DEVIATIONS * spread, _RISE * abs(usual))
        if math.isfinite(loss) and loss <= bound:
            return
        found = Spike(step, loss if math.isfinite(loss) else None, usual)
        last = self._spikes[-1] if self._spikes else None
        if last and step - last.step <= _SAME_SPIKE_STEPS:
            if found.height > last.height:
                self._spikes[-1] = found
        else:
            self._spikes.append(found)

    @property
    def spikes(self) -> list[Spike]:
        """The highest ones, in the order of their steps."""
        highest = sorted(self._spikes, key=lambda each: -each.height)[:_MAX_SPIKES]
        return sorted(highest, key=lambda each: each.step)

    def plain(self) -> dict[str, Any]:
        """Returns at most some 1,500 points; of neighbours, the lowest and the highest are kept."""
        steps, losses = list(self.steps), list(self.losses)
        kept = _kept(losses)
        return {
            "step": [steps[each] for each in kept],
            "loss": [_finite(losses[each]) for each in kept],
            "spikes": [each._asdict() for each in self.spikes],
        }


def _kept(losses: Sequence[float]) -> list[int]:
    if len(losses) <= _MAX_POINTS:
        return list(range(len(losses)))
    width = math.ceil(2 * len(losses) / _MAX_POINTS)
    kept = set()
    for begin in range(0, len(losses), width):
        places = range(begin, min(begin + width, len(losses)))
        kept |= {min(places, key=losses.__getitem__), max(places, key=losses.__getitem__)}
    return sorted(kept)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


class TrainingRun:
    """The folder of a run, read again where its files have changed."""

    def __init__(self, number: int, path: Path) -> None:
        """Reads nothing yet.

        Raises:
            InvalidRequest: There is no such folder.
        """
        if not path.is_dir():
            raise InvalidRequest(f"--run {path}: no such folder. Give the run.out of gyre-train.")
        self.number = number
        self.path = path.absolute()
        self._status: dict[str, Any] = {}
        self._curve = Curve()
        self._offset = 0
        self._lock = threading.Lock()

    def look(self) -> None:
        """Reads the status file, and the new lines of the history."""
        with self._lock, contextlib.suppress(OSError):
            self._status = _status(self.path / _STATUS)
        with self._lock, contextlib.suppress(OSError):
            self._read_history(self.path / _HISTORY)

    def _read_history(self, path: Path) -> None:
        if not path.is_file():
            return
        if path.stat().st_size < self._offset:  # another run has begun here
            self._curve, self._offset = Curve(), 0
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(_MAX_READ_BYTES)
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        for entry in _entries(data):
            self._curve.add(entry)

    def plain(self) -> dict[str, Any]:
        """Returns the values after the last step."""
        status, curve = self._status, self._curve
        written_at = status.get("written_at", 0.0)
        return {
            "number": self.number,
            "name": printable(self.path.name),
            "folder": printable(str(self.path)),
            "state": self._state(time.time() - written_at),
            "step": status.get("step") or (curve.steps[-1] + 1 if curve.steps else 0),
            "steps": status.get("steps"),
            "loss": status.get("loss", _finite(curve.losses[-1]) if curve.losses else None),
            "tokens_per_s": status.get("tokens_per_s"),
            "ranks": status.get("ranks", []),
            "num_recorded": len(curve.steps),
        }

    def _state(self, age_s: float) -> str:
        if not self._status:
            return "no status file yet"
        if self._status["step"] >= self._status["steps"]:
            return "finished"
        return "running" if age_s < _STALE_S else "silent"

    def curve(self) -> dict[str, Any]:
        """Returns the losses and spikes."""
        with self._lock:
            return self._curve.plain()

    def request(self, step: int) -> pb.LocateStepRequest:
        """Returns the request for the samples of a step.

        Raises:
            InvalidRequest: The run's files do not say which data it reads, or may not say it.
        """
        status = self._status
        try:
            files = read_run(self.path)
        except InvalidRequest:
            if not status.get("cursor") or not status.get("dataset"):
                raise
            files = RunFiles(status["cursor"], status["dataset"], status.get("format") or "")
        options = files.options_to_take(self.path, ())
        ref = dataset_ref(files.dataset, files.format or None, options or None)
        return pb.LocateStepRequest(dataset=ref, cursor=files.cursor, batch=step)


def _status(path: Path) -> dict[str, Any]:
    """Returns a status file's values, those of the right type alone; none if it is no such file."""
    if not path.is_file() or path.stat().st_size > _MAX_STATUS_BYTES:
        return {}
    try:
        found = json.loads(path.read_bytes())
        numbers = ("step", "steps", "loss", "tokens_per_s", "written_at")
        status: dict[str, Any] = {name: _finite(float(found[name])) for name in numbers}
        status["step"], status["steps"] = int(found["step"]), int(found["steps"])
        status["written_at"] = status["written_at"] or 0.0
        names = ("memory_bytes", "step_s", "hop_wait_s", "data_wait_s")
        status["ranks"] = [
            {name: _finite(float(each[name])) for name in names}
            for each in found["ranks"][:_MAX_RANKS]
        ]
        status["dataset"], status["format"] = str(found["dataset"]), str(found["format"])
        cursor = base64.b64decode(found["cursor"], validate=True)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return {}
    return {**status, "cursor": cursor if _is_cursor(cursor) else b""}


_MANIFEST = "checkpoint.json"
_MAX_MANIFEST_BYTES = 1 << 26
# Options never taken from a run's files: where credentials of the caller's environment are sent,
# and whether links may lead out of the data's folder, to files of the caller.
_OF_THE_CALLER = ("storage", "follow_links")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A job that was run.

    Attributes:
        cursor: Any one of the job.
        dataset: As the run's configuration names it; empty if unknown.
        format: The format of the data at a path; empty for a name.
        options: The options of the data at a path, but for those that may hold credentials.
        checkpoints: The steps of the run's checkpoints; empty for a cursor's file.
        history: The records of committed steps, by step; empty for a cursor's file.
    """

    cursor: bytes
    dataset: str = ""
    format: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    checkpoints: Sequence[int] = ()
    history: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def counts_batches(self) -> bool:
        """Whether its steps are counted without skipped ones, as a trainer does."""
        return bool(self.checkpoints)

    def loss(self, step: int) -> float | None:
        """The recorded loss of a step; None where the record has no number, or one beyond float."""
        try:
            loss = self.history.get(step, {}).get("loss")
            return float(loss) if isinstance(loss, int | float) else None
        except OverflowError:
            return None

    def options_to_take(self, path: Path, given: Collection[str]) -> dict[str, Any]:
        """Returns the run's own options of its data, but for those that the caller gives.

        Raises:
            InvalidRequest: They name code, or set options that are the caller's. Whoever can write
                a run's files must not choose which code runs here, nor where credentials go.
        """
        taken = {key: value for key, value in self.options.items() if key not in given}
        found = taken.get("transforms")
        tables = found if isinstance(found, list) else []
        if any(":" in str(each.get("name", "")) for each in tables if isinstance(each, dict)):
            raise InvalidRequest(
                f"{path} has transforms of the form MODULE:CLASS, and a run's files run no code: "
                "give them again, with --transforms FILE"
            )
        for key in _OF_THE_CALLER:
            if taken.get(key):
                raise InvalidRequest(
                    f"{path} has `{key}` in its data.options, which is not taken from a run's "
                    f"files. Give it again, with --option '{key}=...'"
                )
        return taken

    def is_recorded(self, step: int, sample_ids: Sequence[int]) -> bool | None:
        """Whether the history has these samples for a step; None where it has no such step."""
        if step not in self.history:
            return None
        lines = "".join(f"{sample_id}\n" for sample_id in sample_ids)
        digest: str = hashlib.sha256(lines.encode()).hexdigest()
        return bool(digest[:16] == self.history[step].get("sample_ids"))


def read_run(path: Path) -> RunFiles:
    """Reads a run's folder, one of its checkpoints, or a file with the bytes of a cursor.

    Raises:
        InvalidRequest: It is none of these.
    """
    try:
        if path.is_file():
            return RunFiles(_cursor(path.read_bytes(), path))
        if (path / _MANIFEST).is_file():
            return _of_run(path.absolute().parent.parent, path)
        latest = path / "checkpoints" / "latest"
        if not latest.is_file():
            raise InvalidRequest(
                f"{path} is no folder of a run with a checkpoint, no checkpoint, and no file with "
                "the cursor of a state. Write state_dict()['cursor'] to a file, and name that."
            )
        return _of_run(path, path / "checkpoints" / latest.read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


def _of_run(folder: Path, checkpoint: Path) -> RunFiles:
    manifest = _manifest(checkpoint / _MANIFEST)
    try:
        cursor = base64.b64decode(manifest["loader"]["cursor"], validate=True)
        data = dict(manifest.get("data", {}))
        options = dict(json.loads(data.get("options", "{}")))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{checkpoint / _MANIFEST} has no cursor of a loader, or describes its data wrongly"
        ) from error
    numbers = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    return RunFiles(
        _cursor(cursor, checkpoint),
        str(data.get("dataset", "")),
        str(data.get("format", "")),
        options,
        sorted(int(each) for each in numbers if each.isdecimal()) or [int(manifest["step"])],
        _history(folder / "history.jsonl"),
    )


def _manifest(path: Path) -> dict[str, Any]:
    if path.is_file() and path.stat().st_size <= _MAX_MANIFEST_BYTES:
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            return found
    raise InvalidRequest(f"{path} is no manifest of a checkpoint")


def _is_cursor(data: bytes) -> bool:
    return data.startswith(b"GYRE") and len(data) <= MAX_CURSOR_BYTES


def _cursor(data: bytes, path: Path) -> bytes:
    if not _is_cursor(data):
        raise InvalidRequest(f"{path} has no cursor of a Loader's state")
    return data


def _history(path: Path) -> dict[int, dict[str, Any]]:
    """Returns the records that led to the newest weights: a resume takes later ones back."""
    records: dict[int, dict[str, Any]] = {}
    for entry in _entries(path.read_bytes() if path.is_file() else b""):
        if isinstance(resumed := entry.get("resumed_at"), int):
            records = {step: each for step, each in records.items() if step < resumed}
        elif isinstance(step := entry.get("step"), int) and "sample_ids" in entry:
            records[step] = entry
    return records


def _entries(data: bytes) -> Iterator[dict[str, Any]]:
    """Yields the lines of a history."""
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # a torn last line, or damage: `gyre-train` tells
            continue
        if isinstance(entry, dict):
            yield entry
