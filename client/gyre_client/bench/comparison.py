"""Measures Gyre and the DataLoader on the same files: which loaders, in which order, how often.

Each loader runs alone, twice, the second time in the opposite order, with the same batch size and a
full shuffle. Before anything is measured, the files are read once if they fit into the page cache,
and the batches of both sides are compared byte by byte.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.bench.dataset_files import find_files, scan_tars, token_stride
from gyre_client.bench.stopwatch import GYRE
from gyre_client.errors import DaemonFault, InvalidRequest

NUM_CHECKED_BATCHES = 3
_READ_BYTES = 1 << 24

Results = Mapping[str, float]
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """One loader of the comparison.

    Attributes:
        label: Its name for people.
        loader: `gyre`, `plain` or `tuned`.
        num_workers: Worker processes of the DataLoader; 0 for Gyre.
    """

    label: str
    loader: str
    num_workers: int = 0


CONTENDERS = (
    Contender("Gyre", GYRE),
    Contender("DataLoader, tuned, in process", "tuned"),
    Contender("DataLoader, tuned, 2 workers", "tuned", 2),
    Contender("DataLoader, plain, in process", "plain"),
    Contender("DataLoader, plain, 2 workers", "plain", 2),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measurements.

    Attributes:
        header_scan_s: Time to read the headers of all tar shards, which the DataLoader needs.
        files_were_cached: The files were in the page cache before the first measurement.
        medians: For each loader, the medians over its turns of the results of `stopwatch.measure`.
    """

    header_scan_s: float
    files_were_cached: bool
    medians: Mapping[Contender, Results]


def compare(
    description: pb.DatasetDescription, task: Mapping[str, Any], show_progress: Show
) -> Comparison:
    """Returns the measurements.

    Args:
        description: The dataset, as the daemon describes it.
        task: dataset, batch_size, seconds, seed, address, daemon_user, format and options, as the
            user gave them.
        show_progress: Called with a line of text whenever the next stage begins; empty at the end.

    Raises:
        InvalidRequest: The files cannot be read from here, or hold other data than the daemon
            serves.
    """
    with contextlib.ExitStack() as stack:
        files, header_scan_s = stack.enter_context(located(description, task, show_progress))
        task = {**task, **files}
        is_warm = _warm(files["files"], description.num_bytes, show_progress)
        # Gyre runs in a separate process: the DataLoader's workers are forked, and a process that
        # uses gRPC must not fork.
        opponents = stack.enter_context(_Stopwatch(task))
        gyre = stack.enter_context(_Stopwatch(task))
        show_progress("comparing batches")
        num_batches = min(NUM_CHECKED_BATCHES, description.num_samples // task["batch_size"])
        field = gyre.ask("differing", num_batches)
        if field:
            raise InvalidRequest(
                f"the files at {description.uri} differ from the daemon's data: "
                f"the field {field!r} differs, so they cannot be compared"
            )
        rounds: list[dict[Contender, Results]] = []
        for order in (CONTENDERS, CONTENDERS[::-1]):
            rounds.append({})
            for contender in order:
                show_progress(f"measuring {contender.label}")
                stopwatch = gyre if contender.loader == GYRE else opponents
                rounds[-1][contender] = stopwatch.ask(
                    "measure", contender.loader, contender.num_workers
                )
    show_progress("")
    medians = {
        contender: {
            key: statistics.median(results[contender][key] for results in rounds)
            for key in rounds[0][contender]
        }
        for contender in CONTENDERS
    }
    return Comparison(header_scan_s, is_warm, medians)


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


@contextmanager
def located(
    description: pb.DatasetDescription, task: Mapping[str, Any], show_progress: Show
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yields the places of samples, for `stopwatch`, and the seconds that reading headers took.

    The index of tar shards is in a temporary file, which is removed at the end. The arguments and
    errors are those of `compare`.
    """
    files = find_files(description)
    options = task["options"] or {}
    header_bytes = options.get("header_bytes")
    found: dict[str, Any] = {
        "files": [str(file) for file in files],
        "fields": [
            (field.name, field.dtype, list(field.shape), field.ragged)
            for field in description.fields
        ],
        "header_bytes": header_bytes,
        "stride": 0,
        "places": "",
    }
    if description.format == "tokens":
        stride = int(options.get("stride", 0))
        found["stride"] = token_stride(description, files, stride, header_bytes)
        yield found, 0.0
        return
    show_progress("reading the headers of the shards")
    began_s = time.perf_counter()
    places = scan_tars(files, [field.name for field in description.fields])
    scan_s = time.perf_counter() - began_s
    if len(places.shard) != description.num_samples:
        raise InvalidRequest(
            f"{description.uri} has {len(places.shard)} samples as read from here, but the daemon "
            f"serves {description.num_samples}: they must be the same to be compared"
        )
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        found["places"] = str(Path(folder) / "places.npz")
        np.savez(found["places"], shard=places.shard, start=places.start, size=places.size)
        yield found, scan_s


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
