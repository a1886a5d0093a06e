"""The options of `csv` and `tsv`, and the index of all their shards."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import (
    PRESENT_SUFFIX,
    Arrays,
    CodecName,
    FieldSpec,
    SampleIndex,
    Scan,
    array_of,
)
from gyre_daemon.datasets.formats.delimited.scan import MalformedTable, scan_table
from gyre_daemon.datasets.formats.indexes.stored import check_columns, json_of
from gyre_daemon.datasets.formats.indexes.table import SampleTable
from gyre_daemon.datasets.formats.indexes.union_index import assemble_union
from gyre_daemon.datasets.formats.names import check_names, renamed
from gyre_daemon.datasets.formats.schemas import SchemaOptions, known_columns
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

_BOOL = np.dtype(np.bool_)
_STORED: Mapping[str, tuple[str, CodecName]] = {
    "int64": ("<i8", "integer"),
    "float64": ("<f8", "number"),
}


@dataclass(frozen=True, slots=True)
class DelimitedOptions(SchemaOptions):
    """The keys of a `csv` or `tsv` dataset.

    Attributes:
        columns: names of the columns to serve, such as `text`, or `label=class` to serve the column
            `class` under the name `label`; empty for all.
        types: of columns with numbers, by the name in the file: `int64` or `float64`.
        names: of the columns, if the files do not begin with them.
        delimiter: one character of ASCII; empty for a comma, or for `tsv` a tab.
    """

    columns: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    delimiter: str = ""

    def __post_init__(self) -> None:
        """Reject options that fit no table."""
        SchemaOptions.__post_init__(self)
        if self.delimiter and (len(self.delimiter) > 1 or self.delimiter in '"\r\n\0'):
            raise ConfigError("`delimiter` must be one character, and no quote or end of a line")
        if not self.delimiter.isascii():
            raise ConfigError("`delimiter` must be a character of ASCII")
        renamed(self.columns, "columns")
        for name, column_type in self.types.items():
            if column_type not in ("text", *_STORED):
                raise ConfigError(
                    f"the type of column {name!r:.100} is {column_type!r:.100}; it must be one of "
                    f"text, {', '.join(_STORED)}"
                )


class CsvFormat:
    """A `Format` that reads each file once to find its cells."""

    pattern = "*.{csv,csv.gz}"
    unpacks_gzip = True
    _usual_delimiter = ","

    def __init__(self, options: DelimitedOptions) -> None:
        self._options = options
        self._delimiter = options.delimiter or self._usual_delimiter

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        kind = json.dumps([self._delimiter, self._options.names])
        return Scan(f"delimited/1 {kind}", self._scan, lambda scan: len(scan["size"]), _check)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        known = {name for scan in inspected for name in json.loads(scan["names"].tobytes())}
        for column in self._options.types:
            if known and column not in known:
                raise ConfigError(
                    f"there is no column {column!r:.100}, which `types` has; the files have "
                    f"{', '.join(sorted(known)):.1000}"
                )
        return assemble_union(
            self._options,
            [field for field, _ in renamed(self._options.columns, "columns")],
            shards,
            inspected,
            lambda scan: bytes(scan["names"]),
            lambda scan: len(scan["size"]),
            self._assemble,
        )

    def _assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleTable:
        """The index of shards that have the same columns."""
        names = _common_names(shards, inspected)
        wanted = renamed(self._options.columns, "columns") or [(name, name) for name in names]
        check_names([name for name, _ in wanted], "columns")
        if names:
            wanted = known_columns(self._options, wanted, names, shards[0].name)
        full = [scan for scan in inspected if len(scan["size"])]
        places = [names.index(column) for _, column in wanted] if full else []
        nothing = np.empty((0, len(places)), np.int64)
        start, size, length = (
            np.concatenate([nothing, *(scan[key][:, places] for scan in full)])
            for key in ("start", "size", "length")
        )
        has_doubled = (size != length).any(axis=0)
        specs = [
            _spec(name, self._options.types.get(column, "text"), has_doubled=bool(doubled))
            for (name, column), doubled in zip(wanted, has_doubled, strict=bool(full))
        ]
        is_number = np.array([not spec.ragged for spec in specs], np.bool_)
        absent = (size == 0) & is_number
        optional = np.flatnonzero(absent.any(axis=0))
        return SampleTable(
            [*specs, *(_present(specs[place]) for place in optional)],
            [len(scan["size"]) for scan in inspected],
            start,
            size,
            identity=json.dumps([(spec.name, spec.codec) for spec in specs]).encode(),
            absent=absent if len(optional) else None,
            indexed=[~absent[:, place] for place in optional],
            lengths={
                number: length[:, number]
                for number, spec in enumerate(specs)
                if spec.codec == "quoted"
            },
        )

    def _scan(self, shard: str, file: BinaryIO) -> Arrays:
        try:
            return scan_table(file, self._delimiter, self._options.names)
        except MalformedTable as error:
            facts = {"shard": shard, "offset": error.offset, "reason": str(error)}
            raise CorruptSample(f"shard {shard} at byte {error.offset}: {error}", facts) from error


class TsvFormat(CsvFormat):
    """The same, with tabs between the cells."""

    pattern = "*.{tsv,tsv.gz}"
    _usual_delimiter = "\t"


def _check(arrays: Arrays, file_bytes: int) -> None:
    """See `Scan.check`."""
    names = json_of(arrays, "names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its columns have no names")
    check_columns(arrays, file_bytes, len(names))
    size, length = (array_of(arrays, name, np.int64, 2) for name in ("size", "length"))
    if length.shape != size.shape or (2 * length < size).any() or (length > size).any():
        raise ValueError("its lengths are not those of its cells")


def _common_names(shards: Sequence[Shard], inspected: Sequence[Arrays]) -> list[str]:
    """The names of the columns, which all shards must share.

    Raises:
        CorruptSample: a shard has others than the first one.
    """
    first: list[str] = []
    owner = ""
    for shard, scan in zip(shards, inspected, strict=True):
        names: list[str] = json.loads(scan["names"].tobytes())
        if first and names and names != first:
            reason = f"it has the columns {names}, and shard {owner} has {first}"
            raise CorruptSample(
                f"shard {shard.name} does not fit: {reason}; serve them as two datasets",
                {"shard": shard.name, "reason": reason},
            )
        if names and not first:
            first, owner = names, shard.name
    return first


def _present(spec: FieldSpec) -> FieldSpec:
    """Which records have a number in a column with empty cells."""
    return FieldSpec(spec.name + PRESENT_SUFFIX, _BOOL, (), ragged=False, codec="indexed")


def _spec(name: str, column_type: str, *, has_doubled: bool) -> FieldSpec:
    if column_type == "text":
        codec: CodecName = "quoted" if has_doubled else "text"
        return FieldSpec(name, np.dtype(np.uint8), (), ragged=True, codec=codec)
    dtype, codec = _STORED[column_type]
    return FieldSpec(name, np.dtype(dtype), (), ragged=False, codec=codec)
