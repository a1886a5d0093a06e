"""The samples of a dataset in the order of their ids, as numpy arrays and bytes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest
from gyre_client.loader.loader import Loader

PRESENT_SUFFIX, SHAPE_SUFFIX = ".present", ".shape"
_OWN = ("sample_id", "mask")
# A batch is about this large, as far as samples are of one size.
_BATCH_BYTES, _MAX_BATCH = 4 << 20, 1024

# Bytes of a ragged field of uint8, an array of any other; None where the sample lacks the field.
Row = dict[str, bytes | npt.NDArray[Any] | None]


@dataclass(frozen=True)
class Column:
    """One field of the samples to write.

    Attributes:
        name: The field's name.
        dtype: The dtype of its elements.
        shape: The shape of a sample; of an element if it is ragged.
        is_ragged: Whether samples differ in length, or in shape.
        is_bytes: Whether a sample is bytes.
        is_text: Whether these are UTF-8.
        is_optional: Whether samples may lack it.
        has_shapes: Whether each sample is an array with a separate shape.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_ragged: bool
    is_bytes: bool
    is_text: bool
    is_optional: bool
    has_shapes: bool


def columns_of(description: pb.DatasetDescription) -> list[Column]:
    """Returns the fields of a dataset, without those that only say something of another.

    Raises:
        InvalidRequest: Its samples are packed sequences of several lengths.
    """
    if lengths := [f"{each.length:,}" for each in description.packing.lengths]:
        raise InvalidRequest(
            f"`{description.name}` is packed into sequences of several lengths, "
            f"{', '.join(lengths)}, and written samples have one. Give `pack` one "
            "length, or convert the documents."
        )
    names = {field.name for field in description.fields}

    def says_of(name: str, suffix: str) -> bool:
        return name.endswith(suffix) and name.removesuffix(suffix) in names

    return [
        Column(
            field.name,
            np.dtype(field.dtype),
            tuple(field.shape),
            field.ragged,
            field.ragged and field.dtype == "uint8" and not field.shape
            and field.name + SHAPE_SUFFIX not in names,
            field.text,
            field.name + PRESENT_SUFFIX in names,
            field.name + SHAPE_SUFFIX in names,
        )
        for field in description.fields
        if not says_of(field.name, PRESENT_SUFFIX) and not says_of(field.name, SHAPE_SUFFIX)
    ]  # fmt: skip


def rows_of(
    description: pb.DatasetDescription, columns: Sequence[Column], source: Mapping[str, Any]
) -> Iterator[Row]:
    """Yields all samples in the order of their ids.

    Args:
        description: The dataset's description.
        columns: Its fields.
        source: How a `Loader` finds it.

    Raises:
        InvalidRequest: The dataset was changed meanwhile.
    """
    sample_bytes = max(1, description.num_bytes // description.num_samples)
    size = max(1, min(_MAX_BATCH, _BATCH_BYTES // sample_bytes, description.num_samples))
    with Loader(
        **source,
        batch_size=size,
        rank=0,
        world_size=1,
        order="sequential",
        tail="pad",
        restart=True,
        token_dtype="stored",
    ) as loader:
        if loader.fingerprint != description.fingerprint:
            raise InvalidRequest("the dataset has changed while it was being converted; try again")
        for batch in loader:
            arrays = {name: tensor.numpy() for name, tensor in batch.items()}
            for row in np.flatnonzero(arrays["mask"]).tolist():
                yield {column.name: _value(arrays, column, row) for column in columns}


def _value(
    arrays: Mapping[str, npt.NDArray[Any]], column: Column, row: int
) -> bytes | npt.NDArray[Any] | None:
    name = column.name
    if column.is_optional and not arrays[name + PRESENT_SUFFIX][row]:
        return None
    if not column.is_ragged:
        return np.asarray(arrays[name][row])
    begin, end = arrays[f"{name}.offsets"][row : row + 2].tolist()
    value = arrays[name][begin:end]
    if column.has_shapes:
        return value.reshape(arrays[name + SHAPE_SUFFIX][row])
    return value.tobytes() if column.is_bytes else value
