"""Modules of somebody else's making and odd sizes: output and all gradients of one call equal those without rotation."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.layers.attention import Attention, AttentionRule, Heads, rope_table
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate
from gyre_trainer.rule import Rule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests.distributed.conftest import StartRanks
from tests.distributed.training import default_dtype, distance, whole

BATCH = 6


class Model(nn.Module):
    """What stands around a module that rotates."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        output: Tensor = self.inner(*args, **kwargs)
        return output


class FeedForward(nn.Module):
    """An MLP with other names, another activation, and a learned gain that no rule knows."""

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
        self.query, self.key, self.value = nn.Linear(24, 24), nn.Linear(24, 12, bias=False), nn.Linear(24, 12)
        self.query_norm = nn.LayerNorm(2)
        self.project = nn.Linear(24, 24)

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(source).unflatten(-1, (-1, 2)).transpose(1, 2)
            for layer, source in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        y = F.scaled_dot_product_attention(self.query_norm(q), k, v, attn_mask=mask, enable_gqa=True)
        output: Tensor = self.project(y.transpose(1, 2).flatten(2))
        return output


@dataclass
class Case:
    """A module, how it is rotated, and what it is called with."""

    module: nn.Module
    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor] = field(default_factory=dict)
    rule: Rule | None = None
    layer_by_layer: bool = False


def foreign_mlp() -> Case:
    return Case(FeedForward(), (torch.randn(BATCH, 6),), rule=MLPRule(ups=("fc1",), down="fc2"))


def foreign_attention() -> Case:
    inputs = torch.randn(BATCH, 5, 24), torch.randn(BATCH, 7, 24)
    rule = AttentionRule(6, inputs=("query", "key", "value"), output="project")
    return Case(CrossAttention(), inputs, {"mask": torch.rand(5, 7) > 0.3}, rule)


def one_head_for_all_ranks() -> Case:
    inputs = torch.randn(BATCH, 5, 12), rope_table(5, 4, 100.0, torch.device("cpu"))
    return Case(Attention(12, Heads(3, 1), bias=True), inputs, layer_by_layer=True)


def slices_without_a_row() -> Case:
    layers = nn.Sequential(nn.Embedding(2, 6), nn.Linear(6, 4), MLP(4, 2, bias=True), nn.Linear(4, 1, bias=False))
    return Case(layers, (torch.randint(0, 2, (BATCH, 5)),), layer_by_layer=True)


CASES: dict[str, Callable[[], Case]] = {
    "foreign MLP": foreign_mlp,
    "foreign attention": foreign_attention,
    "one head for all ranks": one_head_for_all_ranks,
    "slices without a row": slices_without_a_row,
}


def mine(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor with the batch in front; tables and the like are for all."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()] if tensor.shape[0] == BATCH else tensor


def call(model: nn.Module, args: list[Tensor], kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output, and gradients of inputs and parameters, of the mean square of the output."""
    inputs = [x.clone().requires_grad_(x.is_floating_point() and x.shape[0] != 5) for x in args]
    output = model(*inputs, **kwargs)
    output.square().mean().backward()
    found = {"output": output.detach()}
    found |= {f"input {place}": x.grad for place, x in enumerate(inputs) if x.grad is not None}
    return found | {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def distance_from_one_process(name: str, policy: RotationPolicy) -> float:
    mesh = make_mesh("cpu")
    torch.manual_seed(3)
    with default_dtype(torch.float64):
        case = CASES[name]()
        twin = CASES[name]().module
    twin.load_state_dict(case.module.state_dict())
    alone, rotated = Model(case.module), Model(twin)
    for part in list(twin.children()) if case.layer_by_layer else [twin]:
        rotate(part, mesh=mesh, policy=policy, rule=case.rule)
    rotate(rotated, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in rotated.parameters())
    expected = call(alone, list(case.args), case.kwargs)
    found = call(rotated, [mine(x) for x in case.args], case.kwargs)
    for each in expected:
        if each.startswith(("output", "input")):
            expected[each] = mine(expected[each])
        if each.startswith("input"):
            found[each] = found[each] / mesh.size()  # a rank's loss is the mean over its own part
    return distance(found, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("policy", [RotationPolicy(), RotationPolicy(recompute=True)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", CASES)
def test_one_call_equals_one_process(ranks: StartRanks, name: str, policy: RotationPolicy, num_ranks: int) -> None:
    assert max(ranks(num_ranks).run(distance_from_one_process, name, policy)) <= 1e-12


def placements() -> dict[str, tuple[Placement, tuple[int, ...]]]:
    """Where each parameter of a model lies, and the shape of this rank's part."""
    mesh = make_mesh("cpu")
    model = Model(FeedForward())
    rotate(model.inner, mesh=mesh, rule=MLPRule(ups=("fc1",), down="fc2"))
    rotate(model, mesh=mesh)
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.placements[0], tuple(parameter.to_local().shape)
    return found


def test_parameters_are_dtensors_cut_as_dtensors_are(ranks: StartRanks) -> None:
    for rank, found in enumerate(ranks(3).run(placements)):
        hidden, rows = (4, 4, 2)[rank], (2, 2, 2)[rank]
        assert found == {
            "inner.gain": (Replicate(), ()),
            "inner.fc1.weight": (Shard(0), (hidden, 6)),
            "inner.fc1.bias": (Shard(0), (hidden,)),
            "inner.fc2.weight": (Shard(1), (6, hidden)),
            "inner.fc2.bias": (Shard(0), (rows,)),
        }
