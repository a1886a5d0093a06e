"""Turns the user's arguments into protocol messages, and checks them where they are handed in."""

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
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1

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
    """
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
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidRequest(f"{name} is {value!r}; it must be a whole number") from None
    if not least <= number <= most:
        raise InvalidRequest(f"{name} is {number}; it must be from {least} to {most}")
    return number


def choice(argument: str, word: str, values: Mapping[str, _Value]) -> _Value:
    """Returns the protocol's value for `word`.

    Raises:
        InvalidRequest: `word` is not a key of `values`; the message lists the keys.
    """
    if word not in values:
        raise InvalidRequest(f"{argument} is {word!r}; it can be {', '.join(map(repr, values))}")
    return values[word]


def dataset_ref(
    dataset: str | os.PathLike[str],
    data_format: str | None = None,
    options: Mapping[str, object] | None = None,
) -> pb.DatasetRef:
    """Returns the message that names a dataset to a daemon.

    Args:
        dataset: A name that the daemon's operator gave; with `data_format`, a URI or a path.
        data_format: Makes `dataset` an ad-hoc definition in this format.
        options: The definition's other keys, as plain Python values.

    Raises:
        InvalidRequest: There are options but no format, an option is of no type of TOML, or the
            name is empty.
    """
    text = os.fspath(dataset)
    if not text:
        raise InvalidRequest("the name of the dataset is empty")
    if data_format is None:
        if options:
            raise InvalidRequest(
                f"options ({', '.join(options)}) need a format; "
                f"without one, {text!r} is a dataset's name"
            )
        return pb.DatasetRef(name=text)
    uri = text if "://" in text else str(Path(text).absolute())
    values = {key: option_value(value) for key, value in (options or {}).items()}
    return pb.DatasetRef(ad_hoc=pb.AdHocDataset(uri=uri, format=data_format, options=values))


def option_value(value: object) -> pb.OptionValue:
    """Returns an option of an ad-hoc dataset as the protocol has it.

    Raises:
        InvalidRequest: `value` is of another type than TOML's, or an integer of more than 64 bits.
    """
    match value:
        case bool():
            return pb.OptionValue(boolean=value)
        case int():
            if not MIN_INT64 <= value <= MAX_INT64:
                raise InvalidRequest(
                    f"an option value has {value.bit_length()} bits; integers may have 64"
                )
            return pb.OptionValue(integer=value)
        case float():
            return pb.OptionValue(real=value)
        case str():
            try:
                return pb.OptionValue(text=value)
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    f"the option value {value!r:.200} is no text: it has half a surrogate pair"
                ) from error
        case Mapping():
            values = {str(key): option_value(item) for key, item in value.items()}
            return pb.OptionValue(table=pb.OptionTable(values=values))
        case Sequence() if not isinstance(value, bytes | bytearray):
            return pb.OptionValue(list=pb.OptionList(values=map(option_value, value)))
    raise InvalidRequest(
        f"the option value {value!r} is neither a string, number, boolean, list nor mapping"
    )
