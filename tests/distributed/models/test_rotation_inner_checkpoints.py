"""Torch's checkpoint in a model that rotates: around layers, and in the forward of a block."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import VOCABULARY, made
from tests.distributed.refusals.refused_modules import told
from tests.distributed.training import whole

POLICIES = {
    "plain": RotationPolicy(),
    "recompute": RotationPolicy(recompute="block"),
    "layers": RotationPolicy(recompute="layer"),
}


class Residual(nn.Module):
    def __init__(self, part: str, reentrant: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = MLP(part, reentrant)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.mlp(self.norm(x))
        return output


class MLP(nn.Module):
    """Its forward calls a checkpoint around a layer, or around what has no parameters."""

    def __init__(self, part: str, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.parts: dict[str, Any] = {
            part: partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=False)
        }

    def _part(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        output: Tensor = self.parts[name](function, x) if name in self.parts else function(x)
        return output

    def forward(self, x: Tensor) -> Tensor:
        hidden = self._part("gelu", F.gelu, self._part("up", self.up, x))
        return self._part("down", self.down, hidden)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def blocks(part: str, reentrant: bool) -> tuple[float, set[str]]:
    """How far gradients and inputs' gradients are off, and by which rules it rotates."""
    warnings.simplefilter("ignore")  # torch's, of inputs without a gradient
    off, rules = 0.0, set[str]()
    by_rule: Any = None if part else {MLP: MLPRule()}
    mesh = make_mesh("cpu")
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for policy in POLICIES.values():
        found: list[dict[str, Tensor]] = []
        for rotates in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Residual(part, reentrant), Residual(part, reentrant)).double()
            mine = x
            if rotates:
                plan = rotate_all(model, mesh=mesh, policy=policy, rules=by_rule)
                rules |= {each.rule for each in plan.entries if each.rule}
                mine = x.chunk(mesh.size())[dist.get_rank()]
            for _ in range(2):
                model.zero_grad()
                output: Any = model(mine.clone().requires_grad_())
                output.sin().mean().backward()
            found.append(
                {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            )
        assert found[0].keys() == found[1].keys()
        off = max(off, *(apart(found[1][name], found[0][name]) for name in found[0]))
    return off, rules


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_whose_forward_calls_a_checkpoint_rotates_layer_by_layer(
    ranks: StartRanks, reentrant: bool
) -> None:
    for part in ("up", "gelu", "down"):
        for off, rules in ranks(2).run(blocks, part, reentrant):
            assert off <= 1e-12
            assert rules == {"LinearRule"}
    for off, rules in ranks(2).run(blocks, "", reentrant):  # without one a rule is true of it
        assert off <= 1e-12
        assert rules == {"MLPRule"}


def told_by_a_rule(part: str, reentrant: bool) -> str:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(Residual(part, reentrant))
    rotate_all(model, mesh=make_mesh("cpu"), rules={MLP: MLPRule()})
    return told(lambda: model(torch.randn(3, 8)).sum().backward())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_rule_for_such_a_block_is_refused(ranks: StartRanks, reentrant: bool) -> None:
    for part in ("up", "gelu"):
        for text in ranks(2).run(told_by_a_rule, part, reentrant):
            assert "calls torch.utils.checkpoint in its forward" in text
    assert ranks(2).run(told_by_a_rule, "", reentrant) == ["", ""]


def layers(family: str, reentrant: bool, policy: RotationPolicy) -> float:
    """How far the library's own checkpoint around each layer is from one process without any."""
    warnings.simplefilter("ignore")
    mesh, found = make_mesh("cpu"), []
    rows = torch.randint(1, VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(1))
    sizes = {{"GPT2": "n_layer", "T5": "num_layers"}.get(family, "num_hidden_layers"): 2}
    for rotates in (False, True):
        model = made(family, **sizes).train()
        mine = rows
        if rotates:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            rotate_all(model, mesh=mesh, policy=policy)
            mine = rows.chunk(mesh.size())[dist.get_rank()]
        for _ in range(2):
            model.zero_grad()
            model(input_ids=mine, labels=mine).loss.backward()
        found.append(grads_of(model))
    assert found[0].keys() == found[1].keys()
    return max(apart(found[1][name], found[0][name]) for name in found[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["plain", pytest.param("layers", marks=pytest.mark.models)])
@pytest.mark.parametrize(
    "family",
    ["Bert", *(pytest.param(each, marks=pytest.mark.models) for each in ("Llama", "GPT2", "T5"))],
)
def test_the_librarys_checkpoint_around_layers_is_exact(
    ranks: StartRanks, family: str, policy: str, reentrant: bool
) -> None:
    for off in ranks(2).run(layers, family, reentrant, POLICIES[policy]):
        assert off <= 1e-6  # some norms compute in float32
