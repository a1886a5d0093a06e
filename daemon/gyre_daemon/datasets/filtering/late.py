"""Filters over facts that no index has: stored columns, and lengths that transforms make. Pure.

Such values are found once for all samples, and then a filter is computed from them as from the
index itself.
"""

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from gyre_protos.text import counted

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.filtering.expression import Filter, Values
from gyre_daemon.datasets.filtering.index import Filtered, numbered
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, indexed_fields, stored_fields
from gyre_daemon.datasets.formats.field_spec import Extents
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.shuffle.permutation import Int64Array

_AT_ONCE = 1 << 16  # samples looked at together


@dataclass(frozen=True, slots=True)
class Asked:
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


@dataclass(frozen=True, slots=True)
class Column:
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
    parts = []
    for begin in range(0, index.num_samples, _AT_ONCE):
        ids = np.arange(begin, min(begin + _AT_ONCE, index.num_samples))
        parts.append(ids[passes(_wide(index, ids, columns, made))])
    kept = np.concatenate(parts)
    if not len(kept):
        raise ConfigError(
            f"the filter {text!r:.200} leaves none of {counted(index.num_samples, 'sample')}"
        )
    if len(kept) == index.num_samples:
        return dataset, kept
    identity = hashlib.blake2b(digest_size=16, person=b"gyre.filter")
    identity.update(dataset.fingerprint.encode() + kept.astype("<i8").tobytes())
    left = replace(
        dataset,
        index=Filtered(index, kept, drops_chunks=False),
        corrupt=numbered(dataset.corrupt, kept),
        fingerprint=identity.hexdigest(),
        num_left_out=dataset.num_left_out + index.num_samples - len(kept),
    )
    return left, kept


def _wide(
    index: SampleIndex, ids: Int64Array, columns: Sequence[Column], made: Mapping[str, Int64Array]
) -> Extents:
    """The index's facts of samples, and those found since."""
    found = index.locate(ids)
    more = [lengths[ids][:, None] for lengths in made.values()]
    sizes = np.hstack((found.tensor_bytes, *more))
    values = tuple(column.values[ids] for column in columns)
    return Extents(found.shard, np.zeros_like(sizes), sizes, indexed=(*found.indexed, *values))
