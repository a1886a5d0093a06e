"""Asks the daemon for the description of a dataset, and opens the stream of its batches."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.device import CudaTransfer, DeviceStream
from gyre_client.batches.stream import BatchStream
from gyre_client.errors import CursorRejected
from gyre_client.loader.agreement import Agreement
from gyre_client.loader.measuring_watch import MeasuringWatch
from gyre_client.messages.answers import MAX_CURSOR_BYTES, check_same_dataset
from gyre_client.messages.arguments import mapping, shown
from gyre_client.targets.target import Target
from gyre_client.transport.connection import Connection
from gyre_client.transport.outage import Outage


def describe(
    target: Target,
    dataset: pb.DatasetRef,
    transforms: pb.TransformList | None,
    reattach_timeout_s: float,
) -> pb.DatasetDescription:
    """Returns the daemon's description of a dataset; waits for a daemon that is away.

    Raises:
        GyreError: See `Loader`.
    """
    with Connection(target.address) as connection, MeasuringWatch(target, dataset.name):
        return Outage(reattach_timeout_s).retry(
            lambda timeout_s: connection.describe(dataset, timeout_s, transforms=transforms),
            _pause,
        )


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False  # nothing ends it before


def open_stream(
    request: pb.OpenSessionRequest,
    generations: Iterator[int],
    unfinished: list[BatchStream],
    *,
    target: Target,
    description: pb.DatasetDescription,
    device: torch.device | None,
    token_dtype: str,
    reattach_timeout_s: float,
    stall_timeout_s: float,
    agreement: Agreement,
) -> BatchStream | DeviceStream:
    """Opens a session and returns its stream.

    Args:
        request: Which batches, and from where on.
        generations: Numbers the sessions of the reader.
        unfinished: Receives the stream before it is open.
        target: The daemon.
        description: The dataset's description.
        device: See `Loader`, as for the others.
        token_dtype: See `Loader`.
        reattach_timeout_s: See `Loader`.
        stall_timeout_s: See `Loader`.
        agreement: Compares the ranks.

    Raises:
        GyreError: The daemon refuses, or the dataset is another one than was described, or than
            that of another rank.
    """
    # Made first: a device that fails opens no session.
    transfer = None if device is None else CudaTransfer(device)
    stream = BatchStream(
        target, request, reattach_timeout_s, token_dtype, stall_timeout_s, generations
    )
    unfinished.append(stream)
    stream.open()
    check_same_dataset(stream.opened, description)
    agreement.check(stream.opened)
    return stream if transfer is None else DeviceStream(stream, transfer)


def cursor_of(state_dict: Mapping[str, Any]) -> bytes:
    """Returns the cursor of a loader's state.

    Raises:
        InvalidRequest: It is no dict of names and values.
        CursorRejected: It is no state of a `Loader`.
    """
    cursor = mapping("state_dict", state_dict).get("cursor")
    if not isinstance(cursor, bytes) or not 0 < len(cursor) <= MAX_CURSOR_BYTES:
        raise CursorRejected(
            f"this is no state of a Loader: it has {shown(sorted(state_dict))}, "
            f"and `cursor` must be bytes, at most {MAX_CURSOR_BYTES}"
        )
    return cursor
