"""Reads manifests of single files.

One that is parsed at once, as JSON is, would keep the daemon's interpreter for seconds: 5.5 s for
460 MB of annotations. So a process that scans reads it; see `server`.
"""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, Scan
from gyre_daemon.datasets.formats.listed import Manifest, ManifestColumn, ManifestFormat
from gyre_daemon.datasets.indexing.scans.processes import ScanProcesses
from gyre_daemon.datasets.indexing.scans.scanner import Scanner
from gyre_daemon.datasets.indexing.shard_files import read_ranges
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.file_table import Texts

_AT_ONCE = 2  # each may take what one process may


class ManifestReader:
    """Reads the manifests of all datasets of a daemon."""

    def __init__(
        self, threads: Executor, processes: ScanProcesses, options: EndpointOptions
    ) -> None:
        """See `Scanner`."""
        self._threads, self._processes, self._options = threads, processes, options
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def read(
        self, listed: ManifestFormat, storage: Storage, settings: Mapping[str, Any]
    ) -> Manifest:
        """The manifest that is the only shard of a storage.

        Raises:
            CorruptSample: it is damaged, or takes too much memory.
            ConfigError: it lacks columns.
            GyreError: it cannot be read.
        """
        if not listed.reads_apart:
            shard = storage.shards[0]
            (data,) = await read_ranges(storage, [0], [0], [shard.size_bytes])
            return await asyncio.to_thread(listed.read_manifest, shard.name, data)
        scanner = Scanner(self._threads, self._processes, None, self._options)
        scan = Scan("manifest", partial(_run, listed), lambda _: 0, lambda *_: None)
        try:
            async with self._turns:
                arrays = await scanner.scan(scan, storage, 0, settings)
        finally:
            scanner.kill()
        try:
            return await asyncio.to_thread(_from_arrays, arrays)
        except (KeyError, ValueError, TypeError) as error:
            name, reason = storage.shards[0].name, "the process that read it has failed"
            raise CorruptSample(
                f"the manifest {name}: {reason}", {"shard": name, "reason": reason}
            ) from error


def _run(listed: ManifestFormat, name: str, file: BinaryIO) -> Arrays:
    return _as_arrays(listed.read_manifest(name, file.read()))


def _as_arrays(manifest: Manifest) -> Arrays:
    columns = manifest.columns
    about = [[column.name, column.kind, column.categories] for column in columns]
    arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    values = [manifest.names, *(column.values for column in columns)]
    for number, each in enumerate(values):
        if isinstance(each, Texts):
            arrays[f"data{number}"] = np.frombuffer(each.data, np.uint8)
            arrays[f"ends{number}"] = each.ends
        else:
            arrays[f"values{number}"] = each
    return arrays


def _from_arrays(arrays: Arrays) -> Manifest:
    names = _texts(arrays, 0)
    columns = []
    about = json.loads(arrays["about"].tobytes())
    for number, (name, kind, categories) in enumerate(about, 1):
        is_text = f"ends{number}" in arrays
        values = _texts(arrays, number) if is_text else arrays[f"values{number}"]
        if len(values) != len(names):
            raise ValueError(f"the column {name} has {len(values)} values")
        columns.append(ManifestColumn(name, kind, values, tuple(categories)))
    return Manifest(names, tuple(columns))


def _texts(arrays: Arrays, number: int) -> Texts:
    data, ends = arrays[f"data{number}"].tobytes(), arrays[f"ends{number}"]
    if ends[0] != 0 or ends[-1] != len(data) or (np.diff(ends) < 0).any():
        raise ValueError("texts are not where they are said to be")
    return Texts(data, ends)
