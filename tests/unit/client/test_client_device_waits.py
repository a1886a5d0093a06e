"""How long a consumer of batches on a device waited, as the daemon is told."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gyre_client.batches.batch import Layout, Position
from gyre_client.batches.stream import BatchStream, DeviceStream, Terms
from gyre_client.transport.channel import parse_address
from gyre_protos.v1 import loader_pb2 as pb

PAUSE_S, NUM_BATCHES = 0.2, 3


class SlowStream(BatchStream):
    """Gives a batch after each pause."""

    def __init__(self) -> None:
        target: Any = SimpleNamespace(address=parse_address("tcp:127.0.0.1:1"))
        super().__init__(target, pb.OpenSessionRequest(), Terms(1.0))
        self.position = Position(b"", 0)

    def take(self) -> Any:
        number = self.position.batch
        if number == NUM_BATCHES:
            return None
        time.sleep(PAUSE_S)
        self.position = Position(b"c", number + 1)
        memory = np.empty(0, np.uint8)
        return SimpleNamespace(step=number, cursor=b"c", layout=Layout([], 0), memory=memory)

    def close(self) -> None:
        pass


def test_a_consumer_that_waits_for_a_slow_source_is_said_to_wait() -> None:
    source = SlowStream()
    stream = DeviceStream(source, lambda _: lambda: torch.empty(0))
    began_s = time.monotonic()
    while stream.take() is not None:
        pass
    waited_s = time.monotonic() - began_s
    stream.close()
    assert source._waited_s >= 0.5 * PAUSE_S * NUM_BATCHES
    assert source._waited_s <= waited_s
