"""Hops come to their end while a rank computes, and all checks hold where hops are late."""

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.identity import StepChecks
from gyre_trainer.comm.mesh import ROTATE_AXIS
from gyre_trainer.comm.ring import Direction, Stream, ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import rotate_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.conftest import StartRanks
from tests.distributed.gloo_ranks import HOP_TIMEOUT_S


def carried(stream: Stream, direction: Direction) -> bool:
    """Whether a hop of this rank completes while the rank computes and does not wait for it."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(ROTATE_AXIS,))
    ring, store = ring_of(mesh), dist.distributed_c10d._get_default_store()
    outgoing, incoming = (
        ring.pool.take(2**20, torch.float32, torch.device("cpu")) for _ in range(2)
    )
    outgoing.fill_(ring.rank)
    hop = ring.shift(outgoing, incoming, direction, stream)
    if ring.rank == 0:
        deadline_s = time.monotonic() + HOP_TIMEOUT_S / 2
        matrix = torch.eye(256)
        while store.add(f"{stream} arrived", 0) < ring.size - 1:
            matrix = matrix @ matrix
            if time.monotonic() > deadline_s:
                return False
    hop.wait()
    store.add(f"{stream} arrived", 1)
    return bool((incoming == (ring.rank - direction) % ring.size).all())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_hop_comes_to_its_end_while_the_slice_computes(ranks: StartRanks, num_ranks: int) -> None:
    for stream, direction in (
        (Stream.WEIGHTS, Direction.CLOCKWISE),
        (Stream.GRADIENTS, Direction.COUNTER_CLOCKWISE),
    ):
        assert all(ranks(num_ranks).run(carried, stream, direction))


class Deferring(StepChecks):
    """Compares nothing before `read`, as for a device that the host does not wait for."""

    def require(self, number: Tensor, expected: int, fail: Any) -> None:
        self.note(number, expected, fail)


class TwoNorms(nn.Module):
    """A layer that rotates and two norms that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.norms = nn.ModuleList((nn.LayerNorm(6), nn.LayerNorm(6)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for norm in self.norms:
            x = norm(x)
        return x


def refused_before_the_step(*, differ: bool) -> tuple[str, str]:
    """Errors of backward and of the optimizer's step where each rank may freeze another norm."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(ROTATE_AXIS,))
    ring = ring_of(mesh)
    ring.checks = Deferring()
    torch.manual_seed(0)
    model = TwoNorms()
    rotate_all(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = ["", ""]
    model.norms[dist.get_rank() * differ].requires_grad_(False)

    def backward() -> None:
        model(torch.ones(2, 4)).sum().backward()

    for place, act in enumerate((backward, optimizer.step)):
        try:
            act()
        except RotationError as error:
            said[place] = str(error)
    return said[0], said[1]


def test_guards_of_a_device_refuse_before_the_optimizers_step(ranks: StartRanks) -> None:
    for in_backward, in_step in ranks(2).run(partial(refused_before_the_step, differ=False)):
        assert in_backward == in_step == ""
    for in_backward, in_step in ranks(2).run(partial(refused_before_the_step, differ=True)):
        assert in_backward == ""
        assert "trains on 1 of 2 ranks" in in_step
