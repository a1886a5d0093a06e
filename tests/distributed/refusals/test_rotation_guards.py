"""What would be wrong in silence is refused by name, or computed as without rotation."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import RotationPolicy, materialize, rotate, rotate_all
from gyre_trainer.rotation.rule import Rule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import DropsInside, told


class Cache:
    """As a cache of keys and values: every call adds to it."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class CachingMLP(MLP):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            cache.keys.append(x)
        return super().forward(x)


def told_of_a_cache() -> list[str]:
    from transformers import DynamicCache  # takes seconds

    mlp = rotate(CachingMLP(4, 8), mesh=make_mesh("cpu"), rule=MLPRule())
    caches = (None, Cache(), DynamicCache())
    return [told(lambda: mlp(torch.ones(1, 4), cache=cache)) for cache in caches]  # noqa: B023


def test_a_cache_inside_what_rotates_is_refused(ranks: StartRanks) -> None:
    for without, with_cache, with_that_of_heads in ranks(2).run(told_of_a_cache):
        assert without == ""
        assert "RotatedCachingMLP is called with a Cache" in with_cache
        assert "use_cache=False" in with_cache
        assert "RotatedCachingMLP is called with a DynamicCache" in with_that_of_heads


def off_with_a_cache_of_transformers() -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds
    from transformers.models.llama.modeling_llama import LlamaAttention

    torch.manual_seed(0)
    configure: Any = LlamaConfig
    make: Any = LlamaForCausalLM
    config = configure(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=32,
    )
    model = make(config).double().eval()
    tokens = torch.arange(6).view(1, 6)
    expected = model(input_ids=tokens, use_cache=False).logits
    names = ("q_proj", "k_proj", "v_proj")
    rules: dict[type[nn.Module] | str, Rule | None] = {
        LlamaAttention: AttentionRule(4, inputs=names, output="o_proj")
    }
    rotate_all(model, mesh=make_mesh("cpu"), rules=rules)
    with torch.no_grad():
        found = [model(input_ids=tokens, use_cache=uses).logits for uses in (True, False)]
        return [float((each - expected).abs().max()) for each in found]


def test_llama_with_a_rule_is_exact_with_its_default_cache_and_without(ranks: StartRanks) -> None:
    for with_cache, without in ranks(2).run(off_with_a_cache_of_transformers):
        assert with_cache < 1e-6
        assert without < 1e-6


class DropsAfter(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


def derivative_of(first_mode: bool) -> tuple[float, float]:
    """The derivative along one direction, from gradients and from differences of one mask."""
    torch.manual_seed(dist.get_rank())
    mesh = make_mesh("cpu")
    torch.manual_seed(5)
    mlp = DropsInside(4, 8).double()
    rotate(mlp, mesh=mesh, policy=RotationPolicy(recompute="block"), rule=MLPRule())
    x, along = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    mlp.train(first_mode)(x)
    mlp.train()

    def value(where: Tensor) -> Tensor:
        torch.manual_seed(7)
        output: Tensor = mlp(where).square().sum()
        return output

    leaf = x.clone().requires_grad_()
    value(leaf).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    by_differences = (value(x + 1e-6 * along) - value(x - 1e-6 * along)) / 2e-6
    return float((leaf.grad * along).sum()), float(by_differences.detach())


@pytest.mark.parametrize("first_mode", [True, False])
def test_dropout_in_a_forward_is_drawn_again_when_backward_recomputes(
    ranks: StartRanks, first_mode: bool
) -> None:
    for found, expected in ranks(2).run(derivative_of, first_mode):
        assert found == pytest.approx(expected, rel=1e-5)


def told_of_dropout_after() -> tuple[str, str]:
    mlp = rotate(DropsAfter(4, 8), mesh=make_mesh("cpu"), rule=MLPRule())
    in_eval = told(lambda: mlp.eval()(torch.ones(1, 4)))
    return in_eval, told(lambda: mlp.train()(torch.ones(1, 4)))


def test_dropout_after_the_last_layer_is_refused_in_training_after_a_call_in_eval(
    ranks: StartRanks,
) -> None:
    for in_eval, in_training in ranks(2).run(told_of_dropout_after):
        assert in_eval == ""
        assert "DropsAfter drops out after its last layer, with dropout" in in_training


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), MLP(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.mlp(self.norm(x))
        return output


def rotated_from_different_values(sync_from: int | None, changed: str) -> tuple[str, float]:
    """The refusal, or how far this rank's parameters are from those of the rank to sync from."""
    torch.manual_seed(0)
    model = Normed()
    if dist.get_rank() == 1:
        model.get_parameter(changed).data += 1
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    text = told(lambda: rotate_all(model, mesh=make_mesh("cpu"), sync_from=sync_from))
    if text:
        return text, 0.0
    for parameter in expected:
        dist.broadcast(parameter, src=sync_from)
    found = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    return "", max(
        float((one - other).detach().abs().max())
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("changed", ["norm.weight", "mlp.up.weight", "mlp.down.weight"])
def test_values_that_differ_are_refused_or_taken_from_one_rank(
    ranks: StartRanks, changed: str
) -> None:
    for text, _ in ranks(2).run(rotated_from_different_values, None, changed):
        assert f"on rank 0 {changed} has values of digest " in text
        assert "sync_from=0" in text
    for source in (0, 1):
        for text, off in ranks(2).run(rotated_from_different_values, source, changed):
            assert (text, off) == ("", 0.0)


def gradients_of_what_was_frozen(name: str) -> tuple[Tensor, Tensor]:
    """The gradient of a parameter that was frozen in rotating, and that of one process."""
    torch.manual_seed(0)
    model, alone = Normed().double(), Normed().double()
    alone.load_state_dict(model.state_dict())
    model.get_parameter(name).requires_grad_(False)
    rotate_all(model, mesh=make_mesh("cpu"))
    x = torch.randn(2 * dist.get_world_size(), 4, dtype=torch.float64)
    model(x[:2]).square().mean().backward()
    model.zero_grad()
    model.get_parameter(name).requires_grad_(True)
    model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    alone(x).square().mean().backward()
    found, expected = model.get_parameter(name).grad, alone.get_parameter(name).grad
    assert isinstance(found, DTensor)
    assert expected is not None
    return found.full_tensor(), expected


@pytest.mark.parametrize("name", ["norm.weight", "mlp.up.weight", "mlp.down.weight"])
def test_a_parameter_that_is_unfrozen_after_rotating_has_the_gradient_of_one_process(
    ranks: StartRanks, name: str
) -> None:
    for found, expected in ranks(2).run(gradients_of_what_was_frozen, name):
        torch.testing.assert_close(found, expected)
        assert expected.abs().max() > 0


def told_of_early_optimizers() -> list[str]:
    """What each optimizer's step ends in: of all parameters, a late one, a norm's, one on meta."""
    mesh = make_mesh("cpu")
    texts = []
    for names in (("",), ("norm",), ("mlp.down",)):
        model = Normed()
        held = [p for name, p in model.named_parameters() if name.startswith(names)]
        early = torch.optim.AdamW(held)
        rotate_all(model, mesh=mesh, sync_from=0)
        late = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        late.step()
        texts.append(told(early.step))
        early.param_groups.clear()
        early.add_param_group({"params": list(model.parameters())})
        early.step()  # it holds the present ones now
    with torch.device("meta"):
        model = Normed()
    early = torch.optim.AdamW(model.parameters())
    materialize(model, seed=0)
    return [*texts, told(early.step)]


def test_an_optimizer_that_was_made_before_rotating_is_refused(ranks: StartRanks) -> None:
    for of_all, of_a_norm, of_a_layer, on_meta in ranks(2).run(told_of_early_optimizers):
        assert "AdamW holds 4 parameters, first norm.weight, that the model has no" in of_all
        assert "AdamW holds 2 parameters, first norm.weight" in of_a_norm
        assert "AdamW holds 1 parameter, first down.weight of" in of_a_layer
        assert "AdamW holds 4 parameters" in on_meta
        for text in (of_all, of_a_norm, of_a_layer, on_meta):
            assert "Make the optimizer after these" in text


def told_of_an_added_layer() -> str:
    model = Normed()
    rotate_all(model, mesh=make_mesh("cpu"), sync_from=0)
    model.add_module("adapter", nn.Linear(4, 4))
    return told(lambda: model(torch.ones(1, 4)))


def test_a_layer_that_is_added_after_rotating_is_refused(ranks: StartRanks) -> None:
    for text in ranks(2).run(told_of_an_added_layer):
        assert "adapter.weight was added to" in text
