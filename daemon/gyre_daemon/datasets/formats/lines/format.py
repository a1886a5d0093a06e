"""The options of `text` and `jsonl`, and the index of all their shards."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, FieldSpec, SampleIndex, Scan
from gyre_daemon.datasets.formats.chunks import check_chunks, num_rows
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkIndex
from gyre_daemon.datasets.formats.indexes.stored import check_extents
from gyre_daemon.datasets.formats.indexes.table import SampleTable
from gyre_daemon.datasets.formats.lines.frames import LineFrames
from gyre_daemon.datasets.formats.lines.scan import scan_lines
from gyre_daemon.datasets.formats.values import check_json, check_text
from gyre_daemon.datasets.formats.zstd import recognised
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class LinesOptions:
    """The keys of a `text` or `jsonl` dataset: none."""


class TextFormat:
    """A `Format`: every line of a text file is a sample, empty lines included."""

    pattern = "*.{txt,text,txt.gz,text.gz,txt.zst,text.zst}"
    unpacks_gzip = True
    _field = FieldSpec("text", _UINT8, (), ragged=True, codec="text")
    _keeps_empty = True

    def __init__(self, options: LinesOptions) -> None:
        """There is nothing to choose."""

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        return Scan(f"{self._field.name}-lines/1", self._scan_any, _num_samples, _check)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        pairs = zip(shards, inspected, strict=True)
        compressed = [shard.name for shard, scan in pairs if "rows" in scan]
        if len(compressed) == len(shards):
            identity = f"{self._field.name} lines".encode()
            return ChunkIndex(shards, inspected, self._frames, "block of lines", identity)
        if compressed:
            raise ConfigError(
                f"some shards are compressed with zstd, such as {compressed[0]}, and some are not; "
                "compress all of them or none, or name those that are meant"
            )
        nothing = np.empty(0, np.int64)
        return SampleTable(
            [self._field],
            [len(scan["size"]) for scan in inspected],
            np.concatenate([nothing, *(scan["start"] for scan in inspected)])[:, None],
            np.concatenate([nothing, *(scan["size"] for scan in inspected)])[:, None],
            identity=f"{self._field.name} lines".encode(),
        )

    @property
    def _frames(self) -> LineFrames:
        return LineFrames(self._field, self._keeps_empty)

    def _scan_any(self, shard: str, file: BinaryIO) -> Arrays:
        try:
            with recognised(shard, file) as (opened, is_compressed):
                if not is_compressed:
                    return self._scan(shard, opened)
                return self._frames.scan(opened, partial(_check_first, shard, self._check_line))
        except ValueError as error:
            facts = {"shard": shard, "reason": str(error)}
            raise CorruptSample(f"shard {shard}: {error}", facts) from error

    def _scan(self, shard: str, file: BinaryIO) -> Arrays:
        return scan_lines(file, partial(_check_first, shard, self._check_line))

    def _check_line(self, line: bytes) -> None:
        check_text(line)


class JsonlFormat(TextFormat):
    """A `Format`: every line of a file is one JSON document; empty lines are none."""

    pattern = "*.{jsonl,ndjson,jsonl.gz,ndjson.gz,jsonl.zst,ndjson.zst}"
    _field = FieldSpec("json", _UINT8, (), ragged=True, codec="json")
    _keeps_empty = False

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: an object whose first key stands in the same line."""
        return re.match(rb'(?:\xef\xbb\xbf)?\{[ \t]*"', head) is not None

    def _check_line(self, line: bytes) -> None:
        check_json(line)

    def _scan(self, shard: str, file: BinaryIO) -> Arrays:
        scan = super()._scan(shard, file)
        is_document = scan["size"] > 0
        return {name: values[is_document] for name, values in scan.items()}


def _num_samples(scan: Arrays) -> int:
    return num_rows(scan) if "rows" in scan else len(scan["size"])


def _check(scan: Arrays, file_bytes: int) -> None:
    """See `Scan.check`."""
    check = check_chunks if "rows" in scan else check_extents
    check(scan, file_bytes)


def _check_first(shard: str, check: Callable[[bytes], None], line: bytes) -> None:
    """Refuse a file whose first line is nothing that this format serves."""
    try:
        if line:
            check(line)
    except ValueError as error:
        reason = f"its first line is not what the format says: {error}"
        facts = {"shard": shard, "offset": 0, "reason": reason}
        raise CorruptSample(f"shard {shard}: {reason}", facts) from error
