"""Which split blocks are found, how their parts may be used, and rules for them by hand."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import rotate, rotate_all
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.split_models import POLICIES, as_is, made, mine, outcome
from tests.distributed.training import whole


class First(nn.Module):
    """The core of an MLP."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden)

    def forward(self, x: Tensor) -> Any:
        """The hidden width."""
        return self.up(x).relu()


class Second(nn.Module):
    """The last layer, and what comes after it."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, hidden: Tensor, x: Tensor) -> Any:
        """The output, with a residual."""
        return self.norm(self.down(hidden) + x)


class Layer(nn.Module):
    """A layer as BERT has it; the number of hidden features may be that of the input."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.first, self.second = First(hidden), Second(hidden)
        self.scale = nn.Parameter(torch.ones(8))  # a small one of its own

    def forward(self, x: Tensor) -> Any:
        """The output."""
        return self.second(self.first(x), x) * self.scale


class Written(Layer):
    """The last layer is called twice, and one of its outputs is written to."""

    early = False

    def forward(self, x: Tensor) -> Any:
        """The output."""
        hidden = self.first(x)
        one = self.second.down(hidden)
        if self.early:
            one.mul_(x)
        other = self.second.down(hidden)
        return other + (one if self.early else one.mul_(x))


class Others(Layer):
    """The last layer is called with something else, too, and its weight is read."""

    def forward(self, x: Tensor) -> Any:
        """The output."""
        y = super().forward(x)
        other = self.second.down(y.repeat(1, 1, 2)[..., :12])
        weight: Any = self.second.down.weight
        all_of_it = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return y + other * all_of_it.square().mean()


def with_shared_parts() -> list[nn.Sequential]:
    """Models of two layers each, which share a module, or the parameters of one."""
    models = [nn.Sequential(Layer(), Layer()) for _ in range(3)]
    for model, name in zip(models, ("first", "second", "second.down"), strict=True):
        layers: Any = model
        if name == "second.down":
            layers[1].second.down.weight = layers[0].second.down.weight
            layers[1].second.down.bias = layers[0].second.down.bias
        else:
            setattr(layers[1], name, getattr(layers[0], name))
    return models


def of_shared_parts() -> list[float]:
    """How far gradients are off in models that share parts."""
    x = torch.randn(6, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for model in with_shared_parts():
        model.double()
        plain = deepcopy(model)
        rotate_all(model, mesh=make_mesh("cpu"), policy=POLICIES["recompute"])
        mine_of, all_of = gradients(model, mine(x)), gradients(plain, x)
        found.append(max(apart(each, all_of[name]) for name, each in mine_of.items()))
    return found


def test_layers_that_share_a_part_have_no_split_block(ranks: StartRanks) -> None:
    """Another block could not be given what that part returns."""
    for off in ranks(2).run(of_shared_parts):
        assert max(off) < 1e-12


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model(x).square().mean().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def used_otherwise() -> tuple[float, list[str]]:
    """How far a model is off that uses its last layers otherwise, too; what is refused, and how."""
    x = torch.randn(6, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(Others(), Layer(), Written()).double())
    model: Any = models[0]
    rules: Any = {"?": MLPRule(ups=("first.up",), down="second.down", core="first")}
    plan = rotate_all(model, mesh=make_mesh("cpu"), policy=POLICIES["recompute"], rules=rules)
    assert [each.rule for each in plan.entries if each.rule] == ["MLPRule"] * 3
    off = gradients(model, mine(x)), gradients(models[1], x)
    told = []
    core: Any = model[0].first
    for use in (
        lambda _module, _args, output: output + 1,
        lambda _module, _args, output: 1 + output,
        lambda _module, _args, output: output.shape,
        lambda _module, _args, output: torch.relu(output),
    ):
        with core.register_forward_hook(use), pytest.raises(RotationError) as error:
            model(mine(x))
        told.append(str(error.value))
    for watched in (core, model[0].second.down):
        with (
            watched.register_full_backward_hook(lambda *_: None),
            pytest.raises(RotationError, match="a hook was registered inside of Others"),
        ):
            model(mine(x))
    with pytest.raises(RotationError) as error:
        model[1].second(core(mine(x)), mine(x))
    told.append(str(error.value))
    with pytest.raises(RotationError) as error, torch.no_grad():
        kept = core(mine(x))
        with torch.enable_grad():
            model[0].second(kept, mine(x))
    told.append(str(error.value))
    model[2].early = True
    with pytest.raises(RotationError) as error:
        model(mine(x))
    told.append(str(error.value))
    return max(apart(each, off[1][name]) for name, each in off[0].items()), told


def test_a_last_layer_may_be_called_otherwise_but_a_core_may_not(ranks: StartRanks) -> None:
    for off, told in ranks(2).run(used_otherwise):
        assert off <= 1e-12
        assert all("the input of a block's last layer does not exist" in each for each in told)


def by_hand() -> float:
    """How far a model is off whose blocks are named."""
    expected = outcome(made("Bert"), as_is)
    model = made("Bert")
    names = ("self.query", "self.key", "self.value")
    counts = ("num_attention_heads", "all_head_size")
    attention = AttentionRule(6, names, "output.dense", counts=counts, core="self")
    mlp = MLPRule(ups=("intermediate.dense",), down="output.dense", core="intermediate")
    mesh = make_mesh("cpu")
    for layer in model.bert.encoder.layer:
        rotate(layer, mesh=mesh, rule=mlp)  # the attention inside may come afterwards
        rotate(layer.attention, mesh=mesh, rule=attention)
    rotate_all(model, mesh=mesh, find_blocks=False)
    found = outcome(model, mine)
    found["logits"], expected["logits"] = found["logits"], mine(expected["logits"])
    return max(apart(found[name], expected[name]) for name in expected)


def refused() -> list[str]:
    """Why rules are refused."""
    told = []
    for rule in (
        MLPRule(ups=("first.up",), down="second.down", core="third"),
        MLPRule(ups=("first.up",), down="second.norm", core="first"),
        MLPRule(ups=("first.up",), down="first.up", core="first"),
    ):
        with pytest.raises(RotationError) as error:
            rotate(Layer(), mesh=make_mesh("cpu"), rule=rule)
        told.append(str(error.value))
    return told


def test_rules_by_hand_name_a_core(ranks: StartRanks) -> None:
    for off in ranks(2).run(by_hand):
        assert off <= 1e-12
    for told in ranks(2).run(refused):
        assert "Layer has no module third" in told[0]
        assert "Layer.second.norm is LayerNorm, but the rule needs a Linear there" in told[1]
        assert "Layer.first.up is inside of the core first" in told[2]
