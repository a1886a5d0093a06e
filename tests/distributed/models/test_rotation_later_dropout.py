"""Blocks that did not drop out when they were rotated, and do so afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks

Compute = Callable[["Perceptron", Tensor], Tensor]


class Perceptron(nn.Module):
    """An MLP with a dropout of rate 0."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(0.0)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def before(module: Perceptron, x: Tensor) -> Tensor:
    output: Tensor = module.down(module.up(module.drop(x)).tanh())
    return output


def behind(module: Perceptron, x: Tensor) -> Tensor:
    output: Tensor = module.drop(module.down(module.up(x).tanh()))
    return output


def by_function(module: Perceptron, x: Tensor) -> Tensor:
    output: Tensor = module.down(module.up(F.dropout(x, 0.5, module.training)).tanh())
    return output


def told(compute: Compute, recompute: bool, called: bool) -> str:
    """What is said of a rate that is set after the module was rotated, or after first calls."""
    policy = RotationPolicy(recompute="block" if recompute else "none")
    module: Any = rotate(
        Perceptron(compute), mesh=make_mesh("cpu"), policy=policy, rule=MLPRule(("up",))
    )
    for training in (True, False) if called else ():
        module.train(training)(torch.ones(3, 4))
    module.drop.p = 0.5
    module.eval()(torch.ones(3, 4))  # it drops nothing
    with pytest.raises(RotationError) as error:
        module.train()(torch.ones(3, 4))
    return str(error.value)


@pytest.mark.parametrize("compute", [before, behind])
def test_a_rate_that_is_set_later_is_refused(ranks: StartRanks, compute: Compute) -> None:
    for recompute, called in ((False, True), (True, True), (False, False)):
        for each in ranks(2).run(told, compute, recompute, called):
            assert "each slice would draw" in each
            assert not called or "Perceptron.drop drops out with p=0.5" in each


def test_a_function_that_drops_out_the_input_is_refused_without_its_rule(
    ranks: StartRanks,
) -> None:
    for each in ranks(2).run(told_of_function):
        assert "Perceptron drops out before its first layers, with dropout" in each


def told_of_function() -> str:
    module = rotate(Perceptron(by_function), mesh=make_mesh("cpu"), rule=MLPRule(("up",)))
    with pytest.raises(RotationError) as error:
        module(torch.ones(3, 4))
    return str(error.value)
