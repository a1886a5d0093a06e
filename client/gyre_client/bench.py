"""`gyre bench`: what Gyre would gain on the user's own data, beside the DataLoader on the same files.

Every loader runs alone, twice, the second time in the opposite order; with the same batch size, a full shuffle, and files that
were read once before. That both sides deliver the same bytes is checked first.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.arguments import MAX_UINT32, MAX_UINT64, whole
from gyre_client.connection import Connection
from gyre_client.errors import DaemonFault, InvalidRequest
from gyre_client.own_files import find_files, scan_tars, token_stride
from gyre_client.report import size, table
from gyre_client.wire import dataset_ref

NUM_CHECKED_BATCHES = 3
MAX_SECONDS = 600.0
GYRE = "gyre"
BAR_CHARS = 30
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Entry:
    """One loader of the comparison.

    Attributes:
        label: For people.
        loader: `gyre`, `plain` or `tuned`.
        num_workers: Of the DataLoader.
    """

    label: str
    loader: str
    num_workers: int = 0


ENTRIES = (
    Entry("Gyre", GYRE),
    Entry("DataLoader, tuned, in process", "tuned"),
    Entry("DataLoader, tuned, 2 workers", "tuned", 2),
    Entry("DataLoader, plain, in process", "plain"),
    Entry("DataLoader, plain, 2 workers", "plain", 2),
)
NOTES = """\
Plain: __getitems__ gives a list of samples, which are collated. Tuned: it reads the whole batch into its tensors at once.
In process: the training thread itself reads; with workers, or Gyre, it goes on meanwhile. THREAD CPU is what that thread
spends on a thousand samples. This measures loading alone: a trainer that is slower than its loader gains nothing from it."""


def compare(connection: Connection, args: argparse.Namespace) -> tuple[Any, str]:
    """Returns what was measured, for programs and for people.

    Raises:
        InvalidRequest: The dataset's files cannot be read from here as the daemon reads them, or make no batch.
    """
    options = dict(args.option)
    batch_size = whole("batch-size", args.batch_size, 1, MAX_UINT32)
    if not 0 < args.seconds <= MAX_SECONDS:
        raise InvalidRequest(f"--seconds must be more than 0 and at most {MAX_SECONDS:.0f}, but is {args.seconds}")
    description = connection.describe(dataset_ref(args.dataset, args.format, options))
    if batch_size > description.num_samples:
        raise InvalidRequest(f"--batch-size is {batch_size}, but the dataset has only {description.num_samples} samples")
    task: dict[str, Any] = {
        "dataset": args.dataset if args.format is None or "://" in args.dataset else str(Path(args.dataset).absolute()),
        "batch_size": batch_size,
        "seconds": args.seconds,
        "seed": whole("seed", args.seed, 0, MAX_UINT64),
        "address": connection.address.text,
        "format": args.format,
        "options": options or None,
    }
    with _prepared(description, options, task) as (scan_s, is_warm), _Stopwatch(task) as own, _Stopwatch(task) as gyre:
        _check(description, gyre, min(NUM_CHECKED_BATCHES, description.num_samples // batch_size))
        rounds = [
            {entry: _measured(gyre if entry.loader == GYRE else own, entry) for entry in order}
            for order in (ENTRIES, ENTRIES[::-1])
        ]
    _say("")
    medians = {
        entry: {key: statistics.median(results[entry][key] for results in rounds) for key in rounds[0][entry]}
        for entry in ENTRIES
    }
    facts = {
        "num_samples": description.num_samples,
        "num_bytes": description.num_bytes,
        "batch_size": batch_size,
        "seconds": args.seconds,
        "files_were_cached": is_warm,
        "header_scan_s": scan_s,
    }
    value = facts | {"loaders": [dataclasses.asdict(entry) | medians[entry] for entry in ENTRIES]}
    return value, _text(description, facts, medians)


class _Stopwatch:
    """A process that reads and measures. Gyre and the DataLoader have one each: workers are forked, where no gRPC may be."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  (its standard error; ends with it)
        command, pipe = [sys.executable, "-m", "gyre_client.stopwatch"], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._words, text=True)

    def __enter__(self) -> Self:
        self._say(self._task)
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._process.kill()
        self._process.communicate()
        self._words.close()

    def ask(self, *command: object) -> Any:
        """Returns what it answers.

        Raises:
            DaemonFault: It failed; the message has its last words.
        """
        assert self._process.stdout
        self._say(command)
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip().splitlines()
        raise DaemonFault(f"the comparison stopped: {words[-1] if words else 'without a word'}")

    def _say(self, what: object) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # `ask` finds out why
            print(json.dumps(what), file=self._process.stdin, flush=True)


def _check(description: pb.DatasetDescription, gyre: _Stopwatch, num_batches: int) -> None:
    """Both sides read the same.

    Raises:
        InvalidRequest: They do not.
    """
    _say("comparing batches")
    field = gyre.ask("differing", num_batches)
    if field:
        raise InvalidRequest(
            f"the files at {description.uri} do not hold what the daemon serves: the field {field!r} differs, so they cannot "
            "be compared"
        )


@contextmanager
def _prepared(
    description: pb.DatasetDescription, options: Mapping[str, Any], task: dict[str, Any]
) -> Iterator[tuple[float, bool]]:
    """The files are found and `task` says where; gives how long the index took, and whether they are in the page cache."""
    files = find_files(description)
    fields = [(field.name, field.dtype, list(field.shape), field.ragged) for field in description.fields]
    task |= {"files": [str(file) for file in files], "fields": fields, "stride": 0, "places": ""}
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        folder, scan_s = Path(name), 0.0
        if description.format == "tokens":
            header_bytes = task["header_bytes"] = options.get("header_bytes")
            task["stride"] = token_stride(description, files, int(options.get("stride", 0)), header_bytes)
        else:
            _say("reading the headers of the shards")
            began = time.perf_counter()
            places = scan_tars(files, [field.name for field in description.fields])
            scan_s = time.perf_counter() - began
            if len(places.shard) != description.num_samples:
                raise InvalidRequest(
                    f"{description.uri} has {len(places.shard)} samples as read from here, but the daemon serves "
                    f"{description.num_samples}: they must be the same to be compared"
                )
            task["places"] = str(folder / "places.npz")
            np.savez(folder / "places.npz", shard=places.shard, start=places.start, size=places.size)
        yield scan_s, _warm(files, description.num_bytes)


def _warm(files: list[Path], num_bytes: int) -> bool:
    """Whether the files fit into the page cache; if so, they are there."""
    if num_bytes > _available_bytes() // 2:
        return False
    _say("reading the files once")
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
    return True


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _measured(stopwatch: _Stopwatch, entry: Entry) -> dict[str, float]:
    _say(f"measuring {entry.label}")
    result: dict[str, float] = stopwatch.ask("measure", entry.loader, entry.num_workers)
    return result


def _text(description: pb.DatasetDescription, facts: Mapping[str, Any], medians: Mapping[Entry, Mapping[str, float]]) -> str:
    cache = "read once before" if facts["files_were_cached"] else "larger than the page cache, so the disk is measured too"
    head = (
        f"{description.uri}: {description.num_samples:,} samples, {size(description.num_bytes)}, {description.format}; "
        f"batches of {facts['batch_size']}, full shuffle.\n"
        f"Files {cache}. Each loader ran alone, twice {facts['seconds']:g} s; medians. {NUM_CHECKED_BATCHES} batches were "
        "compared first: same bytes."
    )
    if facts["header_scan_s"]:
        head += (
            f"\nThe DataLoader first had to read the headers of all shards, {facts['header_scan_s']:.1f} s, not counted below."
        )
    fastest = max(its["samples_per_s"] for its in medians.values())
    rows = [
        (
            entry.label,
            f"{its['samples_per_s']:,.0f}",
            f"{size(its['bytes_per_s'])}/s",
            f"{its['first_batch_s']:.3f} s",
            f"{its['cpu_s_per_1000'] * 1e3:.2f} ms",
            "█" * max(1, round(BAR_CHARS * its["samples_per_s"] / fastest)),
        )
        for entry, its in medians.items()
    ]
    columns = table(("LOADER", "SAMPLES/S", "DATA", "FIRST BATCH", "THREAD CPU", ""), rows)
    return f"{head}\n\n{columns}\n\n{_sentence(medians)}\n\n{NOTES}"


def _sentence(medians: Mapping[Entry, Mapping[str, float]]) -> str:
    """What it comes to."""
    gyre = medians[ENTRIES[0]]["samples_per_s"]
    parts = []
    for form in ("plain", "tuned"):
        best = max((entry for entry in medians if entry.loader == form), key=lambda entry: medians[entry]["samples_per_s"])
        ratio = gyre / medians[best]["samples_per_s"]
        where = "in process" if not best.num_workers else f"with {best.num_workers} workers"
        parts.append(f"{ratio:.2f} times those of the {form} DataLoader at its best ({where})")
    return f"Gyre's samples/s are {parts[0]},\nand {parts[1]}."


def _say(line: str) -> None:
    """`line` stands in the terminal's last line, if there is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
