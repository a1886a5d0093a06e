"""Converts a dataset: all of it or nothing."""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.convert.rows import Column, columns_of, rows_of
from gyre_client.convert.writers import WRITERS
from gyre_client.errors import InvalidRequest


def convert_dataset(
    description: pb.DatasetDescription,
    source: Mapping[str, Any],
    target: Path,
    kind: str,
    names: Sequence[str],
    samples_per_shard: int,
    show: Callable[[int, int], None],
) -> int:
    """Writes a dataset into a new folder, and returns how many samples it wrote.

    The folder appears once everything is written; after an error, partial output is removed.

    Args:
        description: The dataset's description.
        source: How a `Loader` finds it.
        target: The folder, which must not exist.
        kind: One of `WRITERS`.
        names: The columns to write; empty for all.
        samples_per_shard: The most in one file, where the format's writer lets one choose.
        show: Is told how many samples were written, and how many there are.

    Raises:
        InvalidRequest: The folder exists or cannot be made, or the format cannot hold the columns.
        NotInstalled: The format's writer is missing.
    """
    columns = _chosen(columns_of(description), names)
    if target.exists() or target.is_symlink():
        raise InvalidRequest(f"{target} exists already; name a folder that does not")
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(6)}.unfinished")
    num_written = 0
    try:
        unfinished.mkdir(parents=True)
        writer = WRITERS[kind](unfinished, columns, samples_per_shard)
        for row in rows_of(description, columns, source):
            writer.write(row)
            num_written += 1
            show(num_written, description.num_samples)
        writer.close()
        _sync(unfinished)
        unfinished.rename(target)
    except OSError as error:
        raise InvalidRequest(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return num_written


def _chosen(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    by_name = {column.name: column for column in columns}
    for name in names:
        if name not in by_name:
            raise InvalidRequest(
                f"there is no column {name!r}; the dataset has {', '.join(by_name)}"
            )
    return [by_name[name] for name in names] if names else list(columns)


def _sync(folder: Path) -> None:
    """Waits until all files of a folder are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
