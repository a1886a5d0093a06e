"""The process that times loaders for `gyre bench`: `python -m gyre_client.bench.stopwatch`.

The first line of its standard input is the task, and each further line is a command; it answers
each with a line of JSON. A reader touches every cache line of every batch, as a copy to a device
would.
"""

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gyre_client.bench.opponents import GYRE, Batch, batches_of, samples_of

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
