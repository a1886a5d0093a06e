"""Targets that take a whole shard: what a scan finds lies in the shard and passes its own check."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats.base import Scan
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from gyre_daemon.datasets.known_formats import make_format
from gyre_daemon.errors import GyreError
from gyre_daemon.storage.shard import Shard

# Parquet is not among them: pyarrow reads its footer, and some damage makes it abort the process.
# The daemon lives on, since a scan has a process of its own; see `tests/bad_inputs`.
_NAMES = ("csv", "tsv", "jsonl", "mds", "tfrecord", "arrow", "arrayrecord")


def _scan(name: str, data: bytes) -> None:
    made: Any = make_format("x", DatasetConfig("/x", name))
    scan = made.inspection
    assert isinstance(scan, Scan)
    try:
        arrays = scan.run("a", io.BytesIO(data))
    except GyreError:
        return
    scan.check(arrays, len(data))
    assert scan.num_samples(arrays) >= 0
    try:
        index = made.assemble([Shard("a", len(data), "")], [arrays])
    except GyreError:
        return
    if chunks := chunks_of(index):  # its samples are decoded, and lie in no bytes of the shard
        for chunk in range(chunks.num_chunks):
            assert all(0 <= start <= stop <= len(data) for start, stop in chunks.pieces(chunk))
        return
    extents = index.locate(np.arange(index.num_samples))
    assert (extents.start >= 0).all()
    assert (extents.start + extents.size <= len(data)).all()


def _target(name: str) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        _scan(name, data)

    return target


TARGETS = {name: _target(name) for name in _NAMES}
