"""A model that rotates as one block still averages the gradients of what it keeps whole."""

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import rotate_all
from gyre_trainer.rotation.rotated_module import RotatedModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4)).double()


def rows(rank: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def gradients() -> list[list[float]]:
    rotated = model()
    rotate_all(rotated, mesh=make_mesh("cpu"))
    assert isinstance(rotated, RotatedModule)
    rotated(rows(dist.get_rank())).square().mean().backward()
    found = []
    for parameter in rotated.parameters():
        assert isinstance(parameter.grad, DTensor)
        found.append(parameter.grad.full_tensor().flatten().tolist())
    return found


def test_gradients_of_a_norm_in_a_block_are_those_of_one_process(ranks: StartRanks) -> None:
    whole = model()
    whole(torch.cat([rows(0), rows(1)])).square().mean().backward()
    expected = [each.grad for each in whole.parameters()]
    for found in ranks(2).run(gradients):
        for each, grad in zip(found, expected, strict=True):
            assert grad is not None
            torch.testing.assert_close(torch.tensor(each, dtype=torch.float64), grad.flatten())
