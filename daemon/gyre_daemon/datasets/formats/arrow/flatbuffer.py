"""Reads tables of a FlatBuffer, as Arrow's metadata has them; every offset is checked.

Layout: https://flatbuffers.dev/internals. A table begins with the signed distance back to its list
of fields, which has the offset of each field in the table, or 0 if it has its default.
"""

import struct

_INT32, _UINT32 = struct.Struct("<i"), struct.Struct("<I")
_UINT16 = struct.Struct("<H")


class Table:
    """A table of a FlatBuffer."""

    def __init__(self, data: bytes, position: int) -> None:
        """The table at a position.

        Raises:
            ValueError: there can be none.
        """
        self._data, self._position = data, position
        fields = position - self._number(_INT32, position)
        self._fields, self._end = fields, fields + self._number(_UINT16, fields)

    @classmethod
    def root(cls, data: bytes) -> "Table":
        """The outermost table.

        Raises:
            ValueError: there can be none.
        """
        if len(data) < _UINT32.size:
            raise ValueError("its metadata is cut off")
        return cls(data, _UINT32.unpack_from(data)[0])

    def number(self, field: int, layout: str, default: int = 0) -> int:
        """A number, whose layout is that of `struct`."""
        position = self._place(field)
        return default if position is None else self._number(struct.Struct(layout), position)

    def table(self, field: int) -> "Table | None":
        """A table; None if there is none."""
        position = self._target(field)
        return None if position is None else Table(self._data, position)

    def structs(self, field: int, layout: str) -> list[tuple[int, ...]]:
        """All structs of a list, whose layout is that of `struct`."""
        position = self._target(field)
        if position is None:
            return []
        each, count = struct.Struct(layout), self._number(_UINT32, position)
        begin = position + _UINT32.size
        if begin + count * each.size > len(self._data):
            raise ValueError("a list in its metadata is cut off")
        return list(each.iter_unpack(self._data[begin : begin + count * each.size]))

    def _place(self, field: int) -> int | None:
        """The offset of a field; None if it has its default."""
        entry = self._fields + 4 + 2 * field
        if entry + 2 > self._end:
            return None
        offset = self._number(_UINT16, entry)
        return self._position + offset if offset else None

    def _target(self, field: int) -> int | None:
        position = self._place(field)
        return None if position is None else position + self._number(_UINT32, position)

    def _number(self, layout: struct.Struct, position: int) -> int:
        if not 0 <= position <= len(self._data) - layout.size:
            raise ValueError("its metadata points outside of itself")
        number: int = layout.unpack_from(self._data, position)[0]
        return number
