"""The format `jsonl`: every nonempty line is one JSON document, or every object of an array.

Without `columns` a sample is the document, as its bytes in the file. With `columns`, samples are
rows of chunks: some lines are one chunk, which is parsed as a whole. Which kind a column has is
known when all lines of a file have been seen. A scan looks at each value until the kinds are
known; then it parses lines as these kinds, which takes a fifth of the time.
"""

import contextlib
import functools
import io
import itertools
import operator
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    Arrays,
    CodecName,
    FieldSpec,
    SampleIndex,
    Scan,
    check_names,
    corrupt,
    may_be_array,
    ragged_fields,
    renamed,
)
from gyre_daemon.datasets.formats.chunk_index import (
    ChunkFormat,
    ChunkIndex,
    Column,
    DamagedPart,
    ScannedChunk,
    StoredChunk,
    check_chunks,
    chunk_arrays,
    fields_of,
    num_rows,
    text_column,
)
from gyre_daemon.datasets.formats.concat import assemble_union
from gyre_daemon.datasets.formats.lines import (
    BLOCK,
    UTF8_MARK,
    Block,
    TextFormat,
    decompress,
    framed_blocks,
    lines_of,
    pieces_of,
    recognised,
    scan_lines,
)
from gyre_daemon.datasets.formats.sample_table import SchemaOptions
from gyre_daemon.datasets.formats.values import (
    as_json,
    check_json,
    lone_surrogate,
    without_surrogates,
)
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

TypeName = Literal["int64", "float64", "bool", "text", "json"]
TYPES: tuple[TypeName, ...] = get_args(TypeName)
# The kinds of a value, as it is written.
_Written = Literal["integer", "float", "bool", "text", "list", "floats", "empty", "other"]

# Consecutive lines are one chunk until they have this many bytes. A decoder takes about a
# millisecond for the smallest chunk; but to read a line costs to parse all.
MIN_CHUNK_BYTES = 64 << 10
# A file whose lines each have other keys is a dictionary, and no table.
_MAX_COLUMNS = 1000
# An array is in memory as a whole while it is scanned.
_MAX_ARRAY_BYTES = 1 << 30
# Bits of a chunk's parameters.
_COMPRESSED, _ARRAY = 1, 2
_NULL, _SPACES, _OPEN = b"null", b" \t\r\n", ord("{")
_UINT8, _INT64, _FLOAT64 = np.dtype(np.uint8), np.dtype("<i8"), np.dtype("<f8")
_BOOL = np.dtype(np.bool_)
_NOTHING = np.empty(0, np.uint8)
_NAME_AN_ARRAY = "If the file is one JSON array of records, name it `.json`"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RECORDS = msgspec.json.Decoder(list[msgspec.Raw])
# An object whose first key has an array.
_OF_ARRAY = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*("(?:[^"\\]|\\.){0,100}")\s*:\s*\[')


def has_records(head: bytes, *, is_whole: bool) -> bool:
    """Whether a file named `.json` that begins so has samples: an array of objects, or lines.

    Args:
        head: of the file.
        is_whole: whether the head is all of it.
    """
    text = head.removeprefix(UTF8_MARK).lstrip(_SPACES)
    if text.startswith(b"["):
        return text[1:].lstrip(_SPACES).startswith((b"{", b"]"))  # or none yet
    first, newline, rest = text.partition(b"\n")
    if not first.startswith(b"{"):
        return False
    if not newline:
        return not is_whole
    return first.rstrip().endswith(b"}") and rest.lstrip(_SPACES).startswith(b"{")


def array_bounds(data: bytes) -> npt.NDArray[np.int64]:
    """Int64 [n, 2], the bytes `[start, stop)` of each record of a JSON array.

    Raises:
        ValueError: it is no array of objects.
    """
    begin = len(UTF8_MARK) if data.startswith(UTF8_MARK) else 0
    try:
        records = _records(data[begin:] if begin else data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is no JSON array of objects: {error}") from error
    bounds, stop = array("q"), begin  # a list would take ten times the memory
    for number, each in enumerate(records, 1):
        record = memoryview(each)
        if record[0] != _OPEN:
            raise DamagedPart(f"record {number} of its array is no object", stop)
        start = data.index(b"{", stop)  # only white space and a comma are before it
        stop = start + len(record)
        bounds.extend((start, stop))
    return np.array(bounds, np.int64).reshape(-1, 2)


def _records(data: bytes) -> list[msgspec.Raw]:
    try:
        return _RECORDS.decode(data)
    except msgspec.DecodeError:
        return _RECORDS.decode(as_json(data))


def _is_array(head: bytes) -> bool:
    """Whether a file that begins so is a JSON array, and no lines."""
    return head.removeprefix(UTF8_MARK).lstrip(_SPACES).startswith(b"[")


def _whole(file: BinaryIO) -> bytes:
    """All of a file with an array."""
    data = file.read(_MAX_ARRAY_BYTES + 1)
    if len(data) > _MAX_ARRAY_BYTES:
        raise ValueError(
            f"its array has more than {_MAX_ARRAY_BYTES >> 30} GiB. Write one object a line, as "
            "`jq -c '.[]' in.json > out.jsonl` does"
        )
    return data


def _check_is_records(head: bytes, num_lines: int | None = None) -> None:
    """Refuse a file named `.json` with one object: metadata, or an array within an object.

    It has one line, where the number is known, or its first line is not the whole object.
    """
    first, newline, _ = head.removeprefix(UTF8_MARK).lstrip(_SPACES).partition(b"\n")
    is_cut = bool(newline) and first.startswith(b"{") and not first.rstrip().endswith(b"}")
    if num_lines != 1 and not is_cut:
        return
    found = _OF_ARRAY.match(head)
    if found:
        key = found[1].decode(errors="replace")
        fix = f"Its key {key} has an array: write that alone, as `jq '.[{key}]'` does"
    else:
        fix = (
            'If it is a sample, serve whole files: format="files", extensions=["json"]. If it is '
            "none, name the files with samples by a pattern"
        )
    raise ValueError(f"it is one JSON object, and no array or lines of objects. {fix}")


def _peeked(file: BinaryIO) -> bytes:
    """The first bytes of a file with a buffer, which are not taken."""
    return cast("io.BufferedReader", file).peek()


@dataclass(frozen=True, slots=True)
class JsonlOptions(SchemaOptions):
    r"""The keys of a `jsonl` dataset.

    Attributes:
        columns: keys of the objects to serve; `*` alone for all. Empty to serve the documents.
        types: of columns by their keys, where their values do not say: `int64`, `float64`, `bool`,
            `text` or `json`.
        lengths: of columns by their keys: 0 where lists stay ragged even if all have one length.
        surrogates: `fail` to refuse half a character, as `\ud800` writes it; `replace` to serve
            U+FFFD in its place.
    """

    types: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    surrogates: Literal["fail", "replace"] = "fail"

    def __post_init__(self) -> None:
        """Refuse columns that no batch can have."""
        SchemaOptions.__post_init__(self)
        if "*" in self.columns and len(self.columns) > 1:
            raise ConfigError('`columns` has "*" and names; "*" alone serves all keys')
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
        return () if self.columns == ("*",) else tuple(renamed(self.columns, "columns"))

    @property
    def wanted(self) -> "JsonColumns":
        """The chosen columns."""
        types = tuple((name, cast("TypeName", kind)) for name, kind in self.types.items())
        return JsonColumns(self.pairs, types, self.may_lack, self.replaces_surrogates)


class JsonlFormat(ChunkFormat, TextFormat):
    """A `Format`: a sample is a JSON document, or the values of some of its keys.

    A file named `.json` may be one array of objects, too. Since metadata has that name, such files
    count only where a folder has no others.
    """

    pattern = "*.{jsonl,ndjson,jsonl.gz,ndjson.gz,jsonl.zst,ndjson.zst,json.gz,json.zst}"
    ambiguous_pattern = "*.json"
    noun = BLOCK
    _field = FieldSpec("json", _UINT8, (), ragged=True, codec="json")
    _keeps_empty = False
    _version = 2

    def __init__(self, options: JsonlOptions) -> None:
        """Keep the options."""
        self._options = options

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: an object whose first key stands in the same line."""
        return re.match(rb'(?:\xef\xbb\xbf)?\{[ \t]*"', head) is not None

    @property
    def inspection(self) -> Scan:
        if not self._options.columns:
            return super().inspection
        wanted = self._options.wanted
        ragged = ragged_fields(self._options.lengths, self._options.pairs)
        return Scan(f"json-columns/4 {wanted}", wanted, num_rows, check_chunks, ragged=ragged)

    def index_of(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        if not self._options.columns:
            return TextFormat.assemble(self, shards, inspected)
        full = [scan for scan in inspected if num_rows(scan)]
        if full and not any(fields_of(scan) for scan in full):
            raise ConfigError(
                "no key of the objects has a value other than null. Leave `columns` out to get the "
                "documents as they are, or name the kinds of the keys in `types`."
            )
        try:
            columns = self._index_of_columns
            return assemble_union(self._options, shards, inspected, "fields", columns)
        except CorruptSample as error:
            advice = '. Set `types` of keys that differ, `schema = "union"` for absent keys'
            raise CorruptSample(f"{error}{advice}", error.facts) from error

    def _index_of_columns(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> ChunkIndex:
        """The index of shards that have the same columns."""
        keys, replaces = dict(self._options.pairs), self._options.replaces_surrogates
        specs = next((fields_of(scan) for scan in inspected if num_rows(scan)), [])
        names = tuple(keys.get(spec.name, spec.name) for spec in specs)
        identity = f"json columns {names}{' without surrogates' * replaces}".encode()
        decode = partial(decode_columns, TypedLines(tuple(specs), names), replaces)
        return ChunkIndex(shards, inspected, decode, BLOCK, identity)

    def _check_line(self, line: bytes) -> None:
        try:
            check_json(line)
        except ValueError as error:
            raise ValueError(f"{error}. {_NAME_AN_ARRAY}" if _is_array(line) else error) from error

    def _scan(self, shard: str, file: BinaryIO, check: Callable[[bytes], None]) -> Arrays:
        head = _peeked(file)
        if may_be_array(shard) and _is_array(head):
            bounds = array_bounds(_whole(file))
            return {"start": bounds[:, 0].copy(), "size": bounds[:, 1] - bounds[:, 0]}
        if may_be_array(shard):
            _check_is_records(head)
        scan = scan_lines(file, check)
        is_document = scan["size"] > 0
        num_lines = int(is_document.sum())
        if may_be_array(shard):
            _check_is_records(head, num_lines)
        elif num_lines == 1 and _is_array(head) and has_records(head, is_whole=False):
            raise ValueError(f"its only line is a JSON array. {_NAME_AN_ARRAY}")
        return {name: values[is_document] for name, values in scan.items()}

    def _scan_frames(self, file: BinaryIO, check: Callable[[bytes], None]) -> Arrays:
        def check_no_array(line: bytes) -> None:
            if _is_array(line):
                raise ValueError(_NO_FRAMED_ARRAY)
            check(line)

        return super()._scan_frames(file, check_no_array)


_NO_FRAMED_ARRAY = (
    "it is a JSON array that zstd compressed, and only lines are read so. Unpack the file, or "
    "write one object a line"
)


class _Line(NamedTuple):
    """A line of a file or a record of an array."""

    name: str  # its number in words, such as `line 1`
    offset: int  # in the file; of a compressed one, that of its block


_Where = Callable[[int], _Line]  # takes the number of a nonempty line within its block


def _line(block: Block, flags: int, before: int, row: int) -> _Line:
    """The place of a row of a block, which has this many lines or records before it."""
    start = block.pieces[0][0]
    if flags & _ARRAY:
        bounds = array_bounds(b"[" + block.text + b"]")
        return _Line(f"record {before + row + 1}", start + int(bounds[row, 0]) - 1)
    lines = block.text.split(b"\n")
    full = [number for number, line in enumerate(lines) if line not in (b"", b"\r")]
    offset = block.begin + sum(len(line) + 1 for line in lines[: full[row]])
    return _Line(f"line {before + full[row] + 1}", start if flags & _COMPRESSED else start + offset)


def _texts_of(data: bytes, flags: int, *, replaces: bool) -> list[bytes]:
    """The nonempty lines of a block, or the records."""
    if flags & _ARRAY:
        wrapped = b"[" + data + b"]"
        found = [wrapped[start:stop] for start, stop in array_bounds(wrapped).tolist()]
    else:
        found = lines_of(data)
    return list(map(without_surrogates, found)) if replaces else found


@dataclass(slots=True)
class _Seen:
    """A column of a file; by the places of chunks of R rows, what their values take."""

    lines: dict[_Written, _Line] = field(default_factory=dict)  # the first of each kind of value
    # int64 [R, 2], bytes as text or list, and as JSON
    sizes: dict[int, np.ndarray] = field(default_factory=dict)
    present: dict[int, np.ndarray] = field(default_factory=dict)  # bool [R]

    def add_typed(self, place: int, column: Column, num_rows: int) -> None:
        """Take a chunk whose values have the kind that those before had."""
        ends = np.zeros(num_rows, np.int64) if column.ends is None else column.ends
        self.sizes[place] = np.diff(ends, prepend=0).repeat(2).reshape(-1, 2)
        assert column.present is not None
        self.present[place] = column.present

    def add(self, place: int, raws: Sequence[bytes], where: _Where, *, as_json: bool) -> None:
        """Take the values of a chunk, or refuse one that cannot be served."""
        sizes = []
        for row, raw in enumerate(raws):
            num_bytes = 0
            if raw != _NULL:
                try:
                    written, num_bytes = _seen(raw, as_json=as_json)
                except (ValueError, msgspec.DecodeError) as error:
                    line = where(row)
                    raise DamagedPart(f"{line.name}: {_reason(raw, error)}", line.offset) from error
                if written not in self.lines:
                    self.lines[written] = where(row)
            sizes.append((num_bytes, len(raw)))
        self.sizes[place] = np.array(sizes, np.int64)
        self.present[place] = np.array([raw != _NULL for raw in raws], np.bool_)

    def column(self, spec: FieldSpec, place: int, num_rows: int) -> Column:
        """Where the rows of a chunk end; without their data."""
        if place not in self.present:
            size = len(_NULL) if spec.codec == "json" else 0
            ends = np.arange(1, num_rows + 1) * size if spec.ragged else None
            return Column(_NOTHING, ends, np.zeros(num_rows, np.bool_))
        ends = np.cumsum(self.sizes[place][:, int(spec.codec == "json")]) if spec.ragged else None
        return Column(_NOTHING, ends, self.present[place])


def _seen(raw: bytes, *, as_json: bool) -> tuple[_Written, int]:
    """The kind of a value, and the bytes that it takes as text or as a list of numbers.

    Raises:
        ValueError: it is no JSON, or has an integer beyond int64 and is not served as JSON.
    """
    value = msgspec.json.decode(raw)
    if isinstance(value, str):
        return "text", len(value.encode())
    if isinstance(value, bool):
        return "bool", 0
    if isinstance(value, list):
        kinds = set(map(type, value))
        if not value or not kinds <= {int, float}:
            return "other" if value else "empty", 0
        if not as_json:
            _check_integers([each for each in value if type(each) is int])
        return "floats" if float in kinds else "list", len(value) * _INT64.itemsize
    if isinstance(value, int):
        if not as_json:
            _check_integers([value])
        return "integer", 0
    return ("float", 0) if isinstance(value, float) else ("other", 0)


def _check_integers(values: Sequence[int]) -> None:
    if values and not -(1 << 63) <= min(values) <= max(values) < 1 << 63:
        largest = str(max(values, key=abs))
        raise ValueError(f'{largest:.50} does not fit into int64. Set `types` of its key to "json"')


@dataclass(frozen=True, slots=True)
class JsonColumns:
    """Scans files; the `run` of a `Scan`.

    Attributes:
        pairs: names of the fields, and of their keys; empty for all keys.
        types: of columns by their keys, as the operator has them.
        may_lack: whether a file may lack some of the keys.
        replaces_surrogates: whether half a character becomes U+FFFD; else it is refused.
    """

    pairs: tuple[tuple[str, str], ...]
    types: tuple[tuple[str, TypeName], ...]
    may_lack: bool
    replaces_surrogates: bool

    def __call__(self, shard: str, file: BinaryIO) -> Arrays:
        """The `chunk_arrays` of a file.

        Raises:
            CorruptSample: it is damaged, or the values of a key are not alike; with the lines.
            ConfigError: the columns do not fit.
        """
        try:
            with recognised(shard, file) as (opened, is_compressed):
                if is_compressed:
                    return self._scan(framed_blocks(opened), _COMPRESSED)
                head = _peeked(opened)
                if not may_be_array(shard):
                    return self._scan(_plain_blocks(opened), 0)
                if _is_array(head):
                    return self._scan(_record_blocks(_whole(opened)), _ARRAY)
                _check_is_records(head)
                scan = self._scan(_plain_blocks(opened), 0)
                _check_is_records(head, num_rows(scan))
                return scan
        except ConfigError:
            raise
        except ValueError as error:
            offset = error.offset if isinstance(error, DamagedPart) else None
            raise corrupt(shard, offset, str(error)) from error

    def _scan(self, blocks: Iterator[Block], flags: int) -> Arrays:
        columns: dict[str, _Seen] = {}
        keys: dict[str, None] = {}
        typed: TypedLines | None = None
        chunks: list[ScannedChunk] = []
        failure: ValueError | None = None
        before = 0
        for block in blocks:
            if not chunks and flags & _COMPRESSED and _is_array(block.text):
                raise ValueError(_NO_FRAMED_ARRAY)
            texts = _texts_of(block.text, flags, replaces=self.replaces_surrogates)
            if texts:
                cut = block.begin, len(block.data), flags
                chunk = ScannedChunk(len(texts), block.pieces, parameters=cut)
                where = partial(_line, block, flags, before)
                try:
                    typed = self._add(columns, keys, typed, len(chunks), texts, where)
                except ConfigError:
                    raise
                except ValueError as error:
                    failure, typed = failure or error, self._typed(columns)
                    chunk = replace(chunk, damage=str(error))
                chunks.append(chunk)
            before += len(texts) if flags & _ARRAY else block.text.count(b"\n")
        is_lacking = not self.may_lack and any(key not in keys for _, key in self.pairs)
        if failure and (is_lacking or all(chunk.damage for chunk in chunks)):
            raise failure  # a damaged block may have the key
        served = self._served(columns, keys) if chunks else []
        for place, chunk in enumerate(chunks):
            its = [column.column(spec, place, chunk.num_rows) for spec, column in served]
            chunks[place] = replace(chunk, columns=its)
        return chunk_arrays([spec for spec, _ in served], chunks)

    def _add(
        self,
        columns: dict[str, _Seen],
        keys: dict[str, None],
        typed: "TypedLines | None",
        place: int,
        texts: Sequence[bytes],
        where: _Where,
    ) -> "TypedLines | None":
        """Take the lines of a chunk; the parser of lines like these, if they are all known.

        Raises:
            DamagedPart: one is no object, or has a value that cannot be served.
        """
        if typed:
            with contextlib.suppress(ValueError):  # one has a value of another kind
                found = typed.columns(b"\n".join(texts))
                for key, column in zip(typed.keys, found, strict=True):
                    columns[key].add_typed(place, column, len(texts))
                return typed
        rows = _rows_of(texts, where)
        its = dict.fromkeys(key for row in rows for key in row)
        keys.update(its)
        if len(keys) > _MAX_COLUMNS:
            raise ConfigError(
                f"the objects have more than {_MAX_COLUMNS} keys; leave `columns` out, and parse "
                "the documents where you need them"
            )
        types = dict(self.types)
        for key in [key for _, key in self.pairs if key in its] if self.pairs else its:
            raws = [bytes(row[key]) if key in row else _NULL for row in rows]
            as_json = types.get(key) == "json"
            columns.setdefault(key, _Seen()).add(place, raws, where, as_json=as_json)
        return self._typed(columns)

    def _typed(self, columns: Mapping[str, _Seen]) -> "TypedLines | None":
        """A parser of lines like the previous ones; None as long as too little is known."""
        types, specs, lacking = dict(self.types), list[FieldSpec](), []
        for key in dict.fromkeys([*columns, *(key for _, key in self.pairs)]):
            written = frozenset(columns[key].lines if key in columns else ())
            spec = _spec_of(key, written, types.get(key))
            if not written:
                lacking.append(key)
            elif spec is None or written <= {"empty"}:
                return None
            else:
                specs.append(spec)
        names = tuple(spec.name for spec in specs)
        return TypedLines(tuple(specs), names, tuple(lacking), knows_all=not self.pairs)

    def _served(
        self, columns: Mapping[str, _Seen], keys: Mapping[str, None]
    ) -> list[tuple[FieldSpec, _Seen]]:
        """The fields of a file, each with the values seen of its column."""
        types = dict(self.types)
        known = {key for key, column in columns.items() if column.lines} | types.keys()
        pairs = self.pairs or tuple((key, key) for key in sorted(known & columns.keys()))
        check_names([name for name, _ in pairs], "columns")
        served = []
        for name, key in pairs:
            if key not in known:
                if self.may_lack:
                    continue
                raise ConfigError(
                    f"there is no key {key!r:.100} with a value; the objects have "
                    f"{', '.join(keys):.1000}"
                )
            column = columns.get(key, _Seen())
            spec = _spec_of(name, frozenset(column.lines), types.get(key))
            if spec is None:
                raise _unlike(key, column.lines, types.get(key))
            served.append((spec, column))
        return served


_SCALARS: Mapping[TypeName, frozenset[_Written]] = {
    "int64": frozenset(("integer",)),
    "float64": frozenset(("integer", "float")),
    "bool": frozenset(("bool",)),
    "text": frozenset(("text",)),
}
_LISTS: Mapping[TypeName, frozenset[_Written]] = {
    "int64": frozenset(("list", "empty")),
    "float64": frozenset(("list", "floats", "empty")),
}
_DOCUMENTS: frozenset[_Written] = frozenset(("other", "empty"))
_DTYPES = {"int64": _INT64, "float64": _FLOAT64, "bool": _BOOL, "text": _UINT8}


def _spec_of(name: str, written: frozenset[_Written], wanted: TypeName | None) -> FieldSpec | None:
    """The field of a column with values of these kinds; None if they are not alike.

    The operator may have declared a type, which is `wanted`.
    """
    if wanted == "json":
        return FieldSpec(name, _UINT8, (), ragged=True, codec="json")
    for kind in (wanted,) if wanted else _SCALARS:
        if written <= _SCALARS[kind]:
            codec: CodecName = "text" if kind == "text" else "bytes"
            return FieldSpec(name, _DTYPES[kind], (), ragged=kind == "text", codec=codec)
    for kind in (wanted,) if wanted else _LISTS:
        if written <= _LISTS.get(kind, frozenset()):
            return FieldSpec(name, _DTYPES[kind], (), ragged=True, codec="bytes")
    return None if wanted or not written <= _DOCUMENTS else _spec_of(name, written, "json")


_WORDS: Mapping[_Written, str] = {
    "integer": "an integer",
    "float": "a number with a fraction",
    "bool": "true or false",
    "text": "text",
    "list": "a list of integers",
    "floats": "a list of numbers",
    "empty": "an empty list",
    "other": "an object or another list",
}


def _unlike(key: str, lines: Mapping[_Written, _Line], wanted: TypeName | None) -> DamagedPart:
    """The error, with the place of the last kind that was seen."""
    kinds = ", ".join(f"{_WORDS[kind]} in {line.name}" for kind, line in lines.items())
    declared = f"and `types` has {wanted}" if wanted else "which is no column"
    numbers = '"float64"' if not wanted and lines.keys() <= {"integer", "float"} else '"json"'
    return DamagedPart(
        f"the key {key!r:.100} has {kinds}, {declared}; name the other keys "
        f"in `columns`, or serve it as JSON: `types = {{{key:.100} = {numbers}}}`",
        max(line.offset for line in lines.values()),
    )


def _rows_of(texts: Sequence[bytes], where: _Where) -> list[dict[str, msgspec.Raw]]:
    rows = []
    for row, text in enumerate(texts):
        try:
            rows.append(_OBJECT.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            line = where(row)
            reason = f"{line.name} is no JSON object: {_reason(text, error)}"
            reason += f". {_NAME_AN_ARRAY}" * _is_array(text)
            raise DamagedPart(reason, line.offset) from error
    return rows


def _reason(text: bytes, error: Exception) -> str:
    """Why a value is refused; also where Python's `json` writes more than JSON has."""
    if escape := lone_surrogate(text):
        return (
            f"it has a lone surrogate ({escape}), half a character that UTF-8 does not have. Set "
            '`surrogates = "replace"` to serve U+FFFD in its place, or leave `columns` out to get '
            "the documents as they are"
        )
    if number := re.search(rb"NaN|-?Infinity", text):
        return (
            f"{error}. JSON has no {number[0].decode()}. Write null, or leave `columns` out to get "
            "the documents as they are"
        )
    return str(error)


def _plain_blocks(file: BinaryIO) -> Iterator[Block]:
    """The lines of an uncompressed file, some at a time."""
    start, data = 0, b""
    for offset, more in pieces_of(file):
        if not data:
            start = offset
        data += more
        begin = 0
        while len(data) - begin >= MIN_CHUNK_BYTES:
            end = data.find(b"\n", begin + MIN_CHUNK_BYTES - 1) + 1
            if not end:
                break
            yield _plain(start + begin, data[begin:end])
            begin = end
        start, data = start + begin, data[begin:]
    if data:
        yield _plain(start, data)


def _record_blocks(data: bytes) -> Iterator[Block]:
    """The records of an array, some at a time."""
    bounds = array_bounds(data)
    begin = 0
    while begin < len(bounds):
        start = int(bounds[begin, 0])
        end = int(np.searchsorted(bounds[:, 1], start + MIN_CHUNK_BYTES))
        end = min(max(end, begin), len(bounds) - 1)
        yield _plain(start, data[start : int(bounds[end, 1])])
        begin = end + 1


def _plain(start: int, data: bytes) -> Block:
    return Block(0, [(start, start + len(data))], bytearray(data))


def decode_columns(typed: "TypedLines", replaces: bool, chunk: StoredChunk) -> Sequence[Column]:
    """The columns of a chunk of lines or records; a `Decode`, once the others are set.

    Raises:
        ValueError: a line is no object, or has other values than when it was indexed.
    """
    begin, stop, flags = chunk.parameters
    data = decompress(chunk.pieces) if flags & _COMPRESSED else bytes(chunk.pieces[0][1])
    texts = _texts_of(data[begin:stop], flags, replaces=replaces)
    try:
        return typed.columns(b"\n".join(texts))
    except ValueError:
        pieces = [(start, start + len(piece)) for start, piece in chunk.pieces]
        block = Block(begin, pieces, bytearray(data[:stop]))
        _rows_of(texts, partial(_line, block, flags, 0))
        raise  # of an object without a place: a value of another kind


@dataclass(frozen=True, slots=True)
class TypedLines:
    """Parses lines whose keys have known kinds.

    Attributes:
        specs: the fields.
        keys: of each.
        lacking: keys that are absent or `null`; a value is an error.
        knows_all: whether another key is an error.
    """

    specs: tuple[FieldSpec, ...]
    keys: tuple[str, ...]
    lacking: tuple[str, ...] = ()
    knows_all: bool = False

    def columns(self, data: bytes) -> list[Column]:
        """The columns of all nonempty lines.

        Raises:
            ValueError: a line is no object, or has a value of another kind.
        """
        try:
            decoder, getters = _decoder(self)
            rows = decoder.decode_lines(data)
            return [
                _column(spec, list(map(get, rows)))
                for spec, get in zip(self.specs, getters, strict=True)
            ]
        except (msgspec.DecodeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error


@functools.lru_cache(maxsize=64)
def _decoder(lines: TypedLines) -> tuple[Any, list[Callable[[Any], Any]]]:
    """A decoder that skips other keys, and a getter for each field from the rows that it makes.

    Attributes have other names than keys: a key may be no identifier, and serve two fields.
    """
    kinds: dict[str, Any] = dict.fromkeys(lines.lacking)
    kinds |= {key: _kind(spec) for key, spec in zip(lines.keys, lines.specs, strict=True)}
    names = {key: f"f{place}" for place, key in enumerate(kinds)}
    row = msgspec.defstruct(
        "Row",
        [(names[key], kind, None) for key, kind in kinds.items()],
        rename={name: key for key, name in names.items()},
        forbid_unknown_fields=lines.knows_all,
        gc=False,
    )
    return msgspec.json.Decoder(row), [operator.attrgetter(names[key]) for key in lines.keys]


def _kind(spec: FieldSpec) -> Any:
    if spec.codec == "json":
        return msgspec.Raw
    if spec.codec == "text":
        return str | None
    kind: Any = {"i": int, "f": float, "b": bool}[spec.dtype.kind]
    return (list[kind] if spec.ragged else kind) | None


def _column(spec: FieldSpec, values: Sequence[Any]) -> Column:
    if spec.codec == "json":
        texts = [_NULL if each is None else bytes(each) for each in values]
        present = np.array([each != _NULL for each in texts], np.bool_)
        return replace(text_column(texts), present=present)
    present = np.array([each is not None for each in values], np.bool_)
    if spec.codec == "text":
        encoded = [b"" if each is None else each.encode() for each in values]
        return replace(text_column(encoded), present=present)
    if not spec.ragged:
        found = np.array([0 if each is None else each for each in values], spec.dtype)
        return Column(found.view(np.uint8), None, present)
    lists = [each or () for each in values]
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    data = np.fromiter(itertools.chain.from_iterable(lists), spec.dtype, int(sizes.sum()))
    return Column(data.view(np.uint8), np.cumsum(sizes) * spec.dtype.itemsize, present)
