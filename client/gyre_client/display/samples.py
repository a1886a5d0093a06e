"""Single samples of a dataset, for commands that show them.

They come in one batch over gRPC, which needs neither torch nor numpy.
"""

import struct
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import grpc
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import DaemonFault
from gyre_client.messages.answers import check_group, check_same_dataset
from gyre_client.messages.frames import chunk_data
from gyre_client.messages.layouts import BFLOAT16, OFFSETS_SUFFIX, BatchTensors
from gyre_client.messages.requests import order, reader
from gyre_client.transport.connection import OPEN_TIMEOUT_S, Connection, error_from
from gyre_client.transport.outbox import Outbox

_HEARTBEATS_PER_LEASE = 4

# The `struct` codes of numpy's dtypes; a complex number is two floats.
_CODES = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    BFLOAT16: "H",  # the upper half of a float32
    "float32": "f",
    "float64": "d",
    "complex64": "ff",
    "complex128": "dd",
}


class Value(NamedTuple):
    """One field of one sample.

    Attributes:
        dtype: The dtype of its tensor.
        shape: The shape of its tensor.
        data: The bytes of a ragged field of uint8; else the number, or (nested) lists of numbers.
    """

    dtype: str
    shape: Sequence[int]
    data: Any


class Sample(NamedTuple):
    """One sample; its values by the names of its fields."""

    sample_id: int
    values: dict[str, Value]


def first_samples(
    connection: Connection,
    dataset: pb.DatasetRef,
    description: pb.DatasetDescription,
    num_samples: int,
    seed: int,
    transforms: pb.TransformList | None = None,
) -> list[Sample]:
    """Returns the first samples of the shuffle by a seed, at most as many as the dataset has.

    Args:
        connection: To the daemon.
        dataset: To read.
        description: The dataset's description, with these transforms.
        num_samples: How many.
        seed: The seed of the shuffle.
        transforms: Applied to samples; None for those of the dataset's definition.

    Raises:
        DaemonFault: The daemon sends no such batch.
    """
    num_samples = min(num_samples, description.num_samples)
    request = pb.OpenSessionRequest(
        dataset=dataset,
        order=order(num_samples, 1, seed, "drop"),
        reader=reader(None, 0, 1),
        prefetch_batches=1,
        transforms=transforms,
    )
    opened = connection.open_session(request)
    check_same_dataset(opened, description)
    return _samples_of(connection, opened, num_samples, has_mask=False)


def sample_of_step(
    connection: Connection, located: pb.LocateStepResponse, request: pb.LocateStepRequest, row: int
) -> Sample:
    """Returns one row of a global batch of a job, as `rows_of_step` does."""
    (sample,) = rows_of_step(connection, located, request, row, 1)
    return sample


def rows_of_step(
    connection: Connection,
    located: pb.LocateStepResponse,
    request: pb.LocateStepRequest,
    first: int,
    num_rows: int,
    *,
    job: str | None = None,
    is_as_served: bool = False,
) -> list[Sample]:
    """Returns rows of a global batch of a job.

    Their fields are as they are stored. Where documents are packed or batches have buckets, lengths
    after transforms decide which samples a row has, and the fields are as served.

    Args:
        connection: To the daemon.
        located: The step.
        request: The request for `located`.
        first: The first row, a multiple of `num_rows`.
        num_rows: How many; they divide the global batch.
        job: The name of the session that reads them; None for any.
        is_as_served: Whether all fields are as the job gets them.

    Raises:
        DaemonFault: The daemon sends no such batch.
    """
    is_packed = any(sample.num_tokens for each in located.rows for sample in each.samples)
    is_as_served = is_as_served or is_packed or located.order.HasField("bucket")
    given = request.transforms if request.HasField("transforms") else None
    asked = pb.OpenSessionRequest(
        dataset=request.dataset,
        order=located.order,
        cursor=request.cursor,
        step=located.batch,
        reader=reader(job, first // num_rows, located.order.global_batch_size // num_rows),
        prefetch_batches=1,
        transforms=given if is_as_served else pb.TransformList(),
        changed_transforms=not is_as_served,
    )
    opened = connection.open_session(asked)
    has_mask = located.order.tail == pb.TAIL_PAD
    return _samples_of(connection, opened, num_rows, has_mask=has_mask)


def _samples_of(
    connection: Connection, opened: pb.SessionOpened, num_samples: int, *, has_mask: bool
) -> list[Sample]:
    """Returns the samples of a session's first batch."""
    tensors = BatchTensors(opened.fields, num_samples, has_mask=has_mask)
    batch = _first_batch(connection, opened, tensors)
    ids = batch.values("sample_id", 0, num_samples)
    fields = opened.fields
    return [
        Sample(ids[row], {each.name: _value(batch, each, row) for each in fields})
        for row in range(num_samples)
    ]


class _Batch:
    """One batch's tensors, as the daemon lays them out."""

    def __init__(self, layout: pb.Layout, payload: bytes) -> None:
        self._tensors = {tensor.name: tensor for tensor in layout.tensors}
        self._payload = payload

    def check_offsets(self, ragged: Iterable[str]) -> None:
        """Checks that the samples of each ragged field follow each other and fill the field.

        Raises:
            DaemonFault: They do not.
        """
        for name in ragged:
            num_elements, offsets = self._tensors[name].shape[0], f"{name}{OFFSETS_SUFFIX}"
            numbers = self.values(offsets, 0, self._tensors[offsets].shape[0])
            if numbers != sorted(numbers) or (numbers[0], numbers[-1]) != (0, num_elements):
                raise DaemonFault(f"{offsets!r} does not rise from 0 to {num_elements}")

    def row_shape(self, name: str) -> list[int]:
        """Returns the shape of one row of a tensor."""
        return list(self._tensors[name].shape)[1:]

    def values(self, name: str, start: int, stop: int) -> list[Any]:
        """Returns the rows [start, stop) of a tensor as (nested) lists."""
        code, shape = _CODES[self._tensors[name].dtype], self.row_shape(name)
        num_numbers = len(code) * prod(shape) * (stop - start)
        numbers = struct.unpack(f"<{num_numbers}{code[0]}", self.bytes(name, start, stop))
        if self._tensors[name].dtype == BFLOAT16:
            halves = struct.pack(f"<{num_numbers}I", *(number << 16 for number in numbers))
            numbers = struct.unpack(f"<{num_numbers}f", halves)
        items: list[Any] = list(numbers)
        if len(code) == 2:
            items = [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        return _nested(items, [stop - start, *shape])

    def bytes(self, name: str, start: int, stop: int) -> bytes:
        """Returns the bytes of the same rows."""
        tensor = self._tensors[name]
        row_bytes = struct.calcsize(f"<{_CODES[tensor.dtype]}") * prod(self.row_shape(name))
        begin = tensor.offset_bytes + start * row_bytes
        return self._payload[begin : begin + (stop - start) * row_bytes]


def _first_batch(connection: Connection, opened: pb.SessionOpened, tensors: BatchTensors) -> _Batch:
    outbox = Outbox(opened.session_id, num_credits=1)
    stream = connection.stream(
        outbox.messages(opened.lease_s / _HEARTBEATS_PER_LEASE, lambda: None), OPEN_TIMEOUT_S
    )
    try:
        for response in stream:
            if response.batches.groups:
                group = response.batches.groups[0]
                check_group(group, opened.first_step, 1)
                if len(group.layouts) != 1:
                    raise DaemonFault(f"one batch came with {len(group.layouts)} layouts")
                tensors.check(group.layouts[0])
                num_bytes = group.layouts[0].num_bytes
                payload = _payload(connection, opened.session_id, num_bytes)
                batch = _Batch(group.layouts[0], payload)
                batch.check_offsets(tensors.ragged)
                return batch
        raise DaemonFault(f"the daemon at {connection.address.text} sent no batch")
    except grpc.RpcError as failure:
        raise error_from(failure, connection.address) from None
    finally:
        outbox.close()
        stream.cancel()  # type: ignore[no-untyped-call]


def _payload(connection: Connection, session_id: str, num_bytes: int) -> bytes:
    data = bytearray()
    frames = connection.read_payload(session_id, OPEN_TIMEOUT_S)
    while len(data) < num_bytes and (frame := next(iter(frames), None)) is not None:
        data += chunk_data(frame)
    frames.cancel()  # type: ignore[no-untyped-call]
    if len(data) != num_bytes:
        raise DaemonFault(f"the daemon sent {len(data)} bytes of a batch of {num_bytes}")
    return bytes(data)


def _value(batch: _Batch, field: pb.Field, row: int) -> Value:
    """Returns a field of one of the samples of a batch."""
    shape = batch.row_shape(field.name)
    if not field.ragged:
        return Value(field.dtype, shape, batch.values(field.name, row, row + 1)[0])
    start, stop = batch.values(f"{field.name}{OFFSETS_SUFFIX}", row, row + 2)
    shape = [stop - start, *shape]
    if field.dtype == "uint8":
        return Value(field.dtype, shape, batch.bytes(field.name, start, stop))
    return Value(field.dtype, shape, batch.values(field.name, start, stop))


def _nested(items: list[Any], shape: list[int]) -> list[Any]:
    """Returns items in C order as lists of that shape."""
    if len(shape) <= 1:
        return items
    size = prod(shape[1:])
    return [_nested(items[row * size : (row + 1) * size], shape[1:]) for row in range(shape[0])]
