"""Modules whose later calls take another path than the first: exact, or refused by the field."""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import told
from tests.distributed.training import whole

SWITCHED = {"normalizes": False}  # a global that a forward reads


class Perceptron(nn.Module):
    """An MLP with several paths, of which a first call takes one."""

    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.GELU()
        self.normalizes = False
        self.num_calls, self.starts = 0, 100

    def forward(self, x: Tensor, normalizes: bool = False) -> Tensor:
        self.num_calls += 1
        hidden = self.act(self.up(x))
        if self.normalizes or normalizes or SWITCHED["normalizes"] or self.num_calls > self.starts:
            hidden = F.normalize(hidden, dim=-1)
        if hidden.abs().max() > 100:
            hidden = hidden / hidden.abs().amax(-1, keepdim=True)
        if x.shape[0] > 5:
            hidden = hidden - hidden.mean(-1, keepdim=True)
        output: Tensor = self.down(hidden)
        return output


class Plain(nn.Module):
    """An MLP that a rule by its class is true of."""

    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.GELU()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.drop(self.hidden(x)))
        return output

    def hidden(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.act(self.up(x))
        return hidden


class Normalizes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.normalize(self.hidden(x), dim=-1))
        return output


class NormalizesInside(Plain):
    def hidden(self, x: Tensor) -> Tensor:
        return F.normalize(super().hidden(x), dim=-1)


class OfOurs(MLP):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.normalize(self.up(x), dim=-1))
        return output


def _normalizing(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: module.down(F.normalize(module.up(x), dim=-1))


def with_forward() -> nn.Module:
    module: Any = Plain()
    module.forward = _normalizing(module)
    return cast("nn.Module", module)


def with_forward_inside() -> nn.Module:
    module: Any = MLP(6, 10)
    module.up.forward = lambda x: F.normalize(F.linear(x, module.up.weight), dim=-1)
    return cast("nn.Module", module)


def with_hook(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        module: nn.Module = make()
        layer: Any = module.up
        layer.register_forward_hook(lambda _layer, _args, output: F.normalize(output, dim=-1))
        return module

    return made


RULES: Any = {Plain: MLPRule()}
MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "paths": (Perceptron, None),
    "subclass": (Normalizes, RULES),
    "subclass of a helper": (NormalizesInside, RULES),
    "subclass of ours": (lambda: OfOurs(6, 10), None),
    "forward on the instance": (with_forward, RULES),
    "forward on a layer": (with_forward_inside, None),
    "hook by a rule": (with_hook(Plain), RULES),
    "hook in ours": (with_hook(lambda: MLP(6, 10)), None),
}
SWITCHES = ("none", "attribute", "argument", "global", "value", "shape", "count")


class Around(nn.Module):
    """The module beside one that the rule is for, so that the rule is used."""

    def __init__(self, inner: nn.Module, *, has_plain: bool) -> None:
        super().__init__()
        self.inner = inner
        self.plain = Plain() if has_plain else nn.Identity()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        output: Tensor = self.plain(self.inner(x, **kwargs))
        return output


def _outcome(model: Any, switch: str) -> dict[str, Tensor]:
    """Output and gradients for this rank's rows."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    width = next(model.inner.parameters()).shape[-1]
    x = torch.randn(8 if switch == "shape" else 4, 3, width, generator=generator)
    x = x.double() * (1000 if switch == "value" else 1)
    if switch == "attribute":
        model.inner.normalizes = True
    if switch == "count":
        model.inner.starts = 1
    SWITCHED["normalizes"] = switch == "global"
    model.zero_grad()
    output = model(x, **({"normalizes": True} if switch == "argument" else {}))
    output.square().mean().backward()
    found = {"output": output.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = whole(parameter.grad)
    return found


def off(module: str, switches: tuple[str, ...], recompute: bool) -> dict[str, float]:
    """How far a rotated module is from the plain one, after each switch."""
    found = {}
    make, rules = MODULES[module]
    for switch in switches:
        models = []
        for rotates in (False, True):
            torch.manual_seed(0)
            models.append(Around(make(), has_plain=rules is not None).double())
            if rotates:
                policy = RotationPolicy(recompute="block" if recompute else "none")
                plan = rotate_all(models[1], mesh=make_mesh("cpu"), rules=rules, policy=policy)
                assert not any(each.rule.startswith("MLP") for each in plan.entries[:1])
                assert "MLPRule" in str(plan) or rules is None
        for each in ("none", "none", switch):
            expected, outcome = (_outcome(model, each) for model in models)
            for name in expected.keys() - {"output"}:
                dist.all_reduce(expected[name])
                expected[name] /= dist.get_world_size()
        found[switch] = max(apart(outcome[name], expected[name]) for name in expected)
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_later_call_may_take_another_path(
    ranks: StartRanks, num_ranks: int, recompute: bool
) -> None:
    for found in ranks(num_ranks).run(off, "paths", SWITCHES, recompute):
        assert all(each <= 1e-12 for each in found.values()), found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_modules_that_a_rule_is_not_true_of_rotate_layer_by_layer(
    ranks: StartRanks, num_ranks: int
) -> None:
    for module in MODULES.keys() - {"paths"}:
        for found in ranks(num_ranks).run(off, module, ("none",), False):
            assert all(each <= 1e-12 for each in found.values()), (module, found)


def _given(module: Any) -> None:
    module.up.forward = lambda x: x


def _hooked(module: Any) -> None:
    module.act.register_forward_hook(lambda _module, _args, output: output)


def _activated(module: Any) -> None:
    module.act = nn.Softmax(-1)


def _dropping(module: Any) -> None:
    module.drop.p = 0.5


def _patched(module: Any) -> None:
    forward = Plain.forward

    @wraps(forward)
    def other(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) * 2

    Plain.forward = other  # type: ignore[method-assign]


LATER: dict[str, tuple[Callable[[Any], None], str]] = {
    "forward": (_given, "the forward of up was not set"),
    "hook": (_hooked, "a hook was registered inside of Plain"),
    "activation": (
        _activated,
        "the class of act was GELU when it was rotated as one, and is Softm",
    ),
    "rate": (_dropping, "the rate of drop was 0.0 when it was rotated as one, and is 0.5 now"),
    "class": (_patched, "the forward of its class"),
}


def told_later(what: str) -> str:
    module = rotate(Plain(), mesh=make_mesh("cpu"), rule=MLPRule())
    forward = Plain.forward
    x = torch.ones(2, 6)
    module(x).sum().backward()
    try:
        LATER[what][0](module)
        return told(lambda: module(x))
    finally:
        Plain.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("what", LATER)
def test_what_is_switched_later_is_named(ranks: StartRanks, what: str) -> None:
    for text in ranks(2).run(told_later, what):
        assert LATER[what][1] in text
        assert "Plain" in text


def told_of_kernel() -> str:
    import transformers  # seconds, for this test alone

    library: Any = transformers
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 9}
    config = library.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = library.LlamaForCausalLM(config)
    plan = rotate_all(model, mesh=make_mesh("cpu"))
    assert "AttentionRule" in str(plan)
    rows = torch.ones(2, 3, dtype=torch.long)
    model(input_ids=rows)
    model.set_attn_implementation("eager")
    return told(lambda: model(input_ids=rows))


def test_another_attention_kernel_is_named(ranks: StartRanks) -> None:
    for text in ranks(2).run(told_of_kernel):
        assert "its attention kernel was 'sdpa' when it was rotated as one, and is 'eager'" in text


def told_of_hooks() -> tuple[str, ...]:
    mesh = make_mesh("cpu")
    hooked = with_hook(Plain)
    of_path = nn.Sequential(hooked())
    return (
        told(lambda: rotate(hooked(), mesh=mesh, rule=MLPRule())),
        told(lambda: rotate_all(of_path, mesh=mesh, rules={"0": MLPRule()})),
    )


def test_a_rule_for_one_module_refuses_hooks_inside(ranks: StartRanks) -> None:
    for texts in ranks(2).run(told_of_hooks):
        for text in texts:
            assert "Plain: a hook is registered on a layer inside" in text


def refused() -> tuple[str, str, str]:
    mesh = make_mesh("cpu")
    only = nn.Sequential(Normalizes())
    of_path = nn.Sequential(with_forward())
    complex_one = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))
    return (
        told(lambda: rotate_all(only, mesh=mesh, rules=RULES)),
        told(lambda: rotate_all(of_path, mesh=mesh, rules={"0": MLPRule()})),
        told(lambda: rotate_all(complex_one, mesh=mesh)),
    )


def test_rules_that_fit_nothing_and_complex_parameters_are_refused(ranks: StartRanks) -> None:
    for unused, instance, complex_one in ranks(2).run(refused):
        assert "Normalizes: it overrides code of Plain, which the rule is for" in unused
        assert "Plain has a forward set on the instance" in instance
        assert "Sequential.0.weight is torch.complex64, but complex parameters" in complex_one
