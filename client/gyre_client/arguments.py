"""What a Loader's arguments mean to the daemon, checked where the user hands them in."""

import operator
import time
import uuid
from typing import SupportsIndex

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest
from gyre_client.wire import order_value, tail_value

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1


def order(
    batch_size: int,
    world_size: int,
    seed: int,
    tail: str,
    mode: str = "full",
    io_block_bytes: int = 0,
    window_blocks: int = 0,
) -> pb.OrderSpec:
    """Returns the order in which a dataset is gone through.

    Raises:
        InvalidRequest: A number out of its range, a batch that the ranks cannot share equally, an unknown order or tail, or
            blocks for an order that has none.
    """
    batch_size, world_size = whole("batch_size", batch_size, 1, MAX_UINT32), whole("world_size", world_size, 1, MAX_UINT32)
    if batch_size % world_size:
        raise InvalidRequest(
            f"batch_size is the global batch size, over all ranks; "
            f"{batch_size} is not divisible by the world size, {world_size}: every rank reads an equal part"
        )
    spec = pb.OrderSpec(
        mode=order_value(mode),
        tail=tail_value(tail),
        seed=whole("seed", seed, 0, MAX_UINT64),
        global_batch_size=batch_size,
        io_block_bytes=whole("io_block_bytes", io_block_bytes, 0, MAX_UINT64),
        window_blocks=whole("window_blocks", window_blocks, 0, MAX_UINT64),
    )
    if mode != "block" and (spec.io_block_bytes or spec.window_blocks):
        raise InvalidRequest(f"io_block_bytes and window_blocks belong to order='block', not to {mode!r}")
    return spec


def reader(job: str | None, rank: int, world_size: int) -> pb.Reader:
    """Returns who reads. The generation is the time, so that a restarted process is newer than its predecessor ever was."""
    generation = time.time_ns() // 1_000_000
    return pb.Reader(job=job or f"job-{uuid.uuid4().hex[:12]}", rank=rank, world_size=world_size, generation=generation)


def whole(name: str, value: SupportsIndex, least: int, most: int) -> int:
    """Returns `value` as an int.

    Raises:
        InvalidRequest: It is not a whole number in [least, most].
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidRequest(f"{name} is {value!r}; it must be a whole number") from None
    if not least <= number <= most:
        raise InvalidRequest(f"{name} is {number}; it must be from {least} to {most}")
    return number
