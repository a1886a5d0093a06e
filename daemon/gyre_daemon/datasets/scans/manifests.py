"""Reads manifests of single files.

One that is parsed at once, as JSON is, would keep the daemon's interpreter for seconds: 5.5 s for
460 MB of annotations. Labels of many images are parsed in Python, which takes turns of it from all
others as long. So a process that scans does that; see `server`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import Arrays, Scan
from gyre_daemon.datasets.formats.listed import (
    Described,
    DescribedFormat,
    Manifest,
    ManifestColumn,
    ManifestFormat,
)
from gyre_daemon.datasets.scans.processes import ScanProcesses
from gyre_daemon.datasets.scans.scanner import Scanner
from gyre_daemon.errors import CorruptSample
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.file_table import Texts
from gyre_daemon.storage.opening.shard_files import read_ranges

_AT_ONCE = 2  # each may take the memory of one process
_LABELS, _TEXTS_AT_ONCE = "labels", 1000


class ManifestReader:
    """Reads the manifests of all datasets of a daemon."""

    def __init__(self, processes: ScanProcesses) -> None:
        """See `Scanner`."""
        self._processes = processes
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def read(self, listed: ManifestFormat, storage: Storage) -> Manifest:
        """The manifest, the only shard of a storage.

        Raises:
            CorruptSample: it is damaged, or takes too much memory.
            ConfigError: it lacks columns.
            GyreError: it cannot be read.
        """
        if not listed.reads_apart:
            shard = storage.shards[0]
            (data,) = await read_ranges(storage, [0], [0], [shard.size_bytes])
            return await compute(listed.read_manifest, shard.name, data)
        scanner = Scanner(self._processes)
        scan = Scan("manifest", partial(_run, listed), lambda _: 0, lambda *_: None)
        try:
            async with self._turns:
                arrays = await scanner.scan(scan, storage, 0)
        finally:
            scanner.kill()
        return await _received(storage.shards[0].name, arrays)

    async def parse(
        self, listed: DescribedFormat, described: Described, texts: Sequence[bytes]
    ) -> Manifest:
        """The manifest that the texts of samples make.

        Args:
            listed: the format.
            described: the n samples.
            texts: n, see `DescribedFormat.manifest`.

        Raises:
            CorruptSample: one is damaged, or they take too much memory.
        """
        sizes = np.array([len(text) for text in texts], np.int64)
        run = partial(_run_described, listed, described, sizes)
        async with self._turns:
            process = await self._processes.start()
            try:
                arrays = await process.scan_stream(run, _LABELS, _portions(texts))
            finally:
                process.kill()
        return await _received(_LABELS, arrays)


async def _portions(texts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        yield b"".join(texts[begin : begin + _TEXTS_AT_ONCE])


def _run_described(
    listed: DescribedFormat,
    described: Described,
    sizes: npt.NDArray[np.int64],
    name: str,
    file: BinaryIO,
) -> Arrays:
    texts = Texts.joined([file.read()], sizes)
    return _as_arrays(listed.manifest(described, [texts[row] for row in range(len(texts))]))


async def _received(name: str, arrays: Arrays) -> Manifest:
    try:
        return await compute(_from_arrays, arrays)
    except (KeyError, ValueError, TypeError) as error:
        reason = "the process that read it has failed"
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
