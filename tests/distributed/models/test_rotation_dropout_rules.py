"""Rules for blocks that drop out where no slice could have the right mask: refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import rotate
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks


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


def between(module: Odd, x: Tensor, hidden: Tensor) -> Tensor:
    """What is made of the input, which is whole, between the layers."""
    output: Tensor = module.down(hidden * module.drop(x.tanh()).sum(-1, keepdim=True))
    return output


def late(module: Odd, _x: Tensor, hidden: Tensor) -> Tensor:
    """The hidden width after the last layer."""
    output: Tensor = module.down(hidden) + module.drop(hidden).sum() * 0
    return output


def shifted(module: Odd, _x: Tensor, hidden: Tensor) -> Tensor:
    return F.alpha_dropout(module.down(hidden), 0.5, module.training)


def refused() -> list[str]:
    """What is said of rules by hand at the first call."""
    rule, mesh = MLPRule(("up",), "down", drops_out=True), make_mesh("cpu")
    told = []
    for compute in (between, late, shifted):
        module = rotate(Odd(compute), mesh=mesh, rule=rule, verify=False)
        with pytest.raises(RotationError) as error:
            module(torch.ones(2, 4))
        told.append(str(error.value))
    for compute in (behind, beside):
        rotate(Odd(compute), mesh=mesh, rule=rule)(torch.ones(2, 4))
    return told


def test_rules_by_hand_are_refused_where_they_would_draw_wrong_masks(ranks: StartRanks) -> None:
    for whole_between, cut_after, other in ranks(2).run(refused):
        assert "(2, 4) that every slice has whole, between its layers" in whole_between
        assert "(2, 3) that is cut, after its layers" in cut_after
        assert "Odd drops out after its last layer, with alpha_dropout" in other
