"""A linear layer by its output features: the slices' outputs lie side by side."""

from typing import ClassVar

import torch
from torch import nn

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.output_reduction import ConcatenatedOutputs, OutputReduction
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.shards.layout import Cut, Layout


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


def rows(module: nn.Module) -> list[Cut]:
    """The cuts of a weight, and of the bias where there is one, along the output features.

    Raises:
        RotationError: the module has no parameter `weight`.
    """
    parameters = {name: getattr(module, name, None) for name in ("weight", "bias")}
    if not isinstance(parameters["weight"], nn.Parameter):
        raise RotationError(f"{type(module).__name__} has no parameter named weight")
    return [Cut(name, tuple(p.shape), 0) for name, p in parameters.items() if p is not None]
