"""Parameters in bfloat16 without float32 copies: rounding is exact in the mean, and seeded."""

from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.optimizers.stochastic import stochastically_rounded
from gyre_trainer.rotate import rotate_all
from torch import Tensor, nn
from torch.optim import AdamW

from tests.distributed.conftest import StartRanks
from tests.distributed.training import distance, whole_parameters


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), MLP(12, 20, bias=True)).bfloat16()


def trained(model: nn.Module, optimizer: Any, steps: range) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 8, generator=generator).to(next(model.parameters()).dtype)
    if hasattr(model, "grad_averaging"):
        inputs = inputs.chunk(dist.get_world_size())[dist.get_rank()]
    for _ in steps:
        (model(inputs) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_the_ring() -> tuple[dict[str, Tensor], dict[str, Tensor], set[torch.dtype]]:
    """Parameters after one run, and after one that resumes in the middle; the states' dtypes."""
    found = []
    for stops in (False, True):
        model = model_of()
        rotate_all(model, mesh=make_mesh("cpu"))
        made = stochastically_rounded(AdamW)
        optimizer: Any = made(model.parameters(), lr=1e-3, rounding_seed=7)
        trained(model, optimizer, range(10))
        if stops:
            states, optimizer = optimizer.state_dict(), made(model.parameters(), rounding_seed=8)
            optimizer.load_state_dict(states)
        trained(model, optimizer, range(10))
        found.append(whole_parameters(model))
    dtypes = {state["exp_avg"].dtype for state in optimizer.state.values()}
    return found[0], found[1], dtypes


def test_it_follows_float32_and_resumes_with_the_same_bits(ranks: StartRanks) -> None:
    exact, nearest = model_of().float(), model_of()
    for model in (exact, nearest):
        trained(model, AdamW(model.parameters(), lr=1e-3), range(20))
    goal = whole_parameters(exact)
    off = distance({n: p.float() for n, p in whole_parameters(nearest).items()}, goal)
    first, *others = ranks(2).run(on_the_ring)
    for found, resumed, dtypes in (first, *others):
        assert dtypes == {torch.float32}
        for name, values in found.items():
            assert torch.equal(values, resumed[name])
            assert torch.equal(values, first[0][name])
        assert distance({n: p.float() for n, p in found.items()}, goal) < off
