"""The options of `text` and `jsonl`, and the index of all their shards."""

import json
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
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkIndex
from gyre_daemon.datasets.formats.indexes.chunks import (
    check_chunks,
    fields_of,
    num_rows,
    refuse_damaged,
)
from gyre_daemon.datasets.formats.indexes.stored import check_extents
from gyre_daemon.datasets.formats.indexes.table import SampleTable
from gyre_daemon.datasets.formats.indexes.union_index import assemble_union
from gyre_daemon.datasets.formats.lines.array import (
    NAME_AN_ARRAY,
    check_is_records,
    has_records,
    is_array,
    may_be_array,
    peeked,
    scan_array,
)
from gyre_daemon.datasets.formats.lines.columns import ColumnsDecoder, JsonColumns
from gyre_daemon.datasets.formats.lines.frames import LineFrames
from gyre_daemon.datasets.formats.lines.scan import scan_lines
from gyre_daemon.datasets.formats.lines.values import TYPES, TypeName
from gyre_daemon.datasets.formats.names import ragged_fields, renamed
from gyre_daemon.datasets.formats.schemas import SchemaOptions, described, wider_field
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
    r"""The keys of a `jsonl` dataset.

    Attributes:
        columns: keys of the objects to serve, such as `text`, or `label=class` to serve the key
            `class` under the name `label`; `*` alone for all. Empty to serve the documents.
        types: of columns by their keys, where their values do not say: `int64`, `float64`, `bool`,
            `text` or `json`.
        lengths: of columns by their keys: 0 where lists stay ragged even if all have one length.
        surrogates: `fail` to refuse half a character, as `\ud800` writes it; `replace` to serve
            U+FFFD in its place.
    """

    columns: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    surrogates: str = "fail"

    def __post_init__(self) -> None:
        """Refuse columns that no batch can have.

        Raises:
            ConfigError: says why.
        """
        SchemaOptions.__post_init__(self)
        renamed(self.columns, "columns")
        if "*" in self.columns and len(self.columns) > 1:
            raise ConfigError('`columns` has "*" and names; "*" alone serves all keys')
        if self.surrogates not in ("fail", "replace"):
            raise ConfigError(
                f"`surrogates` must be fail or replace (got {self.surrogates!r:.100})"
            )
        of_columns = self.types, self.lengths, self.schema == "union", self.replaces_surrogates
        if not self.columns and any(of_columns):
            raise ConfigError(
                "`types`, `lengths`, `schema` and `surrogates` are of columns; name some in "
                '`columns`, or `["*"]`'
            )
        for name, length in self.lengths.items():
            if length:
                raise ConfigError(
                    f"`lengths` of the key {name!r:.100} is {length}; JSON declares no length. "
                    "Leave it out, or set 0 for lists that stay ragged"
                )
        for name, column_type in self.types.items():
            if column_type not in TYPES:
                raise ConfigError(
                    f"the type of column {name!r:.100} is {column_type!r:.100}; it must be one of "
                    f"{', '.join(TYPES)}"
                )

    @property
    def replaces_surrogates(self) -> bool:
        """Whether half a character becomes U+FFFD."""
        return self.surrogates == "replace"

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names of the fields, and of their keys; empty for all keys."""
        return () if self.columns == ("*",) else tuple(renamed(self.columns, "columns"))

    @property
    def wanted(self) -> JsonColumns:
        """The chosen columns."""
        types = tuple((name, cast("TypeName", kind)) for name, kind in self.types.items())
        may_lack = self.schema == "union"
        return JsonColumns(self.pairs, types, may_lack, self.replaces_surrogates)


class TextFormat:
    """A `Format`: every line of a text file is a sample, empty lines included."""

    pattern = "*.{txt,text,txt.gz,text.gz,txt.zst,text.zst}"
    unpacks_gzip = True
    _field = FieldSpec("text", _UINT8, (), ragged=True, codec="text")
    _keeps_empty = True
    _has_arrays, _version = False, 1

    def __init__(self, options: LinesOptions) -> None:
        """There is nothing to choose."""

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        return Scan(
            f"{self._field.name}-lines/{self._version}", self._scan_any, _num_samples, _check
        )

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        pairs = zip(shards, inspected, strict=True)
        compressed = [shard.name for shard, scan in pairs if "rows" in scan]
        if len(compressed) == len(shards):
            identity = f"{self._field.name} lines".encode()
            return ChunkIndex(shards, inspected, self._frames, _NOUN, identity)
        if compressed:
            raise ConfigError(
                f"some shards are compressed with zstd, such as {compressed[0]}, and some are not. "
                "Compress all of them or none, or name the ones you mean."
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
                return self._frames.scan(
                    opened,
                    partial(_check_first, shard, self._check_line),
                    may_be_array=self._has_arrays and may_be_array(shard),
                )
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
    """A `Format`: every nonempty line of a file is one JSON document.

    A sample is the document, or the values of some keys. A file named `.json` may be one
    array of objects, too. Since metadata has that name, such files count only where a folder has
    no others.
    """

    pattern = "*.{jsonl,ndjson,jsonl.gz,ndjson.gz,jsonl.zst,ndjson.zst,json.gz,json.zst}"
    ambiguous_pattern = "*.json"
    _field = FieldSpec("json", _UINT8, (), ragged=True, codec="json")
    _keeps_empty = False
    _has_arrays, _version = True, 2

    def __init__(self, options: JsonlOptions) -> None:
        """Keep the options."""
        self._options = options

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        if not self._options.columns:
            return super().inspection
        wanted = self._options.wanted
        ragged = ragged_fields(self._options.lengths, self._options.pairs)
        return Scan(f"json-columns/3 {wanted}", wanted, num_rows, check_chunks, ragged=ragged)

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
        _check_alike(dict(pairs), shards, inspected, is_union=self._options.schema == "union")
        return assemble_union(
            self._options,
            [name for name, _ in pairs],
            shards,
            inspected,
            lambda scan: scan["fields"].tobytes(),
            num_rows,
            self._index_of_columns,
        )

    def _index_of_columns(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> ChunkIndex:
        """The index of shards that have the same columns."""
        keys, replaces = dict(self._options.wanted.pairs), self._options.replaces_surrogates
        specs = next((fields_of(scan) for scan in inspected if num_rows(scan)), [])
        names = tuple(keys.get(spec.name, spec.name) for spec in specs)
        identity = f"json columns {names}{' without surrogates' * replaces}".encode()
        decode = ColumnsDecoder(tuple(specs), names, replaces)
        return ChunkIndex(shards, inspected, decode, _NOUN, identity)

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: an object whose first key stands in the same line."""
        return re.match(rb'(?:\xef\xbb\xbf)?\{[ \t]*"', head) is not None

    def _check_line(self, line: bytes) -> None:
        check_json(line)

    def _scan(self, shard: str, file: BinaryIO) -> Arrays:
        check = partial(_check_first, shard, self._check_line)
        head = peeked(file)
        if not may_be_array(shard):
            scan = scan_lines(file, check)
            is_one = (scan["size"] > 0).sum() == 1 and is_array(head)
            if is_one and has_records(head, is_whole=False):
                raise ValueError(f"its only line is a JSON array. {NAME_AN_ARRAY}")
        elif is_array(head):
            return scan_array(file, check)
        else:
            check_is_records(head)
            scan = scan_lines(file, check)
            check_is_records(head, int((scan["size"] > 0).sum()))
        is_document = scan["size"] > 0
        return {name: values[is_document] for name, values in scan.items()}


def _check_alike(
    keys: Mapping[str, str], shards: Sequence[Shard], inspected: Sequence[Arrays], *, is_union: bool
) -> None:
    """Refuse shards whose keys have values of other kinds, and name the options that serve them.

    Args:
        keys: of the objects, by the names of their fields; a field without one has its key's name.
        shards: of the dataset.
        inspected: of each.
        is_union: whether shards may lack keys, and differ in the dtypes of numbers.

    Raises:
        CorruptSample: with the first shard that does not fit.
        ConfigError: no shard has values.
    """
    owners: dict[str, tuple[FieldSpec, str]] = {}
    known: set[bytes] = set()
    for shard, scan in zip(shards, inspected, strict=True):
        schema = scan["fields"].tobytes()
        if not num_rows(scan) or schema in known:
            continue
        its = {spec.name: spec for spec in fields_of(scan)}
        lacking = sorted(its.keys() ^ owners.keys()) if known and not is_union else []
        known.add(schema)
        types: dict[str, str] = {}
        found = []
        for name, spec in its.items():
            first, owner = owners.setdefault(name, (spec, shard.name))
            if first == spec or (is_union and wider_field(first, spec)):
                continue
            key = keys.get(name, name)
            are_numbers = first.ragged == spec.ragged and {first.dtype.kind, spec.dtype.kind} == {
                *"if"
            }
            types[key] = "float64" if are_numbers else "json"
            found.append(
                f"its key {key!r:.100} has {described(spec)} (shard {owner}: {described(first)})"
            )
        if not types and not lacking:
            continue
        remedies = []
        if types:
            table = ", ".join(
                f"{_toml_key(key)} = {json.dumps(kind)}" for key, kind in types.items()
            )
            remedies.append(f"types = {{{table}}}")
        if lacking:
            remedies.append('schema = "union"')
            found.append(f"not all shards have values of {', '.join(map(repr, lacking)):.300}")
        reason = "; ".join(found)
        raise CorruptSample(
            f"shard {shard.name} does not fit: {reason}. Set `{'` and `'.join(remedies)}`, or name "
            "the other keys in `columns`",
            {"shard": shard.name, "reason": reason},
        )
    if known and not owners:
        raise ConfigError(
            "no key of the objects has a value other than null. Leave `columns` out to get the "
            "documents as they are, or name the kinds of the keys in `types`."
        )


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


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
        named = f". {NAME_AN_ARRAY}" if is_array(line) else ""
        reason = f"its first line is not what the format says: {error}{named}"
        facts = {"shard": shard, "offset": 0, "reason": reason}
        raise CorruptSample(f"shard {shard}: {reason}", facts) from error
