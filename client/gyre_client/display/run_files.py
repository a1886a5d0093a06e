"""Files of a `gyre-train` run, for `gyre rewind` and the page: a cursor, the data, the history."""

import base64
import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_client.errors import InvalidRequest
from gyre_client.messages.answers import MAX_CURSOR_BYTES

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

        Args:
            path: Of the run.
            given: Their keys.

        Raises:
            InvalidRequest: They name code, or set options that are the caller's. Whoever can write
                a run's files must not choose which code runs here, nor where credentials go.
        """
        taken = {key: value for key, value in self.options.items() if key not in given}
        if _names_code(taken.get("transforms")):
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


def _names_code(transforms: object) -> bool:
    tables = transforms if isinstance(transforms, list) else []
    return any(":" in str(each.get("name", "")) for each in tables if isinstance(each, dict))


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


def _cursor(data: bytes, path: Path) -> bytes:
    if not data.startswith(b"GYRE") or len(data) > MAX_CURSOR_BYTES:
        raise InvalidRequest(f"{path} has no cursor of a Loader's state")
    return data


def _history(path: Path) -> dict[int, dict[str, Any]]:
    """Returns the records that led to the newest weights: a resume takes later ones back."""
    records: dict[int, dict[str, Any]] = {}
    for entry in _entries(path):
        if isinstance(resumed := entry.get("resumed_at"), int):
            records = {step: each for step, each in records.items() if step < resumed}
        elif isinstance(step := entry.get("step"), int) and "sample_ids" in entry:
            records[step] = entry
    return records


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # a torn last line, or damage: `gyre-train` tells
            continue
        if isinstance(entry, dict):
            yield entry
