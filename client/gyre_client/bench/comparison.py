"""Measures Gyre and other loaders on the same files: which, in which order, how often.

Each loader runs alone, twice, the second time in the opposite order, with the same batch size.
Before anything is measured, the files are read once if they fit into the page cache, and batches of
Gyre are compared with those of each map-style opponent.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.bench.opponents import GYRE, MAP, TABLE, Contender, contenders_of, find_files
from gyre_client.errors import DaemonFault, InvalidRequest

_READ_BYTES = 1 << 24

Results = Mapping[str, float]
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measurements.

    Attributes:
        files_were_cached: The files were in the page cache before the first measurement.
        missing: Packages that further opponents would need.
        medians: For each loader, the medians over its turns of the results of `stopwatch.measure`.
    """

    files_were_cached: bool
    missing: Sequence[str]
    medians: Mapping[Contender, Results]


def compare(
    description: pb.DatasetDescription, task: Mapping[str, Any], show_progress: Show
) -> Comparison:
    """Returns the measurements.

    Args:
        description: The dataset, as the daemon describes it.
        task: dataset, is_location, batch_size, seconds, seed, address, daemon_user and options, as
            the user gave them.
        show_progress: Called with a line of text whenever the next stage begins; empty at the end.

    Raises:
        InvalidRequest: The files cannot be read from here, or hold other data than the daemon
            serves, or optional fields.
    """
    contenders, missing = contenders_of(description.format)
    compared = any(each.kind in (MAP, TABLE) for each in contenders)
    if compared and any(each.name.endswith((".present", ".shape")) for each in description.fields):
        raise InvalidRequest(
            f"the dataset at {description.uri} has optional fields or arrays of several shapes: "
            "such fields cannot be compared"
        )
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="gyre-bench-"))
        task = {**task, **task_of(description, task["options"], cache)}
        is_warm = _warm(task["files"], description.num_bytes, show_progress)
        # Gyre runs in a separate process: the DataLoader's workers are forked, and a process that
        # uses gRPC must not fork.
        opponents = stack.enter_context(_Stopwatch(task))
        gyre = stack.enter_context(_Stopwatch(task))
        for kind in dict.fromkeys(each.kind for each in contenders if each.kind in (MAP, TABLE)):
            show_progress("comparing batches")
            if differs := gyre.ask("differing", kind):
                raise InvalidRequest(
                    f"the files at {description.uri} differ from the daemon's data: {differs} "
                    "differs, so they cannot be compared"
                )
        rounds: list[dict[Contender, Results]] = []
        for order in (contenders, contenders[::-1]):
            rounds.append({})
            for contender in order:
                show_progress(f"measuring {contender.label}")
                stopwatch = gyre if contender.kind == GYRE else opponents
                rounds[-1][contender] = stopwatch.ask(
                    "measure", contender.kind, contender.num_workers
                )
    show_progress("")
    medians = {
        contender: {
            key: statistics.median(results[contender][key] for results in rounds)
            for key in rounds[0][contender]
        }
        for contender in contenders
    }
    return Comparison(is_warm, missing, medians)


def task_of(
    description: pb.DatasetDescription, options: Mapping[str, Any] | None, cache: str
) -> dict[str, Any]:
    """Returns the entries of a task that follow from the dataset, ready for JSON.

    Raises:
        InvalidRequest: See `find_files`.
    """
    return {
        "options": options,
        "files": [str(file) for file in find_files(description)],
        "format": description.format,
        "num_samples": description.num_samples,
        "cache": cache,
        "fields": [
            (field.name, field.dtype, list(field.shape), field.ragged)
            for field in description.fields
        ],
    }


class _Stopwatch:
    """A child process that reads and measures: `python -m gyre_client.bench.stopwatch`."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        # The child's standard error; the file has no name and ends with this object.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        command, pipe = [sys.executable, "-m", "gyre_client.bench.stopwatch"], subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True
        )
        self._send(task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def ask(self, *command: object) -> Any:
        """Returns the child's answer to a command.

        Raises:
            DaemonFault: The child ended; the message has the last line of its standard error.
        """
        assert self._process.stdout
        self._send(command)
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        raise DaemonFault(f"the comparison stopped: {lines[-1] if lines else 'without a message'}")

    def _send(self, value: object) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # `ask` finds out why
            print(json.dumps(value), file=self._process.stdin, flush=True)


def _warm(files: list[str], num_bytes: int, show_progress: Show) -> bool:
    """Reads the files once if they fit into the page cache, and returns whether they do."""
    if num_bytes > _available_bytes() // 2:
        return False
    show_progress("reading the files once")
    for path in files:
        with Path(path).open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
    return True


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
