"""What travels, and what the caller sees of it: requests out of plain values, plain values out of messages, payload frames.

A payload frame is the one message that no protobuf codec touches: `PayloadChunk { bytes data = 1; }` on the wire is the tag
0x0a, the length as a varint, the data (https://protobuf.dev/programming-guides/encoding). Its data is copied once, straight
from gRPC's buffer to where the batch is assembled.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import DaemonFault, InvalidRequest

MAX_CHUNK_BYTES = 1 << 20
MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 4  # the tag, and three bytes of varint for 2^20

_Value = TypeVar("_Value")

_DATA_TAG = 0x0A  # field 1, length-delimited

TAILS = {"wrap": pb.TAIL_WRAP, "drop": pb.TAIL_DROP, "pad": pb.TAIL_PAD}
ORDERS = {"full": pb.ORDER_MODE_FULL, "block": pb.ORDER_MODE_BLOCK, "sequential": pb.ORDER_MODE_SEQUENTIAL}
JOINS = {"alone": pb.JOIN_ALONE, "rotate": pb.JOIN_ROTATE}


def chunk_data(frame: bytes) -> memoryview:
    """Returns the data of one payload frame, without a copy.

    Raises:
        DaemonFault: The frame is not a PayloadChunk, or is longer than one may be.
    """
    view = memoryview(frame)
    if not view:
        return view  # proto3 leaves an empty field out
    length = 0
    for place, byte in enumerate(view[1:5]):
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if view[0] == _DATA_TAG and 2 + place + length == len(view) <= MAX_FRAME_BYTES:
                return view[2 + place :]
            break
    raise DaemonFault(f"a payload frame of {len(view)} bytes that starts with {bytes(view[:6]).hex()} is not a PayloadChunk")


def tail_value(tail: str) -> pb.Tail.ValueType:
    """Returns the protocol's value for `tail`.

    Raises:
        InvalidRequest: There is no such tail.
    """
    return _value("tail", tail, TAILS)


def order_value(order: str) -> pb.OrderMode.ValueType:
    """Returns the protocol's value for the order of that name.

    Raises:
        InvalidRequest: There is no such order.
    """
    return _value("order", order, ORDERS)


def join_value(join: str) -> pb.Join.ValueType:
    """Returns the protocol's value for a way to begin.

    Raises:
        InvalidRequest: There is no such way.
    """
    return _value("join", join, JOINS)


def _value(argument: str, word: str, values: Mapping[str, _Value]) -> _Value:
    if word not in values:
        raise InvalidRequest(f"{argument} is {word!r}; it can be {', '.join(map(repr, values))}")
    return values[word]


def dataset_ref(
    dataset: str | os.PathLike[str], data_format: str | None = None, options: Mapping[str, object] | None = None
) -> pb.DatasetRef:
    """Returns what names the dataset to a daemon.

    Args:
        dataset: A name that the daemon's operator gave; with `data_format`, a URI or a path.
        data_format: Makes `dataset` an ad-hoc definition in this format.
        options: The definition's remaining keys, as plain Python values.

    Raises:
        InvalidRequest: Options without a format, an option that TOML cannot express, or an empty name.
    """
    text = os.fspath(dataset)
    if not text:
        raise InvalidRequest("the name of the dataset is empty")
    if data_format is None:
        if options:
            raise InvalidRequest(f"options ({', '.join(options)}) need a format; without one, {text!r} is a dataset's name")
        return pb.DatasetRef(name=text)
    uri = text if "://" in text else str(Path(text).absolute())
    values = {key: toml_value(value) for key, value in (options or {}).items()}
    return pb.DatasetRef(ad_hoc=pb.AdHocDataset(uri=uri, format=data_format, options=values))


def toml_value(value: object) -> str:
    """Returns `value` in TOML's syntax (https://toml.io/en/v1.0.0).

    Raises:
        InvalidRequest: TOML has nothing for this type.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value)  # nan, inf and -inf are TOML's words too
        case str():
            return _toml_string(value)
        case Mapping():
            return "{" + ", ".join(f"{_toml_string(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
        case Sequence() if not isinstance(value, bytes | bytearray):
            return "[" + ", ".join(map(toml_value, value)) + "]"
    raise InvalidRequest(f"the option value {value!r} is neither a string, number, boolean, list nor mapping")


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's strings are TOML's, but for DEL


def plain(message: Message) -> dict[str, Any]:
    """Returns a message as JSON-ready values: every field by its name, integers as integers, what is absent as None."""
    return {
        field.name: None if field.has_presence and not message.HasField(field.name) else _plain_field(message, field.name)
        for field in message.DESCRIPTOR.fields
    }


def _plain_field(message: Message, name: str) -> Any:
    value = getattr(message, name)
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, str | bool | int | float):
        return value
    return [plain(item) if isinstance(item, Message) else item for item in value]
