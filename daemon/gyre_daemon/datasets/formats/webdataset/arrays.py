"""Decides how the npy arrays of a field become one tensor of a batch.

All arrays of a field have one type and one number of dims. If they have one shape, they are
stacked. If they differ in their first dim alone, a batch has their rows one after the other, and
its offsets count rows. If they differ in other dims, it has all elements one after the other, its
offsets count elements, and the tensor `NAME.shape` has the shape of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.datasets.formats.base import SHAPE_SUFFIX, FieldSpec
from gyre_daemon.datasets.formats.webdataset.fields import FieldLocations, TarField, TarShard
from gyre_daemon.datasets.formats.webdataset.scan import corrupt
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.shuffle.permutation import Int64Array

_INT64 = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class ArrayField:
    """A field whose samples are npy arrays.

    Attributes:
        spec: of the field.
        lengths: int64 [N], bytes of each array; None if all have the same.
        shape: the spec of the indexed field of the shapes; None if the batch does not need them.
        shapes: int64 [N, dims]; zeros for a sample without an array.
    """

    spec: FieldSpec
    lengths: Int64Array | None
    shape: FieldSpec | None
    shapes: Int64Array


def array_field(
    field: TarField, shards: Sequence[TarShard], locations: Sequence[FieldLocations]
) -> ArrayField:
    """Decide how the arrays of all shards are served.

    Raises:
        CorruptSample: they differ in type or in their number of dims; names the first that does.
        ConfigError: there are no arrays, so their type is not known.
    """
    dtype, num_dims = _common_type(field, shards)
    shapes = np.concatenate(
        [_shapes(each, its, num_dims) for each, its in zip(shards, locations, strict=True)]
    )
    present = np.concatenate([its.member for its in locations]) >= 0
    first = shapes[np.argmax(present)]
    differs = (shapes != first)[present].any(axis=0)
    if not differs.any():
        spec = FieldSpec(field.name, dtype, tuple(first.tolist()), ragged=False, codec="npy")
        return ArrayField(spec, None, None, shapes)
    lengths = np.where(present, shapes.prod(axis=1) * dtype.itemsize, 0)
    if not differs[1:].any() and first[1:].all():
        spec = FieldSpec(field.name, dtype, tuple(first[1:].tolist()), ragged=True, codec="npy")
        return ArrayField(spec, lengths, None, shapes)
    spec = FieldSpec(field.name, dtype, (), ragged=True, codec="npy")
    name = field.name + SHAPE_SUFFIX
    shape = FieldSpec(name, _INT64, (num_dims,), ragged=False, codec="indexed")
    return ArrayField(spec, lengths, shape, shapes)


def _common_type(field: TarField, shards: Sequence[TarShard]) -> tuple[np.dtype[np.generic], int]:
    """The little-endian type and the number of dims of all arrays."""
    first: tuple[str, int, str] | None = None
    for shard in shards:
        for extension, dtype, num_dims, offset, key in shard.meta["arrays"]:
            if extension not in field.extensions:
                continue
            if first is None:
                first = dtype, num_dims, f"sample `{key}` of shard {shard.name}"
            if (dtype, num_dims) != first[:2]:
                reason = (
                    f"sample `{key}` has as its {field.name} an array of {num_dims} dims of type "
                    f"{dtype}, and {first[2]} has one of {first[1]} dims of type {first[0]}; a "
                    "field's arrays must have one type and one number of dims"
                )
                raise corrupt(shard.name, offset, reason, field=field.name, key=key)
    if first is None:
        raise ConfigError(
            f"no shard has a member {field.members}, so the type of the field `{field.name}` is "
            "not known"
        )
    return np.dtype(first[0]), first[1]


def _shapes(shard: TarShard, locations: FieldLocations, num_dims: int) -> Int64Array:
    """Int64 [n, dims], zeros for a sample without an array."""
    scan, present = shard.scan, locations.member >= 0
    member = locations.member[present]
    row = np.searchsorted(scan["array"], member)
    if (row >= len(scan["array"])).any() or (scan["array"][row] != member).any():
        raise corrupt(shard.name, 0, "its index lacks the shapes of arrays; remove the index")
    shapes = np.zeros((len(present), num_dims), np.int64)
    shapes[present] = scan["shape"][scan["dim"][row][:, None] + np.arange(num_dims)]
    # in floats, since a damaged index may have sizes whose product overflows
    itemsize = scan["itemsize"][row[0]] if len(row) else 0
    if (shapes < 0).any() or (
        shapes.astype(np.float64).prod(axis=1) * itemsize > locations.size
    ).any():
        reason = "its index has shapes that its arrays cannot have; remove the index"
        raise corrupt(shard.name, 0, reason)
    return shapes
