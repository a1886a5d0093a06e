"""A ring uses its transports by their interface: the first that reaches a neighbour carries."""

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.hang_diagnosis import HangDiagnosis
from gyre_trainer.comm.identity import Modules
from gyre_trainer.comm.ring import Direction, Ring
from gyre_trainer.comm.transport import Leg, Stream, Work
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


class Arrived:
    """A transfer that is complete from the beginning."""

    def wait(self) -> None: ...


class RecordingTransport:
    """A transport that moves nothing and records what it is asked for.

    It reaches the given neighbours on a CPU, and both on any other device.
    """

    def __init__(self, *reached_on_cpu: int) -> None:
        self.reached_on_cpu = frozenset(reached_on_cpu)
        self.carried: list[tuple[int, bool]] = []
        self.allocated: list[Tensor] = []

    def offsets(self, device: torch.device) -> frozenset[int]:
        return self.reached_on_cpu if device.type == "cpu" else frozenset((1, -1))

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Work, str]]:
        self.carried += [(leg.offset, leg.arrives) for leg in legs]
        return [(Arrived(), leg.description) for leg in legs]

    def give_up(self) -> None: ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(torch.empty(numel, dtype=dtype, device=device))
        return self.allocated[-1]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


def ring_with(group: dist.ProcessGroup, *transports: RecordingTransport) -> Ring:
    return Ring(group, transports, HangDiagnosis(group), Modules())


def test_each_leg_takes_the_first_transport_that_reaches_its_neighbour(
    group: dist.ProcessGroup,
) -> None:
    near, far = RecordingTransport(1), RecordingTransport(1, -1)
    ring = ring_with(group, near, far)
    ring.shift(torch.ones(4), torch.empty(4), Direction.CLOCKWISE, Stream.WEIGHTS).wait()
    assert near.carried == [(1, False)]  # sends to the next rank
    assert far.carried == [(-1, True)]  # receives from the rank before
    assert ring.bytes_sent == 16


def test_the_pool_takes_its_buffers_from_the_first_transport_that_reaches_a_neighbour(
    group: dist.ProcessGroup,
) -> None:
    nowhere, far = RecordingTransport(), RecordingTransport(1, -1)
    pool = ring_with(group, nowhere, far).pool
    on_cpu = pool.take(8, torch.float32, torch.device("cpu"))
    assert (len(nowhere.allocated), len(far.allocated)) == (0, 1)
    assert far.allocated[0] is on_cpu
    elsewhere = pool.take(8, torch.float32, torch.device("meta"))
    assert (len(nowhere.allocated), len(far.allocated)) == (1, 1)
    assert nowhere.allocated[0] is elsewhere
