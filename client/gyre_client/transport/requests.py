"""Turns the user's arguments into protocol messages, and checks them where they are handed in."""

import json
import operator
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import SupportsIndex, TypeVar

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
MAX_SECONDS = 1e9

ORDERS = {
    "full": pb.ORDER_MODE_FULL,
    "block": pb.ORDER_MODE_BLOCK,
    "sequential": pb.ORDER_MODE_SEQUENTIAL,
}
TAILS = {"wrap": pb.TAIL_WRAP, "drop": pb.TAIL_DROP, "pad": pb.TAIL_PAD}
JOINS = {"alone": pb.JOIN_ALONE, "rotate": pb.JOIN_ROTATE}

_Value = TypeVar("_Value")


def order(
    batch_size: int,
    world_size: int,
    seed: int,
    tail: str,
    mode: str = "full",
    io_block_bytes: int = 0,
    window_blocks: int = 0,
) -> pb.OrderSpec:
    """Returns the order in which samples make batches; `batch_size` is global, over all ranks.

    Raises:
        InvalidRequest: A number is out of its range, the ranks cannot share a batch equally, there
            is no such order or tail, or an order without blocks is given their sizes.
    """
    batch_size, world_size = (
        whole("batch_size", batch_size, 1, MAX_UINT32),
        whole("world_size", world_size, 1, MAX_UINT32),
    )
    if batch_size % world_size:
        raise InvalidRequest(
            f"batch_size is the global batch size, over all ranks; {batch_size} is not divisible "
            f"by the world size, {world_size}: every rank reads an equal part"
        )
    spec = pb.OrderSpec(
        mode=choice("order", mode, ORDERS),
        tail=choice("tail", tail, TAILS),
        seed=whole("seed", seed, 0, MAX_UINT64),
        global_batch_size=batch_size,
        io_block_bytes=whole("io_block_bytes", io_block_bytes, 0, MAX_UINT64),
        window_blocks=whole("window_blocks", window_blocks, 0, MAX_UINT64),
    )
    if mode != "block" and (spec.io_block_bytes or spec.window_blocks):
        raise InvalidRequest(
            f"io_block_bytes and window_blocks belong to order='block', not to {mode!r}"
        )
    return spec


def reader(job: str | None, rank: int, world_size: int) -> pb.Reader:
    """Returns the identity of one reader: a rank of a job; a job without a name gets a random one.

    Its generation is the time in milliseconds, so that a restarted process is newer than the one
    before, and fences it off.

    Raises:
        InvalidRequest: The job's name is no text, or it has characters that cannot be printed.
    """
    if job is not None and not (isinstance(job, str) and job.isprintable()):
        raise InvalidRequest(f"job is {job!r:.200}; it must be text without control characters")
    generation = time.time_ns() // 1_000_000
    return pb.Reader(
        job=job or f"job-{uuid.uuid4().hex[:12]}",
        rank=rank,
        world_size=world_size,
        generation=generation,
    )


def whole(name: str, value: SupportsIndex, least: int, most: int) -> int:
    """Returns `value` as an int.

    Raises:
        InvalidRequest: `value` is not a whole number in [least, most].
    """
    if isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value}; it must be a number")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidRequest(f"{name} is {value!r}; it must be a whole number") from None
    if not least <= number <= most:
        raise InvalidRequest(f"{name} is {number}; it must be from {least} to {most}")
    return number


def seconds(name: str, value: float) -> float:
    """Returns `value` as a float.

    Raises:
        InvalidRequest: `value` is not a number of seconds in [0, 10^9], which is 30 years.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} is {value!r}; it must be a number of seconds")
    if not 0 <= value <= MAX_SECONDS:
        raise InvalidRequest(f"{name} is {value}; it must be from 0 to {MAX_SECONDS:.0f} seconds")
    return float(value)


def choice(argument: str, word: str, values: Mapping[str, _Value]) -> _Value:
    """Returns the protocol's value for `word`.

    Raises:
        InvalidRequest: `word` is not a key of `values`; the message lists the keys.
    """
    if word not in values:
        raise InvalidRequest(f"{argument} is {word!r}; it can be {', '.join(map(repr, values))}")
    return values[word]


def is_location(dataset: str | os.PathLike[str], data_format: str | None) -> bool:
    """Returns whether a dataset is a path or URI and not a name.

    It is one if it has a format, is no str, has a scheme, or begins as paths do: `/data`, `./data`,
    `../data`, `~/data`.
    """
    if data_format is not None or not isinstance(dataset, str):
        return True
    return dataset.startswith(("/", "./", "../", "~")) or "://" in dataset


def dataset_ref(
    dataset: str | os.PathLike[str],
    data_format: str | None = None,
    options: Mapping[str, object] | None = None,
) -> pb.DatasetRef:
    """Returns the message that names a dataset to a daemon.

    Args:
        dataset: A name that the daemon's operator gave; or a URI or path, see `is_location`.
        data_format: Makes `dataset` a URI or path of data in this format. If None, the daemon finds
            the format of a URI or path by the names of its files.
        options: The definition's other keys, as plain Python values.

    Raises:
        InvalidRequest: There are options for a name, TOML cannot express an option, or the name
            is empty.
    """
    text = os.fspath(dataset)
    if not text:
        raise InvalidRequest("the name of the dataset is empty")
    if not is_location(dataset, data_format):
        if options:
            raise InvalidRequest(
                f"options ({', '.join(options)}) need a path, a URI or a format; "
                f"{text!r} is a dataset's name"
            )
        return pb.DatasetRef(name=text)
    uri = text if "://" in text else str(Path(text).expanduser().absolute())
    values = {key: toml_value(value) for key, value in (options or {}).items()}
    return pb.DatasetRef(ad_hoc=pb.AdHocDataset(uri=uri, format=data_format or "", options=values))


def toml_value(value: object) -> str:
    """Returns `value` in TOML's syntax (https://toml.io/en/v1.0.0).

    Raises:
        InvalidRequest: TOML has no value of this type.
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
            items = (
                f"{_toml_string(str(key))} = {toml_value(item)}" for key, item in value.items()
            )
            return "{" + ", ".join(items) + "}"
        case Sequence() if not isinstance(value, bytes | bytearray):
            return "[" + ", ".join(map(toml_value, value)) + "]"
    raise InvalidRequest(
        f"the option value {value!r} is neither a string, number, boolean, list nor mapping"
    )


def _toml_string(text: str) -> str:
    # JSON's strings are valid in TOML, except that TOML does not allow a bare DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
