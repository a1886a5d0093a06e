"""Users' modules and odd sizes: outputs and gradients of one call equal those without rotation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from tests.distributed.comparing import BATCH, Case, Model, distances
from tests.distributed.conftest import StartRanks


class FeedForward(nn.Module):
    """An MLP with other names, another activation, and a learned gain that no rule cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 10)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.fc2 = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(torch.tanh(self.fc1(x)) * self.gain)
        return output


class CrossAttention(nn.Module):
    """Attention to another input, with normalised queries and a mask by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(24, 24),
            nn.Linear(24, 12, bias=False),
            nn.Linear(24, 12),
        )
        self.query_norm = nn.LayerNorm(2)
        self.project = nn.Linear(24, 24)

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(source).unflatten(-1, (-1, 2)).transpose(1, 2)
            for layer, source in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        y = F.scaled_dot_product_attention(
            self.query_norm(q), k, v, attn_mask=mask, enable_gqa=True
        )
        output: Tensor = self.project(y.transpose(1, 2).flatten(2))
        return output


class TwoReadings(nn.Module):
    """A module with an optional input, a buffer, and outputs in a tuple and a dict.

    One of the outputs is not a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(6, 10),
            nn.Linear(4, 10, bias=False),
            nn.Linear(10, 3),
        )
        self.register_buffer("offset", torch.tensor(0.3))

    def forward(
        self, x: Tensor, y: Tensor, *, z: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        inner = (self.up(x) + self.offset).sin() * self.gate(y).tanh()
        return self.down(inner), {"twice": 2 * self.down(inner.cos()), "z": z}


def several_inputs_and_outputs() -> Case:
    inputs = torch.randn(BATCH, 5, 6), torch.randn(BATCH, 5, 4)
    return Case(TwoReadings(), inputs, rule=MLPRule(ups=("up", "gate")), num_examined=2)


def foreign_mlp() -> Case:
    return Case(FeedForward(), (torch.randn(BATCH, 6),), rule=MLPRule(ups=("fc1",), down="fc2"))


def foreign_attention() -> Case:
    inputs = torch.randn(BATCH, 5, 24), torch.randn(BATCH, 7, 24)
    rule = AttentionRule(6, inputs=("query", "key", "value"), output="project")
    return Case(CrossAttention(), inputs, {"mask": torch.rand(5, 7) > 0.3}, rule, num_examined=2)


def slices_without_a_row() -> Case:
    layers = nn.Sequential(
        nn.Embedding(2, 6), nn.Linear(6, 4), MLP(4, 2, bias=True), nn.Linear(4, 1, bias=False)
    )
    return Case(layers, (torch.randint(0, 2, (BATCH, 5)),))


CASES = {
    "foreign MLP": foreign_mlp,
    "foreign attention": foreign_attention,
    "slices without a row": slices_without_a_row,
    "several inputs and outputs": several_inputs_and_outputs,
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "policy", [RotationPolicy(), RotationPolicy(recompute="block")], ids=["kept", "recomputed"]
)
def test_one_call_equals_one_process(
    ranks: StartRanks, policy: RotationPolicy, num_ranks: int
) -> None:
    for found in ranks(num_ranks).run(distances, CASES, policy):
        assert found.keys() == CASES.keys()
        assert {name: value for name, value in found.items() if not value <= 1e-12} == {}


def placements() -> dict[str, tuple[Placement, tuple[int, ...]]]:
    """The placement of each parameter of a model, and the shape of this rank's part."""
    mesh = make_mesh("cpu")
    model = Model(FeedForward())
    rotate(model.inner, mesh=mesh, rule=MLPRule(ups=("fc1",), down="fc2"))
    rotate(model, mesh=mesh)
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.placements[0], tuple(parameter.to_local().shape)
    return found
