"""The npy arrays of a field: whether they are all of one shape, or ragged, and how.

Arrays of one field have one type and one number of dims. If they differ in their first dim alone, a batch has their rows one
after the other and the offsets count rows. If they differ in others, it has all elements one after the other, the offsets count
elements, and `NAME.shape` has the shape of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import SHAPE_SUFFIX, FieldSpec
from gyre_daemon.datasets.formats.tarfields import Column, ScannedShard, TarField
from gyre_daemon.datasets.formats.tarscan import corrupt
from gyre_daemon.errors import ConfigError

_Integers = npt.NDArray[np.int64]
_INT64 = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class ArrayField:
    """What is known of a field's arrays.

    Attributes:
        spec: of the field.
        lengths: int64 [N], bytes of each array; None where all have the same.
        shape: of the field's shapes as a field of their own; None where nobody needs them.
        shapes: int64 [N, dims]; zeros where a sample has no array.
    """

    spec: FieldSpec
    lengths: _Integers | None
    shape: FieldSpec | None
    shapes: _Integers


def array_field(field: TarField, shards: Sequence[ScannedShard], columns: Sequence[Column]) -> ArrayField:
    """Decide what the arrays of all shards are together.

    Raises:
        CorruptSample: they differ in type or in their number of dims; names the first that does.
        ConfigError: there is none, so that nobody knows their type.
    """
    dtype, num_dims = _common_kind(field, shards)
    shapes = np.concatenate([_shapes(each, its, num_dims) for each, its in zip(shards, columns, strict=True)])
    present = np.concatenate([its.member for its in columns]) >= 0
    first = shapes[np.argmax(present)]
    differs = (shapes != first)[present].any(axis=0)
    lengths = np.where(present, shapes.prod(axis=1) * dtype.itemsize, 0)
    if not differs.any():
        return ArrayField(FieldSpec(field.name, dtype, tuple(first.tolist()), ragged=False, codec="npy"), None, None, shapes)
    rest = first[1:]
    if not differs[1:].any() and rest.all():
        return ArrayField(FieldSpec(field.name, dtype, tuple(rest.tolist()), ragged=True, codec="npy"), lengths, None, shapes)
    shape = FieldSpec(field.name + SHAPE_SUFFIX, _INT64, (num_dims,), ragged=False, codec="known")
    return ArrayField(FieldSpec(field.name, dtype, (), ragged=True, codec="npy"), lengths, shape, shapes)


def _common_kind(field: TarField, shards: Sequence[ScannedShard]) -> tuple[np.dtype[np.generic], int]:
    """The type, little-endian, and the number of dims of all arrays."""
    first: tuple[str, int, str] | None = None
    for each in shards:
        for extension, dtype, num_dims, offset, key in each.meta["arrays"]:
            if extension not in field.extensions:
                continue
            if first is None:
                first = dtype, num_dims, f"sample `{key}` of shard {each.shard.name}"
            if (dtype, num_dims) != first[:2]:
                reason = (
                    f"sample `{key}` has as its {field.name} an array of {num_dims} dims of type {dtype}, and {first[2]} has "
                    f"one of {first[1]} dims of type {first[0]}; a field's arrays must have one type and one number of dims"
                )
                raise corrupt(each.shard.name, offset, reason, field=field.name, key=key)
    if first is None:
        raise ConfigError(f"no shard has a member {field.members}, so that nobody knows the type of the field `{field.name}`")
    return np.dtype(first[0]), first[1]


def _shapes(each: ScannedShard, column: Column, num_dims: int) -> _Integers:
    """int64 [n, dims], zeros where a sample has no array."""
    shapes = np.zeros((len(column.member), num_dims), np.int64)
    present = column.member >= 0
    rank = np.searchsorted(each.scan["array"], column.member[present])
    if (rank >= len(each.scan["array"])).any() or (each.scan["array"][rank] != column.member[present]).any():
        raise corrupt(each.shard.name, 0, "its index lacks the shapes of arrays; remove the index")
    shapes[present] = each.scan["shape"][each.scan["dim"][rank][:, None] + np.arange(num_dims)]
    size = shapes.astype(np.float64).prod(axis=1) * each.scan["itemsize"][rank[0]] if present.any() else np.zeros(len(shapes))
    if (shapes < 0).any() or (size > column.size).any():
        raise corrupt(each.shard.name, 0, "its index has shapes that its arrays cannot have; remove the index")
    return shapes
