"""A linear layer by its output features: the slices' outputs lie side by side."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.output_reduction import ConcatenatedOutputs, OutputReduction
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rule import ModuleSlice, Rule, parameter_at
from gyre_trainer.rotation.wrap import PartialRotation, RotationTarget, wrap
from gyre_trainer.shards.layout import Cut, Layout
from gyre_trainer.shards.local_shards import local_of
from gyre_trainer.shards.sharded_parameters import sharded_parameters_of


class LinearRule(Rule):
    """For `nn.Linear`: rows of the weight, and the bias with them."""

    divisible: ClassVar[bool] = True

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Weight and bias, along their first dim."""
        return rows(module)

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """Side by side, along the features."""
        return ConcatenatedOutputs(-1, layout.all_bounds(layout.cuts[0]), "weight", dtype)


class TransposedLinearRule(Rule):
    """For a linear layer whose weight has the output features as columns, as GPT-2's `Conv1D`."""

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Columns of the weight, and the bias with them."""
        weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
        return [Cut("weight", tuple(weight.shape), 1), Cut("bias", tuple(bias.shape), 0)]

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The slice's features. The layer's own forward would want all of them."""
        (x,) = (*args, *kwargs.values())
        output: Tensor = F.linear(x, current.weights["weight"].t(), current.weights["bias"])
        return output

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """Side by side, along the features."""
        return ConcatenatedOutputs(-1, layout.all_bounds(layout.cuts[0]), "weight", dtype)


class WeightOnlyRule(LinearRule):
    """For a linear layer without its bias."""

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The weight, along its first dim."""
        return [cut for cut in rows(module) if cut.name == "weight"]

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The slice's features, before the bias."""
        (x,) = (*args, *kwargs.values())
        output: Tensor = F.linear(x, current.weights["weight"])
        return output


class AddsBias(RotatedModule):
    """Mixed in before `nn.Linear`: the bias, which is whole on every rank, is added at the end."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's part of the batch, as without rotation."""
        assert isinstance(self, nn.Module)
        output = self.ring_forward(*args, **kwargs)
        return output + cast(local_of(parameter_at(self, "bias")), output.dtype)


def rotate_linear(module: nn.Linear, target: RotationTarget) -> None:
    """Rotate weight and bias, or the weight alone where it is tied with a layer without a bias."""
    sharded = sharded_parameters_of(module.get_parameter("weight"))
    if module.bias is None or sharded is None or len(sharded.parameters) > 1:
        wrap(module, LinearRule(), target)
    else:
        partial = PartialRotation(module.forward, ("weight",), AddsBias)
        wrap(module, WeightOnlyRule(), target, partial)


def rows(module: nn.Module) -> list[Cut]:
    """The cuts of a weight, and of the bias where there is one, along the output features.

    Raises:
        RotationError: the module has no parameter `weight`.
    """
    parameters = {name: getattr(module, name, None) for name in ("weight", "bias")}
    if not isinstance(parameters["weight"], nn.Parameter):
        raise RotationError(f"{type(module).__name__} has no parameter named weight")
    return [Cut(name, tuple(p.shape), 0) for name, p in parameters.items() if p is not None]
