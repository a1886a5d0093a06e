"""Maps the keys of JSON objects to columns: their kinds, and their values. Pure.

A scan looks at values as they are written until the kinds of their columns are known. Then lines
are parsed as these kinds, which takes a fifth of the time.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from gyre_daemon.datasets.formats.base import FieldSpec
from gyre_daemon.datasets.formats.indexes.chunks import Column

NULL = b"null"
TypeName = Literal["int64", "float64", "bool", "text", "json"]
TYPES: tuple[TypeName, ...] = get_args(TypeName)
# The kinds of a value, as it is written.
Written = Literal["integer", "float", "bool", "text", "list", "floats", "empty", "other"]

_UINT8, _INT64, _FLOAT64 = np.dtype(np.uint8), np.dtype("<i8"), np.dtype("<f8")
_BOOL = np.dtype(np.bool_)
_NUMBERS = msgspec.json.Decoder(list[int | float])
_TEXT = msgspec.json.Decoder(str)
_FITTING: dict[TypeName, frozenset[Written]] = {
    "int64": frozenset(("integer",)),
    "float64": frozenset(("integer", "float")),
    "bool": frozenset(("bool",)),
    "text": frozenset(("text",)),
}
_LISTS: dict[TypeName, frozenset[Written]] = {
    "int64": frozenset(("list", "empty")),
    "float64": frozenset(("list", "floats", "empty")),
}
_DOCUMENTS: frozenset[Written] = frozenset(("other", "empty"))


class Seen(NamedTuple):
    """A value as a scan sees it.

    Attributes:
        written: its kind.
        num_bytes: that it takes in a batch, as text or as a list of numbers.
    """

    written: Written
    num_bytes: int


def seen(raw: bytes) -> Seen:
    """The kind and size of a value.

    Raises:
        ValueError: it is a number beyond int64 or float64.
        msgspec.DecodeError: it is text that UTF-8 does not have.
    """
    first = raw[:1]
    if first == b'"':
        num_bytes = len(raw) - 2 if b"\\" not in raw else len(_TEXT.decode(raw).encode())
        return Seen("text", num_bytes)
    if first == b"[":
        return _seen_list(raw)
    if first == b"{":
        return Seen("other", 0)
    if first in (b"t", b"f"):
        return Seen("bool", 0)
    if any(sign in raw for sign in (b".", b"e", b"E")):
        if not math.isfinite(float(raw)):
            raise ValueError(f"{raw[:100].decode()} does not fit into float64")
        return Seen("float", 0)
    if not -(1 << 63) <= int(raw) < 1 << 63:
        raise ValueError(f"{raw[:100].decode()} does not fit into int64")
    return Seen("integer", 0)


def _seen_list(raw: bytes) -> Seen:
    try:
        values = _NUMBERS.decode(raw)
    except msgspec.ValidationError:
        msgspec.json.decode(raw)  # are its numbers in the range of float64?
        return Seen("other", 0)
    size = len(values) * _INT64.itemsize
    if not values:
        return Seen("empty", 0)
    if any(isinstance(value, float) for value in values):
        return Seen("floats", size)
    if not -(1 << 63) <= min(values) <= max(values) < 1 << 63:
        raise ValueError("a number of a list does not fit into int64")
    return Seen("list", size)


def spec_of(field: str, written: frozenset[Written], wanted: TypeName | None) -> FieldSpec | None:
    """The field of a column, from some of its values; None if they are not alike.

    Args:
        field: its name.
        written: the kinds of the values.
        wanted: the type that the operator declares, if any.
    """
    if wanted == "json":
        return FieldSpec(field, _UINT8, (), ragged=True, codec="json")
    for name in (wanted,) if wanted else _FITTING:
        if written <= _FITTING[name]:
            return _single(field, name)
    for name in (wanted,) if wanted else _LISTS:
        if written <= _LISTS.get(name, frozenset()):
            dtype = _INT64 if name == "int64" else _FLOAT64
            return FieldSpec(field, dtype, (), ragged=True, codec="bytes")
    if wanted is None and written <= _DOCUMENTS:
        return FieldSpec(field, _UINT8, (), ragged=True, codec="json")
    return None


def _single(field: str, name: TypeName) -> FieldSpec:
    if name == "text":
        return FieldSpec(field, _UINT8, (), ragged=True, codec="text")
    dtype = {"int64": _INT64, "float64": _FLOAT64, "bool": _BOOL}[name]
    return FieldSpec(field, dtype, (), ragged=False, codec="bytes")


@dataclass(frozen=True, slots=True)
class TypedLines:
    """Parses lines whose keys have known kinds.

    Attributes:
        specs: the fields.
        keys: of each.
        knows_all: whether another key is an error.
    """

    specs: tuple[FieldSpec, ...]
    keys: tuple[str, ...]
    knows_all: bool = False

    def columns(self, data: bytes) -> list[Column]:
        """The columns of all nonempty lines.

        Raises:
            ValueError: a line is no object, or has a value of another kind.
        """
        try:
            rows = _decoder(self).decode_lines(data)
            columns = []
            for place, spec in enumerate(self.specs):
                name = f"f{place}"
                columns.append(_column(spec, [getattr(row, name) for row in rows]))
            return columns
        except (msgspec.DecodeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error


@functools.lru_cache(maxsize=64)
def _decoder(lines: TypedLines) -> Any:
    """Skips other keys, and makes no more objects than it must."""
    fields = [(f"f{place}", _kind(spec), None) for place, spec in enumerate(lines.specs)]
    row = msgspec.defstruct(
        "Row",
        fields,
        rename={f"f{place}": key for place, key in enumerate(lines.keys)},
        forbid_unknown_fields=lines.knows_all,
        gc=False,
    )
    return msgspec.json.Decoder(row)


def _kind(spec: FieldSpec) -> Any:
    if spec.codec == "json":
        return msgspec.Raw
    if spec.codec == "text":
        return str | None
    kind: Any = {"i": int, "f": float, "b": bool}[spec.dtype.kind]
    return (list[kind] if spec.ragged else kind) | None


def _column(spec: FieldSpec, values: Sequence[Any]) -> Column:
    if spec.codec in ("json", "text"):
        if spec.codec == "json":
            texts = [NULL if each is None else bytes(each) for each in values]
            present = np.array([each != NULL for each in texts], np.bool_)
        else:
            texts = [b"" if each is None else each.encode() for each in values]
            present = np.array([each is not None for each in values], np.bool_)
        ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
        return Column(np.frombuffer(b"".join(texts), _UINT8), ends, present)
    present = np.array([each is not None for each in values], np.bool_)
    if not spec.ragged:
        found = np.array([0 if each is None else each for each in values], spec.dtype)
        return Column(found.view(np.uint8), None, present)
    lists = [each or () for each in values]
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    data = np.fromiter(itertools.chain.from_iterable(lists), spec.dtype, int(sizes.sum()))
    return Column(data.view(np.uint8), np.cumsum(sizes) * spec.dtype.itemsize, present)
