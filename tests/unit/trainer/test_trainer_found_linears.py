"""Linear layers with a forward of their own rotate where slices make what the layer makes."""

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.layers.found.blocks import find_rule
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.mlp import MLPRule
from torch import Tensor, nn


class Written(nn.Linear):
    """As the layers of Falcon."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        product = hidden_states @ self.weight.T
        return product if self.bias is None else product + self.bias


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.in_features**-0.5) * 2


class PerRow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / self.weight.norm(dim=1, keepdim=True)
        return F.linear(x, weight, self.bias)


class OverRows(nn.Linear):
    """Its scale is of all outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


class Softmax(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0 * torch.randn_like(x))


class InTraining(nn.Linear):
    """It is another function in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output if self.training else output / output.norm()


class _OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        grad: Tensor = grads[0] / grads[0].norm()  # of all outputs
        return grad


class OtherGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _OtherGradient.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return output


class WithOthers(nn.Linear):
    """One of its parameters is neither weight nor bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class MLP(nn.Module):
    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.up, self.down = layer(8, 32), layer(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class Dropping(MLP):
    """Drops out its hidden width and its output."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(x)), 0.5, self.training)
        return F.dropout(self.down(hidden), 0.25, self.training)


@pytest.mark.parametrize("layer", [Written, Scaled, PerRow])
def test_layers_whose_slices_make_their_output_are_found(layer: type[nn.Linear]) -> None:
    module = layer(8, 32)
    state = torch.get_rng_state()
    for num_slices in (2, 3):
        assert isinstance(find_rule(module, num_slices), LinearRule)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        assert isinstance(find_rule(layer(8, 32, bias=False), 2), LinearRule)


@pytest.mark.parametrize("layer", [OverRows, Softmax, Noisy, InTraining, OtherGradient, WithOthers])
def test_others_are_not(layer: type[nn.Linear]) -> None:
    assert find_rule(layer(8, 32), 2) is None


def test_layers_that_compute_as_linear_ones_are_in_blocks() -> None:
    assert isinstance(find_rule(MLP(nn.Linear), 2), MLPRule)
    assert isinstance(find_rule(MLP(Written), 2), MLPRule)
    assert find_rule(MLP(Scaled), 2) is None
    assert find_rule(MLP(OtherGradient), 2) is None


@pytest.mark.parametrize("layer", [nn.Linear, Written])
def test_a_block_drops_out_behind_layers_however_they_are_written(layer: type[nn.Linear]) -> None:
    rule = find_rule(Dropping(layer), 2)
    assert isinstance(rule, MLPRule)
    assert rule.drops_out
