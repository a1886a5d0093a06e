"""The options of `text` and `jsonl`, and the index of all their shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, FieldSpec, Scan
from gyre_daemon.datasets.formats.lines.scan import scan_lines
from gyre_daemon.datasets.formats.stored import check_extents
from gyre_daemon.datasets.formats.table import SampleTable
from gyre_daemon.datasets.formats.values import check_json, check_text
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.shard import Shard

_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class LinesOptions:
    """The keys of a `text` or `jsonl` dataset: none."""


class TextFormat:
    """A `Format`: every line of a text file is a sample, empty lines included."""

    pattern = "*.{txt,text,txt.gz,text.gz}"
    unpacks_gzip = True
    _field = FieldSpec("text", _UINT8, (), ragged=True, codec="text")

    def __init__(self, options: LinesOptions) -> None:
        """There is nothing to choose."""

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        return Scan(
            f"{self._field.name}-lines/1",
            self._scan,
            lambda scan: len(scan["size"]),
            check_extents,
        )

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleTable:
        """See `Format.assemble`."""
        nothing = np.empty(0, np.int64)
        return SampleTable(
            [self._field],
            [len(scan["size"]) for scan in inspected],
            np.concatenate([nothing, *(scan["start"] for scan in inspected)])[:, None],
            np.concatenate([nothing, *(scan["size"] for scan in inspected)])[:, None],
            identity=f"{self._field.name} lines".encode(),
        )

    def _scan(self, shard: str, file: BinaryIO) -> Arrays:
        return scan_lines(file, lambda line: _check_first(shard, check_text, line))


class JsonlFormat(TextFormat):
    """A `Format`: every line of a file is one JSON document; empty lines are none."""

    pattern = "*.{jsonl,ndjson,jsonl.gz,ndjson.gz}"
    _field = FieldSpec("json", _UINT8, (), ragged=True, codec="json")

    def _scan(self, shard: str, file: BinaryIO) -> Arrays:
        scan = scan_lines(file, lambda line: _check_first(shard, check_json, line))
        is_document = scan["size"] > 0
        return {name: values[is_document] for name, values in scan.items()}


def _check_first(shard: str, check: Callable[[bytes], None], line: bytes) -> None:
    """Refuse a file whose first line is nothing that this format serves."""
    try:
        if line:
            check(line)
    except ValueError as error:
        reason = f"its first line is not what the format says: {error}"
        facts = {"shard": shard, "offset": 0, "reason": reason}
        raise CorruptSample(f"shard {shard}: {reason}", facts) from error
