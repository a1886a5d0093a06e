"""Measures Gyre and other loaders on the same files: which, in which order, how often.

Each loader runs alone, twice, the second time in the opposite order, with the same batch size.
Before anything is measured, the files are read once if they fit into the page cache, and batches of
Gyre are compared with those of each map-style opponent.

A separate process times loaders: `python -m gyre_client.bench.comparison`. The first line of its
standard input is the task, and each further line is a command; it answers each with a line of JSON.
A reader touches every cache line of every batch, as a copy to a device would.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.bench.opponents import (
    GYRE,
    MAP,
    TABLE,
    Batch,
    Contender,
    batches_of,
    contenders_of,
    find_files,
    samples_of,
)
from gyre_client.errors import DaemonFault, InvalidRequest

_READ_BYTES = 1 << 24

Results = Mapping[str, float]
Show = Callable[[int, int, str], None]


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


def compare(description: pb.DatasetDescription, task: Mapping[str, Any], show: Show) -> Comparison:
    """Returns the measurements.

    Args:
        description: The dataset, as the daemon describes it.
        task: dataset, is_location, batch_size, seconds, seed, address, daemon_user and options, as
            the user gave them.
        show: Is told how many measurements are done, how many there are, and the next one.

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
        is_warm = _warm(task["files"], description.num_bytes)
        # Gyre runs in a separate process: the DataLoader's workers are forked, and a process that
        # uses gRPC must not fork.
        opponents = stack.enter_context(_Stopwatch(task))
        gyre = stack.enter_context(_Stopwatch(task))
        for kind in dict.fromkeys(each.kind for each in contenders if each.kind in (MAP, TABLE)):
            if differs := gyre.ask("differing", kind):
                raise InvalidRequest(
                    f"the files at {description.uri} differ from the daemon's data: {differs} "
                    "differs, so they cannot be compared"
                )
        rounds: list[dict[Contender, Results]] = []
        for order in (contenders, contenders[::-1]):
            rounds.append({})
            for contender in order:
                num_done = sum(map(len, rounds))
                show(num_done, 2 * len(contenders), contender.label)
                stopwatch = gyre if contender.kind == GYRE else opponents
                rounds[-1][contender] = stopwatch.ask(
                    "measure", contender.kind, contender.num_workers
                )
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
    """A child process that reads and measures: `python -m gyre_client.bench.comparison`."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        # The child's standard error; the file has no name and ends with this object.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        command, pipe = [sys.executable, "-m", "gyre_client.bench.comparison"], subprocess.PIPE
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


def _warm(files: list[str], num_bytes: int) -> bool:
    """Reads the files once if they fit into the page cache, and returns whether they do."""
    if num_bytes > _available_bytes() // 2:
        return False
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


CACHE_LINE_BYTES = 64
WARMUP_S = 0.3  # fills the prefetch windows of all loaders
_NUM_COMPARED = 3  # batches
_NO_DATA = ("sample_id", "__key__", "__url__", "__local_path__")


def measure(task: dict[str, Any], kind: str, num_workers: int) -> dict[str, float]:
    """Reads for `task["seconds"]` after a warm-up.

    Returns:
        samples_per_s; bytes_per_s; first_batch_s, the time to the first batch when the modules are
        imported; and cpu_s_per_1000, the processor time that the reading thread itself spends on
        1000 samples.
    """
    began = time.perf_counter()
    with contextlib.closing(_batches(task, kind, num_workers)) as batches:
        _touch(next(batches))
        first_batch_s = time.perf_counter() - began
        _read(batches, min(WARMUP_S, task["seconds"]))
        num_batches, num_bytes, elapsed_s, cpu_s = _read(batches, task["seconds"])
    num_samples = num_batches * task["batch_size"]
    return {
        "samples_per_s": num_samples / elapsed_s,
        "bytes_per_s": num_bytes / elapsed_s,
        "first_batch_s": first_batch_s,
        "cpu_s_per_1000": cpu_s / num_samples * 1000,
    }


def differing(task: dict[str, Any], kind: str) -> str:
    """Compares Gyre's first batches with the same samples of a map-style opponent.

    Returns:
        The difference: the number of samples, or a field of one name; empty if there is none.
    """
    theirs = samples_of(task, kind)
    if len(theirs) != task["num_samples"]:
        return f"the number of samples, {len(theirs)} as read from here,"
    with contextlib.closing(_batches(task, GYRE, 0)) as batches:
        for _, batch in zip(range(_NUM_COMPARED), batches, strict=False):
            other = theirs.__getitems__(batch["sample_id"].numpy())
            for name in other.keys() & batch.keys():
                rows, offsets = batch[name], batch.get(f"{name}.offsets")
                if offsets is not None:
                    rows = rows.tensor_split(offsets[1:-1])
                if not all(map(_same, rows, other[name])):
                    return f"the field {name!r}"
    return ""


def main() -> None:
    """Runs commands until the standard input ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer = measure(task, *arguments) if command == "measure" else differing(task, *arguments)
        print(json.dumps(answer), flush=True)


def _batches(task: dict[str, Any], kind: str, num_workers: int) -> Any:
    """Yields batches without an end."""
    if kind != GYRE:
        yield from batches_of(task, kind, num_workers)
        return
    # Imported late: the DataLoader's workers are forked, and no thread of gRPC may run then.
    from gyre_client.loader.loader import Loader  # noqa: PLC0415

    names = ("dataset", "batch_size", "seed", "address", "daemon_user", "options")
    more = {"format": task["format"]} if task["is_location"] else {}
    # `stored`: ids of the same dtype as in the files
    with Loader(**{name: task[name] for name in names}, **more, token_dtype="stored") as loader:
        yield from loader.stream()


def _same(row: torch.Tensor, value: Any) -> bool:
    """Whether a sample's field has the bytes of a value, if the value is not parsed."""
    own = row.numpy()
    is_parsed = own.ndim > 0 and np.ndim(value) == 0 and not isinstance(value, str | bytes)
    if value is None or isinstance(value, Mapping) or is_parsed:
        return True
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        value = np.asarray(value).astype(own.dtype).tobytes()
    return bool(own.tobytes() == value)


def _read(batches: Iterator[Batch], duration_s: float) -> tuple[int, int, float, float]:
    """Returns batches, bytes, seconds, and the processor time of this thread inside the loader."""
    num_batches, num_bytes, cpu_s, began = 0, 0, 0.0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < duration_s:
        before_s = time.thread_time()
        batch = next(batches)
        cpu_s += time.thread_time() - before_s
        num_bytes += _touch(batch)
        num_batches += 1
    return num_batches, num_bytes, elapsed_s, cpu_s


def _touch(value: Any) -> int:
    """Reads one element of every cache line of a batch; returns the bytes of its fields."""
    if isinstance(value, Mapping):
        names = (name for name in value if name not in _NO_DATA and not name.endswith(".offsets"))
        return sum(_touch(value[name]) for name in names)
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object):
        return sum(map(_touch, value))
    if isinstance(value, str):
        return len(value)
    data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
    np.ascontiguousarray(data).reshape(-1).view(np.uint8)[::CACHE_LINE_BYTES].sum()
    return data.nbytes


if __name__ == "__main__":
    main()
