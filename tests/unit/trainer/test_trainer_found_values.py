"""What the values of buffers, and of attributes, have to do with whether a block is found."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.layers.found.blocks import find_rule
from gyre_trainer.layers.found.finder import BlockFinder
from torch import Tensor, nn

WIDTH = 8


class Perceptron(nn.Module):
    """An MLP that may add its input, which slices must not: each of them would add it."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        for name, value in given.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x)))
        return torch.where(self.adds(), x + output, output)

    def adds(self) -> Tensor:
        """Whether it adds its input."""
        raise NotImplementedError


class BySwitch(Perceptron):
    switch: Tensor

    def adds(self) -> Tensor:
        return self.switch


class ByItem(Perceptron):
    gate: Tensor

    def adds(self) -> Tensor:
        return torch.tensor(self.gate.item() > 10)


class ByList(Perceptron):
    gate: Tensor

    def adds(self) -> Tensor:
        return torch.tensor(self.gate.flatten().tolist()[0] > 10)


class Gated(Perceptron):
    gate: Tensor

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output + self.gate * x


class ByVars(Perceptron):
    def adds(self) -> Tensor:
        return torch.tensor(vars(self)["place"] == 5)


class ByKind(Perceptron):
    mode: object

    def adds(self) -> Tensor:
        return torch.tensor(self.mode is True)


def found_in(*modules: nn.Module) -> list[bool]:
    finder = BlockFinder(nn.ModuleList(modules), 2)
    return [finder.rule_of(each) is not None for each in modules]


def test_blocks_whose_switches_differ_are_tried_each() -> None:
    modules = [BySwitch(switch=torch.tensor(value)) for value in (False, True, False)]
    assert found_in(*modules) == [True, False, True]


def test_numbers_that_are_equal_but_of_another_type_are_told_apart() -> None:
    assert found_in(ByKind(mode=1.0), ByKind(mode=True)) == [True, False]


def test_a_number_that_is_read_by_vars_is_read() -> None:
    found = found_in(*(ByVars(place=place) for place in range(7)))
    assert found == [place != 5 for place in range(7)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_depends_on_values_that_may_change_is_no_block(device: str) -> None:
    """A gate is zero until a checkpoint is read."""
    for kind in (Gated, ByItem, ByList):
        assert find_rule(kind(gate=torch.zeros((), device=device)).to(device), 2) is None, kind


def test_a_switch_without_a_value_is_no_block() -> None:
    for size in range(1, 5):
        module = BySwitch(switch=torch.zeros(size, 1, dtype=torch.bool)).to("meta")
        assert find_rule(module, 2) is None


def test_buffers_that_only_scale_are_no_hindrance() -> None:
    class Scales(Perceptron):
        scale: Tensor

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.down(F.gelu(self.up(x))) * self.scale.sqrt()
            return output

    for device in ("cpu", "meta"):
        assert find_rule(Scales(scale=torch.ones(WIDTH)).to(device), 2) is not None
