"""Single samples, as text and values that can be printed. It needs neither torch nor numpy: a look takes one batch."""

import argparse
import struct
from collections.abc import Iterable
from math import prod
from typing import Any

import grpc
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.arguments import order, reader
from gyre_client.connection import Connection, error_from
from gyre_client.errors import DaemonFault
from gyre_client.outbox import Outbox
from gyre_client.wire import chunk_data

MAX_SHOWN_CHARS = 300
MAX_SHOWN_VALUES = 16
_HEARTBEATS_PER_LEASE = 4

# How `struct` calls numpy's dtypes; a complex number is two floats.
_CODES = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q",
    "uint64": "Q", "float16": "e", "float32": "f", "float64": "d", "complex64": "ff", "complex128": "dd",
}  # fmt: skip


class _Batch:
    """One batch's tensors, as the daemon lays them out."""

    def __init__(self, layout: pb.Layout, payload: bytes) -> None:
        self._tensors = {tensor.name: tensor for tensor in layout.tensors}
        self._payload = payload

    def shape(self, name: str) -> list[int]:
        """Of a whole tensor."""
        return list(self._tensors[name].shape)

    def values(self, name: str, start: int, stop: int) -> list[Any]:
        """The rows [start, stop) of a tensor, as (nested) lists."""
        tensor = self._tensors[name]
        code, row_shape = _CODES[tensor.dtype], list(tensor.shape)[1:]
        num_numbers = len(code) * prod(row_shape) * (stop - start)
        numbers = struct.unpack(f"<{num_numbers}{code[0]}", self.bytes(name, start, stop))
        items = list(numbers) if len(code) == 1 else [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        return _nested(items, [stop - start, *row_shape])

    def bytes(self, name: str, start: int, stop: int) -> bytes:
        """The same rows as they lie in memory."""
        tensor = self._tensors[name]
        row_bytes = struct.calcsize(f"<{_CODES[tensor.dtype]}") * prod(list(tensor.shape)[1:])
        begin = tensor.offset_bytes + start * row_bytes
        return self._payload[begin : begin + (stop - start) * row_bytes]


def read_samples(
    connection: Connection, dataset: pb.DatasetRef, description: pb.DatasetDescription, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns the first `args.num` samples of the shuffle by `args.seed`: sample_id, and dtype, shape and value by field.

    A value is text where the field is ragged bytes in UTF-8, hexadecimal where they are not, else (nested) lists.
    """
    num_samples = min(args.num, description.num_samples)
    request = pb.OpenSessionRequest(
        dataset=dataset,
        order=order(num_samples, 1, args.seed, "wrap"),
        reader=reader(None, 0, 1),
        prefetch_batches=1,
    )
    batch = _first_batch(connection, connection.open_session(request))
    ids = batch.values("sample_id", 0, num_samples)
    return [
        {"sample_id": ids[place], "fields": {field.name: _field(batch, field, place) for field in description.fields}}
        for place in range(num_samples)
    ]


def show(samples: Iterable[dict[str, Any]]) -> str:
    """Returns the samples one below the other, long values cut."""
    return "\n\n".join(
        "\n".join([f"sample {sample['sample_id']}", *(f"  {name}  {_head(field)}" for name, field in sample["fields"].items())])
        for sample in samples
    )


def _first_batch(connection: Connection, opened: pb.SessionOpened) -> _Batch:
    outbox = Outbox(opened.session_id, num_credits=1)
    stream = connection.stream(outbox.messages(opened.lease_s / _HEARTBEATS_PER_LEASE, lambda: None))
    try:
        strip = next((response.batches.strips[0] for response in stream if response.HasField("batches")), None)
        if strip is None:
            raise DaemonFault(f"the daemon at {connection.address.text} sent no batch")
        return _Batch(strip.layouts[0], _payload(connection, opened.session_id, strip.layouts[0].num_bytes))
    except grpc.RpcError as failure:
        raise error_from(failure, connection.address) from None
    finally:
        outbox.close()
        stream.cancel()  # type: ignore[no-untyped-call]


def _payload(connection: Connection, session_id: str, num_bytes: int) -> bytes:
    data = bytearray()
    frames = connection.read_payload(session_id)
    while len(data) < num_bytes:
        data += chunk_data(next(iter(frames)))
    frames.cancel()  # type: ignore[no-untyped-call]
    return bytes(data)


def _field(batch: _Batch, field: pb.Field, place: int) -> dict[str, Any]:
    if not field.ragged:
        return _told(field, batch.shape(field.name)[1:], batch.values(field.name, place, place + 1)[0])
    start, stop = batch.values(f"{field.name}.offsets", place, place + 2)
    shape = [stop - start, *batch.shape(field.name)[1:]]
    if field.dtype != "uint8":
        return _told(field, shape, batch.values(field.name, start, stop))
    return _told(field, shape, _text(batch.bytes(field.name, start, stop)))


def _told(field: pb.Field, shape: list[int], value: Any) -> dict[str, Any]:
    return {"dtype": field.dtype, "shape": shape, "value": value}


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.hex()


def _nested(items: list[Any], shape: list[int]) -> list[Any]:
    """The items in C order as lists of that shape."""
    if len(shape) <= 1:
        return items
    size = prod(shape[1:])
    return [_nested(items[row * size : (row + 1) * size], shape[1:]) for row in range(shape[0])]


def _head(field: dict[str, Any]) -> str:
    value = field["value"]
    if isinstance(value, list):
        more = " ..." if len(value) > MAX_SHOWN_VALUES else ""
        shown = f"[{', '.join(str(item) for item in value[:MAX_SHOWN_VALUES])}{more}]"
    else:
        shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
    return f"{field['dtype']} {field['shape']}  {shown}"
