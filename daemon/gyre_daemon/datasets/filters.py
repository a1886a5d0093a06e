"""Filters: an expression over facts of samples, and the index of the samples that it leaves. Pure.

`32 <= length(text) < 10000 and value("class") != "cat"` has Python's syntax and meaning, for all
samples at once. It is parsed by Python's own parser and computed by the few nodes below; nothing
else of Python is there. The facts are lengths of fields and indexed values. Stored columns, and
lengths that transforms make, are found once for all samples, and then a filter is computed from
them as from the index itself.

[Note: Numbers as Python has them] numpy computes int64 and float64, many samples at once. If it
would round or wrap an integer, the operands become arrays of Python's numbers, which is exact, and
slower. If a sample divides by 0, the filter is refused: numpy's infinity would keep or drop the
sample in silence. To allow `i != 0 and 5 / i > 1`, each part of `and`, `or` and a chained
comparison sees only the samples that earlier parts have not decided, as in Python.
"""

import ast
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from gyre_protos.text import counted
from msgspec import Struct

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, indexed_fields, stored_fields
from gyre_daemon.datasets.formats.base import Extents
from gyre_daemon.datasets.formats.concat import View
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.permutation import Int64Array

Values = npt.NDArray[Any]
_Compute = Callable[["_Samples"], Any]
_Join = Callable[[Any, Any], Any]
# The kind of a field whose values are texts, not numbers or classes.
TEXT = "text/plain"
_MAX_CHARS = 1000
_NUMBERS: Mapping[type[ast.AST], _Join] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.AST], _Join] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_DIVISIONS = (ast.Div, ast.FloorDiv, ast.Mod)
_WHAT_THERE_IS = (
    'numbers, text in quotes, names of fields, value("NAME"), length(NAME), + - * / // %, '
    "comparisons, `in` a list, `and`, `or`, `not` and parentheses"
)
_AT_ONCE = 1 << 16  # samples looked at together
# Integers below these have exact results in int64, and exact float64s.
_MAX_FACTOR, _MAX_EXACT = 1 << 31, 1 << 53


class _Samples(Struct, frozen=True):
    """Some of an index's facts of n samples.

    Attributes:
        lengths: int64 [n] by the names of fields.
        values: [n] by the names of fields.
        rows: int64 [k] of the n, those that are looked at.
    """

    lengths: Mapping[str, Values]
    values: Mapping[str, Values]
    rows: Int64Array

    def length(self, name: str) -> Values:
        """Lengths of a field, [k]."""
        return self.lengths[name][self.rows]

    def value(self, name: str) -> Values:
        """Values of a field, [k]."""
        return self.values[name][self.rows]

    def part(self, places: Int64Array) -> "_Samples":
        """The samples at some of the k places."""
        return _Samples(self.lengths, self.values, self.rows[places])


class _DividedByZero(Exception):
    """A sample divides by 0.

    Attributes:
        row: its place among the n samples.
        division: the expression.
    """

    def __init__(self, row: int, division: ast.BinOp) -> None:
        super().__init__(row, division)
        self.row, self.division = row, division


class Filter:
    """An expression over the fields of one dataset."""

    def __init__(self, text: str, fields: Sequence[FieldSpec], names: Sequence[str]) -> None:
        """Parse it.

        Args:
            text: the expression.
            fields: of the index.
            names: theirs in the expression.

        Raises:
            ConfigError: it is none, or needs facts that the index lacks.
        """
        self._text = text
        named = [replace(spec, name=name) for spec, name in zip(fields, names, strict=True)]
        self._stored, self._indexed = stored_fields(named), indexed_fields(named)
        if len(text) > _MAX_CHARS:
            self._refuse(f"it has {len(text)} characters; at most {_MAX_CHARS} are read")
        try:
            self._compute = self._condition(ast.parse(text.strip(), mode="eval").body)
        except ConfigError:  # which is a ValueError
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self._refuse(f"it is no expression: {error}")

    def __call__(self, extents: Extents, first_id: int = 0) -> npt.NDArray[np.bool_]:
        """Which samples are left, bool [n].

        Args:
            extents: of the samples.
            first_id: the id of the first one; they follow each other.

        Raises:
            ConfigError: a sample divides by 0.
        """
        num_bytes = extents.tensor_bytes
        samples = _Samples(
            {
                spec.name: num_bytes[:, place] // max(spec.element_bytes, 1)
                for place, spec in enumerate(self._stored)
            },
            {spec.name: each for spec, each in zip(self._indexed, extents.indexed, strict=True)},
            np.arange(len(extents.shard)),
        )
        with np.errstate(all="ignore"):  # NaN keeps no sample
            try:
                return _decided(self._compute, samples)
            except _DividedByZero as error:
                text, divisor = map(ast.unparse, (error.division, error.division.right))
                self._refuse(
                    f"`{text:.100}` divides by 0 in sample {first_id + error.row} of all; a "
                    f"missing value is 0. Put `{divisor:.100} != 0 and` before it"
                )
            except (OverflowError, RecursionError) as error:  # of Python's numbers
                self._refuse(f"it cannot be computed: {error}")

    def kept(self, num_samples: int, facts: Callable[[Int64Array], Extents]) -> Int64Array:
        """The ids of all samples that are left, in rising order.

        Args:
            num_samples: N.
            facts: takes sample ids and returns their lengths and values.

        Raises:
            ConfigError: none is left, or a sample divides by 0.
        """
        parts = []
        for begin in range(0, num_samples, _AT_ONCE):
            ids = np.arange(begin, min(begin + _AT_ONCE, num_samples))
            parts.append(ids[self(facts(ids), begin)])
        kept = np.concatenate(parts)
        if not len(kept):
            raise ConfigError(
                f"the filter {self._text!r:.200} leaves none of {counted(num_samples, 'sample')}"
            )
        return kept

    def _condition(self, node: ast.expr) -> _Compute:
        """A condition."""
        match node:
            case ast.BoolOp(op=op, values=values):
                parts = [self._condition(each) for each in values]
                return partial(_joined, parts, decisive=isinstance(op, ast.Or))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._condition(operand)
                return lambda samples: np.logical_not(inner(samples))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                sides = [left, *comparators]
                steps = [
                    self._comparison(sides[place], op, sides[place + 1])
                    for place, op in enumerate(ops)
                ]
                return partial(_joined, steps, decisive=False)
            case _ if (name := _field_name(node)) is not None:
                spec = self._indexed_field(name)
                if spec.dtype != np.bool_:
                    self._refuse(f"`{spec.name}` alone is neither true nor false; compare it")
                return lambda samples: samples.value(spec.name)
        return self._unknown(node)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> _Compute:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple):
                self._refuse(f"`{ast.unparse(right)}` is no list, such as [1, 2]")
            parts = [self._comparison(left, ast.Eq(), each) for each in right.elts]
            if not parts:
                self._refuse("a list is empty")
            is_in = isinstance(op, ast.In)
            return lambda samples: reduce(np.logical_or, [part(samples) for part in parts]) == is_in
        if type(op) not in _COMPARISONS:
            return self._unknown(op)
        compare = _COMPARISONS[type(op)]
        for side, other in ((left, right), (right, left)):
            if isinstance(side, ast.Constant) and isinstance(side.value, str):
                name, number = self._category(side.value, other, op)
                return lambda samples: compare(samples.value(name), number)
        first, second = self._number(left), self._number(right)
        return lambda samples: _join(compare, first(samples), second(samples))

    def _category(self, text: str, other: ast.expr, op: ast.cmpop) -> tuple[str, int]:
        """The field that a category is compared with, and the number of the category."""
        name = _field_name(other)
        if name is None or not isinstance(op, ast.Eq | ast.NotEq):
            self._refuse(f"{text!r} can only be equal to a field of classes, or not")
        spec = self._indexed_field(name)
        if text not in spec.categories:
            known = ", ".join(spec.categories[:20]) or "none"
            self._refuse(f"{text!r} is no class of `{spec.name}`; its classes are: {known}")
        return spec.name, spec.categories.index(text)

    def _number(self, node: ast.expr) -> _Compute:
        match node:
            case ast.Constant(value=bool() | int() | float() as value):
                number = np.asarray(int(value) if isinstance(value, bool) else value)
                return lambda _: number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner, zero = self._number(operand), np.asarray(0)
                return lambda samples: _join(operator.sub, zero, inner(samples))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _NUMBERS:
                first, second, join = self._number(left), self._number(right), _NUMBERS[type(op)]
                if isinstance(op, _DIVISIONS):
                    return partial(_divided, node, join, first, second)
                return lambda samples: _join(join, first(samples), second(samples))
            case ast.Call(func=ast.Name(id="length"), args=[field], keywords=[]):
                ragged = self._ragged_field(field)
                return lambda samples: samples.length(ragged)
            case _ if (name := _field_name(node)) is not None:
                spec = self._indexed_field(name)
                if spec.media_type == TEXT:
                    self._refuse(f"`{name}` is text; compare it with text in quotes")
                wide = "f8" if spec.dtype.kind == "f" else "i8"
                if spec.dtype == np.uint64:
                    wide = "O"  # numbers of Python, as int64 would wrap round
                return lambda samples: samples.value(spec.name).astype(wide)
        return self._unknown(node)

    def _ragged_field(self, node: ast.expr) -> str:
        """The field whose length is asked for."""
        name = _quoted(node) or ast.unparse(node)
        ragged = [spec.name for spec in self._stored if spec.ragged]
        if name not in ragged:
            self._refuse(
                f"`{name}` is no field whose samples differ in length; these are: "
                f"{', '.join(ragged) or 'none'}"
            )
        return name

    def _indexed_field(self, name: str) -> FieldSpec:
        """The field whose values are in the index."""
        known = [
            spec.name for spec in self._indexed if not spec.shape and spec.dtype.kind in "biuf"
        ]
        if name not in known:
            self._refuse(
                f"the index does not have the values of `{name}`; it has lengths, and the values "
                f"of: {', '.join(known) or 'no field'}"
            )
        return next(spec for spec in self._indexed if spec.name == name)

    def _unknown(self, node: ast.AST) -> NoReturn:
        what = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        self._refuse(f"`{what:.100}` does not belong there; there are {_WHAT_THERE_IS}")

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"the filter {self._text!r:.200} cannot be used: {reason}")


def _decided(condition: _Compute, samples: _Samples) -> npt.NDArray[np.bool_]:
    """A condition, bool [k]; of constants it is one value for all."""
    found = np.asarray(condition(samples), np.bool_)
    return np.broadcast_to(found, samples.rows.shape)


def _joined(parts: Sequence[_Compute], samples: _Samples, *, decisive: bool) -> Values:
    """`or` if True is decisive, `and` if False is. Later parts see undecided samples only."""
    outcome = np.full(samples.rows.shape, not decisive)
    places = np.arange(len(samples.rows))
    for part in parts:
        is_decided = _decided(part, samples.part(places)) == decisive
        outcome[places[is_decided]] = decisive
        places = places[~is_decided]
    return outcome


def _divided(
    division: ast.BinOp, join: _Join, first: _Compute, second: _Compute, samples: _Samples
) -> Values:
    """The result of `/`, `//` or `%`.

    Raises:
        _DividedByZero: the divisor of a sample is 0.
    """
    dividend, divisor = first(samples), second(samples)
    is_zero = np.broadcast_to(np.asarray(divisor == 0, np.bool_), samples.rows.shape)
    if is_zero.any():
        raise _DividedByZero(int(samples.rows[is_zero.argmax()]), division)
    return _join(join, dividend, divisor) if len(samples.rows) else np.empty(0)


def _join(join: _Join, first: Values, second: Values) -> Values:
    """A result of arithmetic or of a comparison."""
    return np.asarray(join(*_alike(first, second, join)))


def _alike(first: Values, second: Values, join: _Join) -> tuple[Values, Values]:
    """Two operands, as arrays of objects if numpy would round or wrap integers."""
    if {first.dtype.kind, second.dtype.kind} == {"i"} and join in _COMPARISONS.values():
        return first, second
    limit = _MAX_FACTOR if join is operator.mul else _MAX_EXACT
    if _is_within(first, limit) and _is_within(second, limit):
        return first, second
    return first.astype(object), second.astype(object)


def _is_within(values: Values, limit: int) -> bool:
    """Whether there is no integer of this size or a larger one."""
    if values.dtype.kind != "i" or not values.size:
        return values.dtype.kind in "if"
    return bool(-limit < values.min() and values.max() < limit)


def _quoted(node: ast.expr) -> str | None:
    """Text in quotes; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def _field_name(node: ast.expr) -> str | None:
    """The name of a field, as it is or as `value("NAME")`; None for anything else."""
    match node:
        case ast.Name() | ast.Attribute():
            return ast.unparse(node)
        case ast.Call(func=ast.Name(id="value"), args=[name], keywords=[]):
            return _quoted(name)
    return None


def apply_filter(
    index: SampleIndex, fields: Sequence[FieldSpec], text: str
) -> tuple[SampleIndex, Int64Array]:
    """The index of the samples that a filter leaves, and their ids without it, in rising order.

    It looks at all samples. The index is itself where all are left.

    Args:
        index: of all samples.
        fields: its fields, under the names that the filter uses.
        text: the filter.

    Raises:
        ConfigError: the filter does not fit the index, or leaves none.
    """
    passes = Filter(text, index.fields, [spec.name for spec in fields])
    kept = passes.kept(index.num_samples, index.locate)
    if len(kept) == index.num_samples:
        return index, kept
    return View(index, kept, drops_chunks=True), kept


def numbered(sample_ids: Int64Array, kept: Int64Array) -> Int64Array:
    """The ids that samples have among those that are left; both in rising order."""
    at = np.minimum(np.searchsorted(kept, sample_ids), len(kept) - 1)
    ids: Int64Array = at[kept[at] == sample_ids]
    return ids


class Asked(Struct, frozen=True):
    """The facts that a filter needs and the index of a dataset lacks.

    Attributes:
        columns: names of stored fields whose values it compares.
        lengths: names of fields whose lengths it compares, and that are not stored.
    """

    columns: tuple[str, ...]
    lengths: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.columns or self.lengths)


def asked_of(text: str, fields: Sequence[FieldSpec]) -> Asked:
    """The facts that a filter needs and the index lacks; nothing where the text is no expression.

    Args:
        text: the filter.
        fields: of the dataset, with their names.
    """
    stored = {spec.name: spec for spec in stored_fields(fields)}
    known = {spec.name for spec in indexed_fields(fields)}
    try:
        names = [*_names(ast.parse(text.strip(), mode="eval"))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Asked((), ())  # `Filter` says why
    columns = {name for name, is_length in names if not is_length and name in stored} - known
    lengths = {name for name, is_length in names if is_length and name not in stored}
    return Asked(tuple(sorted(columns)), tuple(sorted(lengths)))


def _names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """The names of fields, each with whether its length is meant.

    Raises:
        ValueError: it calls an unknown function, so nothing need be read to refuse it.
    """
    match tree:
        case ast.Call(func=ast.Name(id="length" | "value" as word), args=[name]):
            is_text = isinstance(name, ast.Constant) and isinstance(name.value, str)
            yield (name.value if is_text else ast.unparse(name)), word == "length"  # type: ignore[attr-defined]
        case ast.Call():
            raise ValueError("no function of filters")
        case ast.Name() | ast.Attribute():
            yield ast.unparse(tree), False
        case _:
            for child in ast.iter_child_nodes(tree):
                yield from _names(child)


class Column(Struct, frozen=True):
    """The values of one stored field.

    Attributes:
        field: as if the index had it.
        values: [N], of all samples.
    """

    field: FieldSpec
    values: Values


def apply_late(
    dataset: Dataset, text: str, columns: Sequence[Column], made: Mapping[str, Int64Array]
) -> tuple[Dataset, Int64Array]:
    """The dataset with the samples that a filter leaves, and int64 [M], their ids without it.

    Args:
        dataset: of all samples, as they are stored.
        text: the filter.
        columns: the stored fields whose values it compares.
        made: int64 [N], by name, the lengths of fields that transforms make.

    Raises:
        ConfigError: the filter does not fit, or leaves none.
    """
    index, fields = dataset.index, dataset.fields
    lengths = [FieldSpec(name, np.dtype(np.uint8), (), ragged=True, codec="bytes") for name in made]
    known = [*stored_fields(fields), *lengths, *indexed_fields(fields)]
    known += [column.field for column in columns]
    passes = Filter(text, known, [spec.name for spec in known])

    def facts(ids: Int64Array) -> Extents:
        found = index.locate(ids)
        more = [lengths[ids][:, None] for lengths in made.values()]
        sizes = np.hstack((found.tensor_bytes, *more))
        values = tuple(column.values[ids] for column in columns)
        return Extents(found.shard, np.zeros_like(sizes), sizes, indexed=(*found.indexed, *values))

    kept = passes.kept(index.num_samples, facts)
    if len(kept) == index.num_samples:
        return dataset, kept
    identity = hashlib.blake2b(digest_size=16, person=b"gyre.filter")
    identity.update(dataset.fingerprint.encode() + kept.astype("<i8").tobytes())
    left = replace(
        dataset,
        index=View(index, kept, drops_chunks=False),
        corrupt=numbered(dataset.corrupt, kept),
        fingerprint=identity.hexdigest(),
        num_left_out=dataset.num_left_out + index.num_samples - len(kept),
    )
    return left, kept
