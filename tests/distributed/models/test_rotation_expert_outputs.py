"""What a layer may do with the outputs of listed experts, where backward computes it again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

BLOCKS = RotationPolicy(recompute="block")
LAYERS = RotationPolicy(recompute="layer")


def _without_gradients(output: Tensor) -> None:
    with torch.no_grad():
        output.mul_(0.5)


# What a layer does with an expert's output before it is multiplied by its weights.
_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamped": lambda output: output.clamp_(min=-0.1, max=0.1),
    "cut": nn.ReLU(inplace=True),
    "written without gradients": _without_gradients,
    "written through a view": lambda output: output.T.mul_(0.5),
}


# What a layer adds to its input: it reads the experts' outputs where no gradient goes through.
_READS: dict[str, Callable[[Tensor], Any]] = {
    "detached": lambda total: total.detach().square().mean(),
    "as data": lambda total: total.data.amax(),
    "as a number": lambda total: total.mean().item(),
    "compared": lambda total: (total > 0).double().mean(),
    "in a branch": lambda total: 0.1 if total.sum() > 0 else 0.7,
    "without gradients": torch.no_grad()(torch.mean),
}


class Layer(nn.Module):
    """Experts of which the outputs are used in some way before the layer ends."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.experts = nn.ModuleList([Expert() for _ in range(3)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.arange(number, len(x), 2)
            output = expert(x[rows - len(x) if self.way == "from the end" else rows])
            weight = x[rows].mean(-1, keepdim=True)
            if self.way == "twice":
                total.index_add_(0, rows, output.tanh())
            if self.way == "read by keywords":
                weight = weight + output.mean(dim=-1, keepdim=True)
            if self.way == "read in a list":
                weight = weight + torch.cat([output, output]).mean()
            if self.way in _WRITES:
                _WRITES[self.way](output)
            weighted = output * weight
            if self.way == "hooked":
                output.register_hook(torch.neg)
            if self.way == "afterwards":
                weighted = weighted + output.tanh()
            total.index_add_(0, rows, weighted)
        if self.way == "read and written":
            total[rows] = total[rows] + weighted
        if self.way in _READS:
            x = (x * (1 + _READS[self.way](total))).sin()
        return x + (self.norm(total) if self.way == "normed" else total)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.up_proj(x).relu())
        return output


class Layers(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(way) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layers_off(way: str, policy: RotationPolicy = LAYERS) -> float:
    torch.manual_seed(0)
    plain: Any = Layers(way).double()
    torch.manual_seed(0)
    model: Any = Layers(way).double()
    rule = MLPRule(ups=("up_proj",), down="down_proj")  # so that experts rotate as blocks
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy, rules={Expert: rule})
    for _ in range(2):
        x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        for each in (plain, model):
            each.zero_grad()
            each(x).square().sum().backward()
    return max(
        apart(whole(one.grad), other.grad)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True)
        if other.grad is not None
    )


@pytest.mark.parametrize("policy", [BLOCKS, LAYERS], ids=["blocks", "layers"])
def test_other_uses_of_outputs_are_exact(ranks: StartRanks, policy: RotationPolicy) -> None:
    others = ("added", "normed", "twice", "read by keywords", "read in a list", "from the end")
    for way in (*others, "read and written", *_READS, *_WRITES):
        for distance in ranks(2).run(layers_off, way, policy):
            assert distance <= 1e-12, way


def refusal(way: str) -> str:
    with pytest.raises(RotationError) as caught:
        layers_off(way)
    return str(caught.value)


def test_a_hook_after_the_weights_is_refused(ranks: StartRanks) -> None:
    """Nothing would call it: the gradient of the output alone is not computed."""
    for message in ranks(2).run(refusal, "hooked"):
        assert "a hook is registered for the gradient of what an expert returned" in message


def test_a_use_after_the_weights_is_refused(ranks: StartRanks) -> None:
    for message in ranks(2).run(refusal, "afterwards"):
        assert "an expert, returned is multiplied by weights, and used once more" in message
