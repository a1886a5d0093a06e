"""Ranks without tokens for any expert call the same modules in the same order as others."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

DIM, ROWS = 8, 6
LAYERS = RotationPolicy(recompute="layer")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(DIM, 6), nn.Linear(6, DIM)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.up_proj(x).relu())
        return output


class Layer(nn.Module):
    """A router that rotates, experts that only tokens above a threshold get, and a shared one.

    With ``scales``, the router's scores also scale the input, so that they always have a gradient.
    """

    def __init__(self, *, has_names: bool, scales: bool) -> None:
        super().__init__()
        self.scales = scales
        self.router = nn.Linear(DIM, DIM)
        experts = {f"expert_{number}": Expert() for number in range(3)}
        self.experts = nn.ModuleDict(experts) if has_names else nn.ModuleList(experts.values())
        self.shared_expert = Expert()

    def forward(self, x: Tensor, is_routed: bool) -> Tensor:
        scores = self.router(x).sigmoid()
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts.children()):
            rows = torch.arange(number, len(x), 2)[: None if is_routed else 0]
            if len(rows):
                total.index_add_(0, rows, expert(x[rows]) * scores[rows, number, None])
        output: Tensor = (x * scores if self.scales else x) + total + self.shared_expert(x)
        return output


class Layers(nn.Module):
    def __init__(self, *, has_names: bool, scales: bool) -> None:
        super().__init__()
        layers = (Layer(has_names=has_names, scales=scales) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, is_routed: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x, is_routed)
        return x


def step(model: nn.Module, number: int, rank: int, routed: tuple[bool, ...]) -> None:
    seeded = torch.Generator().manual_seed(number * 10 + rank)
    x = torch.randn(ROWS, DIM, dtype=torch.float64, generator=seeded)
    model(x, routed[rank]).sin().sum().backward()


def distance(
    steps: Sequence[tuple[bool, ...]],
    policy: RotationPolicy,
    *,
    has_names: bool = False,
    scales: bool = True,
) -> float:
    """How far gradients of some steps are from one process's; which ranks route tokens in each.

    Experts are listed, or have names, as those of Switch Transformers have.
    """
    plain, model = (Layers(has_names=has_names, scales=scales).double() for _ in range(2))
    for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
        nn.init.normal_(
            parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.numel())
        )
        other.data.copy_(parameter.data)
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
    num_ranks, off = dist.get_world_size(), 0.0
    for number, routed in enumerate(steps):
        plain.zero_grad()
        model.zero_grad()
        for rank in range(num_ranks):
            step(plain, number, rank, routed)
        step(model, number, dist.get_rank(), routed)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            grad = torch.zeros_like(other) if other.grad is None else other.grad / num_ranks
            found = torch.zeros_like(other) if one.grad is None else whole(one.grad)
            off = max(off, apart(found, grad))
    return off


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("policy", [RotationPolicy(), LAYERS], ids=["kept", "layers"])
def test_ranks_without_tokens_for_any_expert(
    ranks: StartRanks, policy: RotationPolicy, scales: bool
) -> None:
    """From the first step on, in a later one, and on all ranks at first.

    Without ``scales``, the loss of a rank without tokens does not depend on the router.
    """
    none, first, second, both = (False, False), (True, False), (False, True), (True, True)
    for steps in ([first, second], [none, second, first, none], [both, first, none]):
        for off in ranks(2).run(partial(distance, steps, policy, scales=scales)):
            assert off <= 1e-12, steps
