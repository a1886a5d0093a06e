"""Goes through the buffers of a record batch, and locates the values of its columns."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from gyre_daemon.datasets.formats.arrow.messages import Messages, RecordBatch
from gyre_daemon.datasets.formats.base import FieldSpec
from gyre_daemon.errors import ConfigError

_Bits = npt.NDArray[np.bool_]
_Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FoundColumn:
    """One column of the n rows of a record batch.

    Attributes:
        base: the first byte of its values in the file.
        ends: int64 [n + 1], where each row begins and ends behind the base, in bytes; None if all
            rows have the same size.
        present: bool [n], which rows have a value; None if all do.
        bits: bool [n], the values of booleans, which are no bytes of the file.
    """

    base: int
    ends: _Int64 | None = None
    present: _Bits | None = None
    bits: _Bits | None = None


def storage_type(kind: Any) -> Any:
    """The type that stores the values of an extension type; of another one, itself."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


class BatchWalk:
    """Goes through the arrays and buffers of a record batch, in the order of its schema."""

    def __init__(self, messages: Messages, batch: RecordBatch) -> None:
        self._messages, self._batch = messages, batch
        self._nodes, self._buffers = iter(batch.nodes), iter(batch.buffers)

    def end(self) -> None:
        """Check that nothing is left."""
        if next(self._nodes, None) is not None or next(self._buffers, None) is not None:
            raise ValueError("a record batch has more arrays than its schema")

    def column(self, kind: Any, spec: FieldSpec) -> FoundColumn:
        """The values of a column whose type is served."""
        num_rows = self._batch.num_rows
        present = self._validity(num_rows)
        if types.is_boolean(kind):
            return FoundColumn(0, present=present, bits=self._bits(self._buffer(), num_rows))
        if not spec.ragged:
            if types.is_fixed_size_list(kind):
                return replace(self._fixed_list(kind, num_rows, present), present=present)
            if not types.is_list(kind) and not types.is_large_list(kind):
                start, size = self._buffer()
                _check(num_rows * spec.element_bytes <= size)
                return FoundColumn(start, present=present)
            length, *shape = spec.shape
            found = self._lists(kind, replace(spec, shape=tuple(shape)), num_rows, present)
            assert found.ends is not None
            sizes = np.diff(found.ends) // (spec.element_bytes // length)
            if len(wrong := sizes[sizes != length]):
                is_null = present is not None and not present[np.argmax(sizes != length)]
                what = "is null" if is_null else f"has {wrong[0]} elements"
                raise ConfigError(
                    f"a row of {spec.name!r:.100} {what}, and `lengths` says "
                    f"{length}; correct it, or leave the column out of `lengths`"
                )
            return FoundColumn(found.base + int(found.ends[0]), present=present)
        if types.is_list(kind) or types.is_large_list(kind):
            return self._lists(kind, spec, num_rows, present)
        offsets = self._offsets(kind, num_rows)
        start, size = self._buffer()
        _check(int(offsets[-1]) <= size)
        return FoundColumn(start, offsets, present)

    def _lists(
        self, kind: Any, spec: FieldSpec, num_rows: int, present: _Bits | None
    ) -> FoundColumn:
        """Lists of numbers, or of fixed-size lists, whose own validity was read before."""
        offsets = self._offsets(kind, num_rows)
        inner = storage_type(kind.value_type)
        count = self._peek_length()
        _check(int(offsets[-1]) <= count)
        self._validity_of_elements(count, offsets, present)
        if types.is_fixed_size_list(inner):
            start = self._fixed_list(inner, count, None).base
        else:
            start, size = self._buffer()
            _check(count * spec.element_bytes <= size)
        return FoundColumn(start, offsets * spec.element_bytes, present)

    def file(self, kind: Any) -> FoundColumn:
        """The bytes of a struct of a file and its path."""
        present = self._validity(self._batch.num_rows)
        found = FoundColumn(0)
        for place in range(kind.num_fields):
            inner = kind.field(place)
            if inner.name == "bytes":
                spec = FieldSpec("bytes", np.dtype(np.uint8), (), ragged=True, codec="bytes")
                found = self.column(inner.type, spec)
            else:
                self.skip(storage_type(inner.type))
        both = [each for each in (present, found.present) if each is not None]
        return replace(found, present=np.logical_and.reduce(both) if both else None)

    def skip(self, kind: Any) -> None:
        """Pass over a column without a field."""
        next(self._nodes, None)
        for _ in range(_num_buffers(kind)):
            self._buffer()
        if types.is_run_end_encoded(kind):
            self.skip(storage_type(kind.run_end_type))
            self.skip(storage_type(kind.value_type))
        elif types.is_nested(kind):
            for place in range(kind.num_fields):
                self.skip(storage_type(kind.field(place).type))

    def _fixed_list(self, kind: Any, num_rows: int, present: _Bits | None) -> FoundColumn:
        """Fixed-size lists, whose own validity was read before."""
        count = num_rows * kind.list_size
        validity = self._validity(count)
        if validity is not None:
            whole = np.asarray(validity.reshape(num_rows, -1).all(axis=1))
            _check_elements(whole if present is None else whole | ~present)
        inner = storage_type(kind.value_type)
        if types.is_fixed_size_list(inner):
            return self._fixed_list(inner, count, None if validity is None else validity)
        start, size = self._buffer()
        width = inner.byte_width if types.is_fixed_size_binary(inner) else inner.bit_width // 8
        _check(count * width <= size)
        return FoundColumn(start)

    def _peek_length(self) -> int:
        """The length of the next array."""
        node = next(self._nodes, None)
        if node is None:
            raise ValueError("a record batch has fewer arrays than its schema")
        self._nodes = iter([node, *self._nodes])
        return node[0]

    def _validity_of_elements(self, count: int, offsets: _Int64, present: _Bits | None) -> None:
        """Check that no element of a list is null; gaps between lists do not count."""
        validity = self._validity(count)
        if validity is None:
            return
        missing = np.concatenate(([0], np.cumsum(~validity)))
        num_missing = missing[offsets[1:]] - missing[offsets[:-1]]
        _check_elements((num_missing == 0) if present is None else (num_missing == 0) | ~present)

    def _validity(self, length: int) -> _Bits | None:
        """Which elements of the next array have a value; None if all have."""
        node = next(self._nodes, None)
        if node is None:
            raise ValueError("a record batch has fewer arrays than its schema")
        _check(node[0] >= length)
        buffer = self._buffer()
        if not node[1] or not buffer[1]:
            return None
        valid = self._bits(buffer, length)
        return None if valid.all() else valid

    def _bits(self, buffer: tuple[int, int], count: int) -> _Bits:
        num_bytes = -(-count // 8)
        _check(num_bytes <= buffer[1])
        data = np.frombuffer(self._messages.read(buffer[0], num_bytes), np.uint8)
        return np.unpackbits(data, count=count, bitorder="little").astype(np.bool_)

    def _offsets(self, kind: Any, num_rows: int) -> _Int64:
        is_large = (
            types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind)
        )
        dtype = np.dtype("<i8" if is_large else "<i4")
        start, size = self._buffer()
        num_bytes = (num_rows + 1) * dtype.itemsize
        _check(num_bytes <= size)
        offsets = np.frombuffer(self._messages.read(start, num_bytes), dtype).astype(np.int64)
        if offsets[0] < 0 or (np.diff(offsets) < 0).any():
            raise ValueError("a record batch has offsets that do not rise")
        return offsets

    def _buffer(self) -> tuple[int, int]:
        buffer = next(self._buffers, None)
        if buffer is None:
            raise ValueError("a record batch has fewer buffers than its schema")
        return buffer


def _num_buffers(kind: Any) -> int:
    """How many buffers an array of a type has, without those of its children.

    Raises:
        ConfigError: each array may have another number.
    """
    if types.is_string_view(kind) or types.is_binary_view(kind):
        raise ConfigError(
            "the file has columns of string views, of which no rows can be found. Cast them to "
            "string or binary when you write the file."
        )
    if types.is_null(kind) or types.is_run_end_encoded(kind):
        return 0
    if types.is_union(kind):
        return 1 if kind.mode == "sparse" else 2
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1
    of_size = types.is_string(kind) or types.is_binary(kind)
    of_large_size = types.is_large_string(kind) or types.is_large_binary(kind)
    return 3 if of_size or of_large_size else 2


def _check(is_inside: bool) -> None:
    if not is_inside:
        raise ValueError("a record batch has too short a buffer")


def _check_elements(are_whole: _Bits) -> None:
    if not are_whole.all():
        raise ConfigError(
            "a column has lists with nulls among their elements, which become no tensor; leave it "
            "out: name the others in `columns`"
        )
