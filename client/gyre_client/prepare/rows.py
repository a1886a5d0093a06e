"""Samples in the order of their ids, as numpy arrays and bytes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.samples import arrays_of
from gyre_client.errors import DaemonFault, InvalidRequest
from gyre_client.messages.answers import (
    BFLOAT16,
    MAX_BYTES,
    OFFSETS_SUFFIX,
    SAMPLE_ID,
    BatchTensors,
    check_description,
)
from gyre_client.transport.connection import Connection

PRESENT_SUFFIX, SHAPE_SUFFIX = ".present", ".shape"

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
# Bytes of a ragged field of uint8, an array of any other; None where the sample lacks the field.
Row = dict[str, bytes | Array | None]


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


@dataclass(frozen=True, slots=True)
class SampleRange:
    """A range of samples that a daemon sends.

    Attributes:
        description: Of the dataset.
        transforms: The identity of the transforms.
        batches: Successive samples by field, until all were sent.
    """

    description: pb.DatasetDescription
    transforms: str
    batches: Iterator[Arrays]


def read_range(connection: Connection, request: pb.ReadSamplesRequest) -> SampleRange:
    """Asks for a range of samples; an empty one gives the description alone.

    Raises:
        GyreError: The daemon refuses the dataset; later, a sample cannot be read.
    """
    chunks = iter(connection.read_samples(request))
    first = next(chunks, pb.SamplesChunk())
    check_description(first.description)
    batches = _batches(chunks, first.description.fields)
    return SampleRange(first.description, first.transforms, batches)


def _batches(chunks: Iterable[pb.SamplesChunk], fields: Sequence[pb.Field]) -> Iterator[Arrays]:
    ragged = [field.name for field in fields if field.ragged]
    layout, payload = pb.Layout(), bytearray()
    for chunk in chunks:
        if chunk.HasField("layout"):
            if len(payload) != layout.num_bytes:
                raise DaemonFault("the daemon sent a batch before the one before it was whole")
            layout, payload = chunk.layout, bytearray()
            _check(layout, fields)
        payload += chunk.data
        if len(payload) > layout.num_bytes:
            raise DaemonFault(f"the daemon sent more than a batch of {layout.num_bytes} bytes")
        if len(payload) == layout.num_bytes:
            yield arrays_of(layout, payload, ragged)
    if len(payload) != layout.num_bytes:
        raise DaemonFault("the daemon ended before the last batch was whole")


def _check(layout: pb.Layout, fields: Sequence[pb.Field]) -> None:
    ids = next((each for each in layout.tensors if each.name == SAMPLE_ID), pb.Tensor())
    if len(ids.shape) != 1 or not 0 < ids.shape[0] <= MAX_BYTES:
        raise DaemonFault("the daemon sent a batch without samples")
    BatchTensors(fields, ids.shape[0], has_mask=False).check(layout)


def columns_of(description: pb.DatasetDescription) -> list[Column]:
    """Returns the fields of a dataset, without those that only say something of another.

    Raises:
        InvalidRequest: numpy has no such dtype.
    """
    names = {field.name for field in description.fields}

    def says_of(name: str, suffix: str) -> bool:
        return name.endswith(suffix) and name.removesuffix(suffix) in names

    for field in description.fields:
        if field.dtype == BFLOAT16:
            raise InvalidRequest(f"{field.name!r}: no format has bfloat16. Cast it to float32.")
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


def rows_of(arrays: Arrays, columns: Sequence[Column]) -> list[Row]:
    """Returns the samples of a batch, one by one."""
    return [
        {column.name: _value(arrays, column, row) for column in columns}
        for row in range(len(arrays[SAMPLE_ID]))
    ]


def _value(arrays: Arrays, column: Column, row: int) -> bytes | Array | None:
    name = column.name
    if column.is_optional and not arrays[name + PRESENT_SUFFIX][row]:
        return None
    if not column.is_ragged:
        return np.asarray(arrays[name][row])
    begin, end = arrays[name + OFFSETS_SUFFIX][row : row + 2].tolist()
    value = arrays[name][begin:end]
    if column.has_shapes:
        return value.reshape(arrays[name + SHAPE_SUFFIX][row])
    return value.tobytes() if column.is_bytes else value
