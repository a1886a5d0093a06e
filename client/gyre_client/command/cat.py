"""`gyre cat`: single samples, as text and values that can be printed.

It takes one batch over gRPC and needs neither torch nor numpy.
"""

import argparse
import struct
from collections.abc import Iterable
from math import prod
from typing import Any

import grpc
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import dataset_of
from gyre_client.command.formatting import CommandOutput
from gyre_client.errors import DaemonFault
from gyre_client.messages.answers import check_group, check_same_dataset
from gyre_client.messages.arguments import MAX_UINT32, whole
from gyre_client.messages.frames import chunk_data
from gyre_client.messages.layouts import OFFSETS_SUFFIX, BatchTensors
from gyre_client.messages.requests import order, reader
from gyre_client.printable import printable
from gyre_client.transport.connection import OPEN_TIMEOUT_S, Connection, error_from
from gyre_client.transport.outbox import Outbox

MAX_SHOWN_CHARS = 300
MAX_SHOWN_VALUES = 16
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
    "float32": "f",
    "float64": "d",
    "complex64": "ff",
    "complex128": "dd",
}


def cat(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the first `args.num` samples of the shuffle by `args.seed`.

    Each is its sample_id and, by field, dtype, shape and value. The value of ragged bytes is text
    if they are UTF-8, else hexadecimal; all other values are (nested) lists.
    """
    whole("num", args.num, 1, MAX_UINT32)
    description = connection.describe(dataset_of(args))
    num_samples = min(args.num, description.num_samples)
    request = pb.OpenSessionRequest(
        dataset=dataset_of(args),
        order=order(num_samples, 1, args.seed, "wrap"),
        reader=reader(None, 0, 1),
        prefetch_batches=1,
    )
    opened = connection.open_session(request)
    check_same_dataset(opened, description)
    batch = _first_batch(
        connection, opened, BatchTensors(opened.fields, num_samples, has_mask=False)
    )
    ids = batch.values("sample_id", 0, num_samples)
    samples = [
        {
            "sample_id": ids[row],
            "fields": {field.name: _field(batch, field, row) for field in description.fields},
        }
        for row in range(num_samples)
    ]
    return CommandOutput(samples, _text(samples))


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
        items: list[Any] = list(numbers)
        if len(code) == 2:
            items = [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        return _nested(items, [stop - start, *shape])

    def bytes(self, name: str, start: int, stop: int) -> bytes:
        """Returns the same rows as they lie in memory."""
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


def _field(batch: _Batch, field: pb.Field, row: int) -> dict[str, Any]:
    shape = batch.row_shape(field.name)
    value: Any
    if field.ragged:
        start, stop = batch.values(f"{field.name}.offsets", row, row + 2)
        shape = [stop - start, *shape]
        if field.dtype == "uint8":
            value = _decoded(batch.bytes(field.name, start, stop))
        else:
            value = batch.values(field.name, start, stop)
    else:
        value = batch.values(field.name, row, row + 1)[0]
    return {"dtype": field.dtype, "shape": shape, "value": value}


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.hex()


def _nested(items: list[Any], shape: list[int]) -> list[Any]:
    """Returns items in C order as lists of that shape."""
    if len(shape) <= 1:
        return items
    size = prod(shape[1:])
    return [_nested(items[row * size : (row + 1) * size], shape[1:]) for row in range(shape[0])]


def _text(samples: Iterable[dict[str, Any]]) -> str:
    """Returns the samples one below the other, with long values cut."""
    parts = []
    for sample in samples:
        lines = [f"sample {sample['sample_id']}"]
        lines += [
            f"  {printable(name)}  {_shown(field)}" for name, field in sample["fields"].items()
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _shown(field: dict[str, Any]) -> str:
    value = field["value"]
    if isinstance(value, list):
        more = " ..." if len(value) > MAX_SHOWN_VALUES else ""
        shown = f"[{', '.join(str(item) for item in value[:MAX_SHOWN_VALUES])}{more}]"
    else:
        shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
    return f"{printable(field['dtype'])} {field['shape']}  {shown}"
