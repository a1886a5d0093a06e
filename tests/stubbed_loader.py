"""Loaders of a daemon that lies, and changes of what it says."""

from collections.abc import Callable
from typing import Any

import torch
from gyre_client import Loader
from gyre_protos.v1 import loader_pb2 as pb

from tests.stub_daemon import (
    BATCH_SIZE,
    StubDaemon,
    group,
)

Change = Callable[[Any], object]


def loader_of(stub: StubDaemon, **arguments: Any) -> Loader:
    return Loader(
        "d", batch_size=BATCH_SIZE, address=stub.address, reattach_timeout_s=0.5, **arguments
    )


def read_all(stub: StubDaemon, num_batches: int, **arguments: Any) -> list[dict[str, torch.Tensor]]:
    with stub, loader_of(stub, **arguments) as loader:
        stream = loader.stream()
        return [next(stream) for _ in range(num_batches)]


def put(path: str, value: Any) -> Change:
    """Sets a field; a path like `tensors.1.dtype` goes through messages and lists."""

    def change(message: Any) -> None:
        *way, last = path.split(".")
        for name in way:
            message = message[int(name)] if name.isdigit() else getattr(message, name)
        if isinstance(value, list):
            del getattr(message, last)[:]
            getattr(message, last).extend(value)
        else:
            setattr(message, last, value)

    return change


def inline(step: int) -> pb.BatchGroup:
    message = group(step)
    message.inline.SetInParent()
    return message


def without_arena(stub: StubDaemon) -> Callable[[Any], pb.SessionOpened]:
    def answer(request: pb.OpenSessionRequest) -> pb.SessionOpened:
        opened = stub.session(request)
        opened.arena_bytes = 0
        return opened

    return answer
