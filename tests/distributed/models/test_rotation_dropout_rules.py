"""Which rules are found for blocks that drop out, and which are refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.found.blocks import find_rule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.models.dropping import CHANNELS, WIDTH, Attention, Layers

KEPT = RotationPolicy()


class Odd(nn.Module):
    """An MLP that may drop out in a way of its own."""

    def __init__(self, compute: Callable[["Odd", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(0.5)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x, self.up(x).tanh())


def behind(module: Odd, _x: Tensor, hidden: Tensor) -> Tensor:
    output: Tensor = module.drop(module.down(hidden))
    return output


def beside(module: Odd, x: Tensor, hidden: Tensor) -> Tensor:
    """The input, which is whole, after the last layer."""
    output: Tensor = module.down(hidden) * module.drop(x)
    return output


def given(module: Odd, x: Tensor, hidden: Tensor) -> Tensor:
    """The input itself, between the layers: an argument is whole in all slices."""
    output: Tensor = module.down(hidden * module.drop(x).sum(-1, keepdim=True))
    return output


def between(module: Odd, x: Tensor, hidden: Tensor) -> Tensor:
    """What is made of the input, which is whole, between the layers."""
    output: Tensor = module.down(hidden * module.drop(x.tanh()).sum(-1, keepdim=True))
    return output


def late(module: Odd, _x: Tensor, hidden: Tensor) -> Tensor:
    """The hidden width after the last layer."""
    output: Tensor = module.down(hidden) + module.drop(hidden).sum() * 0
    return output


def by_features(module: Odd, _x: Tensor, hidden: Tensor) -> Tensor:
    output: Tensor = module.down(F.dropout1d(hidden, 0.5, module.training))
    return output


def shifted(module: Odd, _x: Tensor, hidden: Tensor) -> Tensor:
    return F.alpha_dropout(module.down(hidden), 0.5, module.training)


def of_keys(module: Attention, x: Tensor) -> Tensor:
    q, k, v = (
        layer(x).unflatten(-1, (-1, CHANNELS)).transpose(1, 2)
        for layer in (module.q, module.k, module.v)
    )
    k = module.drop(k)
    y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    output: Tensor = module.o(y.transpose(1, 2).flatten(2))
    return output


class Grouped(Attention):
    """Attention with two key/value heads, of which it drops out the keys."""

    def __init__(self) -> None:
        super().__init__(4)
        self.num_key_value_heads = 2
        self.k, self.v = (nn.Linear(WIDTH, 2 * CHANNELS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return of_keys(self, x)


def test_a_rule_is_found_where_it_is_known_which_masks_are_equal() -> None:
    found = MLPRule(("up",), "down", drops_out=True)
    for compute in (behind, beside, given):
        assert find_rule(Odd(compute), 2) == found, compute
    assert find_rule(Odd(behind), 2, drops_out=False) is None
    for compute in (between, late, by_features, shifted):
        assert find_rule(Odd(compute), 2) is None, compute
    without = Odd(behind)
    without.drop.p = 0.0
    assert find_rule(without, 2) == MLPRule(("up",), "down")


def test_keys_that_slices_share_are_dropped_out_by_no_rule() -> None:
    rule = find_rule(Grouped(), 2, regrouped=True)
    assert isinstance(rule, AttentionRule)
    assert rule.drops_out
    assert find_rule(Grouped(), 4, regrouped=True) is None


def refused() -> list[str]:
    """What is said of rules by hand at the first call."""
    rule, mesh = MLPRule(("up",), "down", drops_out=True), make_mesh("cpu")
    told = []
    for compute, policy in (
        (between, KEPT),
        (late, KEPT),
        (shifted, KEPT),
        (behind, RotationPolicy(dropout="equal")),
    ):
        module = rotate(Odd(compute), mesh=mesh, policy=policy, rule=rule, verify=False)
        with pytest.raises(RotationError) as error:
            module(torch.ones(2, 4))
        told.append(str(error.value))
    for compute in (behind, beside):
        rotate(Odd(compute), mesh=mesh, rule=rule)(torch.ones(2, 4))
    return told


def test_rules_by_hand_are_refused_where_they_would_draw_wrong_masks(ranks: StartRanks) -> None:
    for whole_between, cut_after, other, equal in ranks(2).run(refused):
        assert "(2, 4) that every slice has whole, between its layers" in whole_between
        assert "(2, 3) that is cut, after its layers" in cut_after
        assert "Odd drops out after its last layer, with alpha_dropout" in other
        assert 'RotationPolicy(dropout="equal") has no masks' in equal


def rules_with_equal_masks() -> set[str | None]:
    model, policy = Layers(4).double(), RotationPolicy(dropout="equal")
    return {each.rule for each in rotate_all(model, mesh=make_mesh("cpu"), policy=policy).entries}


def test_equal_masks_leave_blocks_that_drop_out_to_their_layers(ranks: StartRanks) -> None:
    assert ranks(2).run(rules_with_equal_masks) == [{"LinearRule"}] * 2
