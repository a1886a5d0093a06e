"""Which tensors the batches of a session have, and whether a layout that a daemon sends fits.

Nothing is read from memory, or allocated, by a layout that was not checked here.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import DaemonFault

SAMPLE_ID = "sample_id"
MASK = "mask"
OFFSETS_SUFFIX = ".offsets"

# By numpy's names, the dtypes that torch has as well; and bfloat16, which numpy has not.
BFLOAT16 = "bfloat16"
DTYPE_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    BFLOAT16: 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
ALIGNMENT_BYTES = 64
# More than any batch or arena that a machine holds, and far from where sizes overflow.
MAX_BYTES = 1 << 46


class _Tensor(NamedTuple):
    """The known properties of a tensor before it comes.

    Attributes:
        dtype: Its dtype.
        num_rows: Its first dim; None for the elements of a ragged field.
        row_shape: Its other dims.
    """

    dtype: str
    num_rows: int | None
    row_shape: tuple[int, ...]


def check_fields(fields: Sequence[pb.Field]) -> None:
    """Checks the fields of a dataset.

    Raises:
        DaemonFault: A batch cannot have such fields: unknown dtypes, or equal names.
    """
    names = {SAMPLE_ID, MASK}
    for field in fields:
        own = {field.name, field.name + OFFSETS_SUFFIX} if field.ragged else {field.name}
        if not field.name or own & names:
            raise DaemonFault(f"the daemon names {field.name!r} as a field, but it cannot be one")
        names |= own
        if field.dtype not in DTYPE_BYTES:
            raise DaemonFault(
                f"the daemon says that the field {field.name!r} has the dtype {field.dtype!r}, "
                f"which is none of {', '.join(DTYPE_BYTES)}"
            )
        if prod(field.shape) * DTYPE_BYTES[field.dtype] > MAX_BYTES:
            raise DaemonFault(
                f"the daemon says that the field {field.name!r} has the shape {list(field.shape)}, "
                "which fits into no memory"
            )


class BatchTensors:
    """The tensors that each batch of a session has.

    Attributes:
        ragged: The names of the fields whose samples differ in length.
    """

    def __init__(self, fields: Sequence[pb.Field], num_samples: int, *, has_mask: bool) -> None:
        """Takes fields that were checked.

        Args:
            fields: The fields of the dataset.
            num_samples: B, in each batch of this rank.
            has_mask: Whether the last batch of an epoch is filled up.
        """
        self._tensors = {SAMPLE_ID: _Tensor("int64", num_samples, ())}
        if has_mask:
            self._tensors[MASK] = _Tensor("bool", num_samples, ())
        for field in fields:
            num_rows = None if field.ragged else num_samples
            self._tensors[field.name] = _Tensor(field.dtype, num_rows, tuple(field.shape))
            if field.ragged:
                self._tensors[field.name + OFFSETS_SUFFIX] = _Tensor("int64", num_samples + 1, ())
        self.ragged = tuple(field.name for field in fields if field.ragged)

    def check(self, layout: pb.Layout) -> None:
        """Checks the layout of a batch: all tensors, one behind the other, inside its payload.

        Raises:
            DaemonFault: It is not the layout of a batch of this session; says how they differ.
        """
        names = [tensor.name for tensor in layout.tensors]
        if len(names) != len(self._tensors) or set(names) != self._tensors.keys():
            raise DaemonFault(
                f"the daemon sent a batch with the tensors {_listed(names)}, "
                f"but this session's batches have {_listed(self._tensors)}"
            )
        end = 0
        for tensor in layout.tensors:
            self._check_shape(tensor)
            if tensor.offset_bytes < end or tensor.offset_bytes % ALIGNMENT_BYTES:
                raise DaemonFault(
                    f"the daemon put the tensor {tensor.name!r} at byte {tensor.offset_bytes} of "
                    f"its batch, where it overlaps another one or is not aligned to "
                    f"{ALIGNMENT_BYTES} bytes"
                )
            end = tensor.offset_bytes + prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if not end <= layout.num_bytes < end + ALIGNMENT_BYTES or end > MAX_BYTES:
            raise DaemonFault(
                f"the daemon announced a batch of {layout.num_bytes} bytes, "
                f"but its tensors end at byte {end}"
            )

    def _check_shape(self, tensor: pb.Tensor) -> None:
        dtype, num_rows, row_shape = self._tensors[tensor.name]
        shape = tuple(tensor.shape)
        rows = shape[:1] if num_rows is None else (num_rows,)
        if tensor.dtype != dtype or not shape or shape != (*rows, *row_shape):
            wanted = ["*" if num_rows is None else num_rows, *row_shape]
            raise DaemonFault(
                f"the daemon sent the tensor {tensor.name!r} as {tensor.dtype} {list(shape)}, "
                f"but it is {dtype} [{', '.join(map(str, wanted))}] in this session"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
