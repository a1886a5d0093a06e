"""Rotated models in generation, and on two rings of one job."""

from typing import cast

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.rotate import register_forward_method, rotate_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.test_rotation_regressions import VARIANT, backward, reference
from tests.distributed.training import batch, distance, rotated_gpt, whole


def gradients_of_two_rings() -> tuple[list[int], float]:
    """The ranks on this rank's ring, and the distance of its gradients from one process's.

    That process trains on the data of this ring alone.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "rotate"))
    ring_index = mesh.get_local_rank("replicate")
    model = reference(rotated_gpt(VARIANT))
    own = DeviceMesh.from_group(mesh["rotate"].get_group(), "cpu")
    rotate_all(model, mesh=own, independent=True)
    ring = ring_of(own)
    assert ring is not ring_of(make_mesh("cpu"))
    alone = reference(model)
    data = batch(ring_index, VARIANT.config.vocab_size)
    tokens, targets = (tensor.chunk(ring.size)[ring.rank] for tensor in data)
    backward(model.loss(tokens, targets))
    backward(alone.loss(*data))
    expected = {
        name: parameter.grad
        for name, parameter in alone.named_parameters()
        if parameter.grad is not None
    }
    found = {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return dist.get_process_group_ranks(mesh["rotate"].get_group()), distance(found, expected)


def test_two_rings_of_one_job_do_not_mix(ranks: StartRanks) -> None:
    outcomes = ranks(4).run(gradients_of_two_rings)
    assert [members for members, _ in outcomes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert max(apart for _, apart in outcomes) <= 1e-12


class TwoTowers(nn.Module):
    """Reads parameters of its own in `encode`, which its forward calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10, dtype=torch.float64)
        self.scale = nn.Parameter(torch.linspace(1, 2, 10, dtype=torch.float64))
        self.table = nn.Parameter(torch.linspace(0, 1, 70, dtype=torch.float64).view(7, 10))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale + self.table.mean(0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.encode(x) * self.encode(y)).sum(1)


def by_a_method() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a loss of `encode`, on this rank's part and in one process on all."""
    torch.manual_seed(0)
    alone, rotated = TwoTowers(), TwoTowers()
    rotated.load_state_dict(alone.state_dict())
    rotate_all(rotated, mesh=make_mesh("cpu"), min_numel=0)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        rotated.encode(torch.ones(1, 6, dtype=torch.float64))
    register_forward_method(rotated, "encode")
    batch = torch.randn(2, 6, 6, dtype=torch.float64)
    rank, size = dist.get_rank(), dist.get_world_size()
    for model, (x, y) in (
        (alone, batch),
        (rotated, [each.chunk(size)[rank] for each in batch]),
    ):
        loss = (model.encode(x) * model.encode(y)).sum(1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(model(x, y).mean(), loss)  # whose forward calls it, too
    return tuple(  # type: ignore[return-value]
        {name: whole(cast("Tensor", p.grad)) for name, p in model.named_parameters()}
        for model in (alone, rotated)
    )


def test_a_registered_method_reads_parameters_as_the_forward_does(ranks: StartRanks) -> None:
    for alone, rotated in ranks(2).run(by_a_method):
        assert distance(rotated, alone) <= 1e-12
