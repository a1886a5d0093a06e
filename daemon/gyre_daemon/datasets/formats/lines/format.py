"""The options of `text` and `jsonl`, and the index of all their shards."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, cast

import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    DamagedSample,
    FieldSpec,
    SampleIndex,
    Scan,
)
from gyre_daemon.datasets.formats.chunks import (
    check_chunks,
    fields_of,
    num_rows,
    refuse_damaged,
)
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkIndex
from gyre_daemon.datasets.formats.indexes.stored import check_extents
from gyre_daemon.datasets.formats.indexes.table import SampleTable
from gyre_daemon.datasets.formats.indexes.union_index import assemble_union
from gyre_daemon.datasets.formats.lines.columns import ColumnsDecoder, JsonColumns
from gyre_daemon.datasets.formats.lines.frames import LineFrames
from gyre_daemon.datasets.formats.lines.scan import scan_lines
from gyre_daemon.datasets.formats.lines.values import TYPES, TypeName
from gyre_daemon.datasets.formats.names import renamed
from gyre_daemon.datasets.formats.schemas import SchemaOptions
from gyre_daemon.datasets.formats.values import check_json, check_text
from gyre_daemon.datasets.formats.zstd import recognised
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

_UINT8 = np.dtype(np.uint8)
_NOUN = "block of lines"


@dataclass(frozen=True, slots=True)
class LinesOptions:
    """The keys of a `text` dataset: none."""


@dataclass(frozen=True, slots=True)
class JsonlOptions(SchemaOptions):
    """The keys of a `jsonl` dataset.

    Attributes:
        columns: keys of the objects to serve, such as `text`, or `label=class` to serve the key
            `class` under the name `label`; `*` alone for all. Empty to serve the documents.
        types: of columns by their keys, where their values do not say: `int64`, `float64`, `bool`,
            `text` or `json`.
    """

    columns: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse columns that no batch can have.

        Raises:
            ConfigError: says why.
        """
        SchemaOptions.__post_init__(self)
        renamed(self.columns, "columns")
        if "*" in self.columns and len(self.columns) > 1:
            raise ConfigError('`columns` has "*" and names; "*" alone serves all keys')
        if not self.columns and (self.types or self.schema == "union"):
            raise ConfigError(
                '`types` and `schema` are of columns; name some in `columns`, or `["*"]`'
            )
        for name, column_type in self.types.items():
            if column_type not in TYPES:
                raise ConfigError(
                    f"the type of column {name!r:.100} is {column_type!r:.100}; it must be one of "
                    f"{', '.join(TYPES)}"
                )

    @property
    def wanted(self) -> JsonColumns:
        """The columns that are chosen."""
        pairs = () if self.columns == ("*",) else tuple(renamed(self.columns, "columns"))
        types = tuple((name, cast("TypeName", kind)) for name, kind in self.types.items())
        return JsonColumns(pairs, types, may_lack=self.schema == "union")


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
            return ChunkIndex(shards, inspected, self._frames, _NOUN, identity)
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
        except ConfigError:
            raise
        except ValueError as error:
            facts = {"shard": shard, "reason": str(error)}
            raise CorruptSample(f"shard {shard}: {error}", facts) from error

    def _scan(self, shard: str, file: BinaryIO) -> Arrays:
        return scan_lines(file, partial(_check_first, shard, self._check_line))

    def _check_line(self, line: bytes) -> None:
        check_text(line)


class JsonlFormat(TextFormat):
    """A `Format`: every line of a file is one JSON document; empty lines are none.

    A sample is the document, or the values of some keys.
    """

    pattern = "*.{jsonl,ndjson,jsonl.gz,ndjson.gz,jsonl.zst,ndjson.zst}"
    _field = FieldSpec("json", _UINT8, (), ragged=True, codec="json")
    _keeps_empty = False

    def __init__(self, options: JsonlOptions) -> None:
        """Keep what was chosen."""
        self._options = options

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        if not self._options.columns:
            return super().inspection
        wanted = self._options.wanted
        return Scan(f"json-columns/2 {wanted}", wanted, num_rows, check_chunks)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        if not self._options.columns:
            return super().assemble(shards, inspected)
        refuse_damaged(shards, inspected, _NOUN)
        return self._of_columns(shards, inspected)

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleIndex, Sequence[DamagedSample]]:
        """See `TolerantFormat`: of columns, all lines of a block that cannot be parsed.

        They are found when all blocks are tried.
        """
        if not self._options.columns:
            return super().assemble(shards, inspected), ()
        return self._of_columns(shards, inspected), ()

    def _of_columns(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        pairs = self._options.wanted.pairs
        return assemble_union(
            self._options,
            [name for name, _ in pairs],
            shards,
            inspected,
            lambda scan: scan["fields"].tobytes(),
            num_rows,
            lambda some, scans: _index_of_columns(dict(pairs), some, scans),
        )

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


def _index_of_columns(
    keys: Mapping[str, str], shards: Sequence[Shard], inspected: Sequence[Arrays]
) -> ChunkIndex:
    """The index of shards that have the same columns.

    Args:
        keys: of the objects, by the names of their fields; a field without one has its key's name.
        shards: of the dataset.
        inspected: of each.
    """
    specs = next((fields_of(scan) for scan in inspected if num_rows(scan)), [])
    decode = ColumnsDecoder(tuple(specs), tuple(keys.get(spec.name, spec.name) for spec in specs))
    return ChunkIndex(shards, inspected, decode, _NOUN, f"json columns {decode.keys}".encode())


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
