"""Converts a dataset in parts: each is a file of successive samples."""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client import __version__
from gyre_client.errors import InvalidRequest
from gyre_client.prepare.units import Daemons, UnitFolder, opened, run_units, write_whole
from gyre_client.prepare.writers import WRITERS, Column, columns_of, read_range
from gyre_client.transport.connection import Connection

_FILES = "files"
Show = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A dataset and the form to write it in.

    Attributes:
        dataset: The dataset, as requests name it.
        transforms: Applied to its samples; None for those of its definition.
        kind: One of `WRITERS`.
        names: The columns to write; empty for all.
        samples_per_shard: The most samples in a file.
        dtype: Of the ids in token files; empty for the column's own.
    """

    dataset: pb.DatasetRef
    transforms: pb.TransformList | None
    kind: str
    names: Sequence[str] = ()
    samples_per_shard: int = 10_000
    dtype: str = ""

    def request(self, first: int, stop: int) -> pb.ReadSamplesRequest:
        """Returns the request for some of the samples."""
        return pb.ReadSamplesRequest(
            dataset=self.dataset, transforms=self.transforms, first=first, stop=stop
        )


@dataclass(frozen=True, slots=True)
class Part:
    """The samples `[first, stop)`, which go into one file; see `units.Unit`.

    Attributes:
        number: Of the part.
        first: Its first sample.
        stop: Behind its last sample.
        conversion: Which it belongs to.
        fingerprint: Of the dataset.
        transforms: The identity of the transforms.
        folder: Where the file goes, on all nodes.
    """

    number: int
    first: int
    stop: int
    conversion: Conversion
    fingerprint: str
    transforms: str
    folder: Path

    def run(self, connection: Connection, advance: Callable[[int, int], None]) -> dict[str, Any]:
        """Writes the file, whole or not at all; a second time with the same bytes."""
        conversion = self.conversion
        found = read_range(connection, conversion.request(self.first, self.stop))
        if (found.description.fingerprint, found.transforms) != (self.fingerprint, self.transforms):
            raise InvalidRequest("the dataset has changed while it was being converted; try again")
        columns = chosen(columns_of(found.description), conversion.names)
        unfinished = self.folder / f"unfinished-{secrets.token_hex(6)}"
        writer = WRITERS[conversion.kind](unfinished, self.number, columns, conversion.dtype)
        num_samples = num_elements = 0
        about: Any = None
        try:
            unfinished.mkdir()
            with contextlib.ExitStack() as closing:
                for arrays in found.batches:
                    if not num_samples:
                        closing.callback(_ignoring_errors, writer.close)
                    writer.write(arrays)
                    size = len(arrays["sample_id"])
                    elements = sum(arrays[column.name].size for column in columns)
                    num_samples, num_elements = num_samples + size, num_elements + elements
                    advance(size, elements)
                closing.pop_all()
            if num_samples:
                about = writer.close()
            files = sorted(unfinished.iterdir())
            num_bytes = sum(map(_synced, files))
            for path in files:
                path.rename(self.folder / _FILES / path.name)
        except OSError as error:
            raise InvalidRequest(
                f"{self.folder} cannot be written: {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        result = {"samples": num_samples, "elements": num_elements, "bytes": num_bytes}
        return {**result, "files": [path.name for path in files], "about": about}


def convert_dataset(
    connection: Connection,
    conversion: Conversion,
    target: Path,
    engine: str,
    daemons: Daemons,
    show: Show,
) -> dict[str, int]:
    """Writes a dataset into a new folder, which appears once everything is written.

    Until then the files are in `unfinished_folder(target)`. After an error or a kill, the same call
    goes on there.

    Args:
        connection: To the daemon of this process.
        conversion: The dataset and its new form.
        target: The folder, which must not exist.
        engine: See `units.opened`.
        daemons: See `run_units`.
        show: Is told how many samples are written, how many there are, and how many elements come
            a second.

    Returns:
        The numbers of `samples`, `elements`, `files` and `bytes`.

    Raises:
        InvalidRequest: The folder exists or cannot be made, or the format cannot hold the columns.
        NotInstalled: The format's writer is missing.
    """
    found = read_range(connection, conversion.request(0, 0))
    description = found.description
    columns = chosen(columns_of(description), conversion.names)
    WRITERS[conversion.kind](target, 0, columns, conversion.dtype)  # refuses columns; makes nothing
    if target.exists() or target.is_symlink():
        raise InvalidRequest(f"{target} exists already; name a folder that does not")
    job = {
        "dataset": description.fingerprint,
        "transforms": found.transforms,
        "format": conversion.kind,
        "columns": [column.name for column in columns],
        "samples-per-shard": conversion.samples_per_shard,
        "dtype": conversion.dtype,
        "gyre": __version__,
    }
    step, num_samples = conversion.samples_per_shard, description.num_samples
    with UnitFolder(unfinished_folder(target), job) as folder:
        parts = [
            Part(
                number,
                first,
                min(first + step, num_samples),
                conversion,
                description.fingerprint,
                found.transforms,
                folder.path,
            )
            for number, first in enumerate(range(0, num_samples, step))
        ]
        (folder.path / _FILES).mkdir(exist_ok=True)
        for abandoned in folder.path.glob("unfinished-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        num_done = sum(each["samples"] for each in folder.results().values())
        num_elements, began_s = 0, time.monotonic()

        def advance(more_samples: int, more_elements: int) -> None:
            nonlocal num_done, num_elements
            num_done, num_elements = num_done + more_samples, num_elements + more_elements
            elapsed_s = max(time.monotonic() - began_s, 1e-9)
            show(num_done, num_samples, num_elements / elapsed_s)

        with opened(engine) as doing:
            run_units(parts, folder, doing, connection, daemons, advance)
        return _finished(folder, len(parts), conversion.kind, target)


def _finished(folder: UnitFolder, num_parts: int, kind: str, target: Path) -> dict[str, int]:
    """Moves the files to where they belong, and returns their numbers."""
    results, files = folder.results(), folder.path / _FILES
    wanted = {name for result in results.values() for name in result["files"]}
    if len(results) != num_parts or wanted != {path.name for path in files.iterdir()}:
        raise InvalidRequest(
            f"{folder.path} lacks files that were written. Remove it, and begin anew"
        )
    about = [results[number]["about"] for number in sorted(results) if results[number]["files"]]
    if text := WRITERS[kind].index(about):
        write_whole(files / "index.json", text)
    _synced(files)
    files.rename(target)
    _synced(target.parent)
    folder.remove()
    sums = {key: sum(each[key] for each in results.values()) for key in ("samples", "elements")}
    paths = [path for path in target.rglob("*") if path.is_file()]
    return {**sums, "files": len(paths), "bytes": sum(path.stat().st_size for path in paths)}


def unfinished_folder(target: Path) -> Path:
    """Returns where the parts of a conversion are until all are there."""
    absolute = target.absolute()
    return absolute.with_name(f".{absolute.name}.unfinished")


def chosen(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """Returns the columns of these names; all if there are none.

    Raises:
        InvalidRequest: There is no such column.
    """
    by_name = {column.name: column for column in columns}
    for name in names:
        if name not in by_name:
            raise InvalidRequest(
                f"there is no column {name!r}; the dataset has {', '.join(by_name)}"
            )
    return [by_name[name] for name in names] if names else list(columns)


def _ignoring_errors(close: Callable[[], object]) -> None:
    """Closes a file to throw it away, after an error."""
    with contextlib.suppress(Exception):
        close()


def _synced(path: Path) -> int:
    """Waits until a file or folder is on the disk, and returns its size."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
