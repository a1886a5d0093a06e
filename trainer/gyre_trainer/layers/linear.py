"""A linear layer by its output features: slices of the output lie side by side."""

import torch
from torch import nn

from gyre_trainer.joined import Beside, Join
from gyre_trainer.layout import Cut, Layout
from gyre_trainer.rule import Rule


class LinearRule(Rule):
    """For `nn.Linear`: rows of the weight, and the bias with them."""

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Weight and bias, along their first dim."""
        return [Cut(name, tuple(parameter.shape), 0) for name, parameter in module.named_parameters()]

    def join(self, layout: Layout, dtype: torch.dtype) -> Join:
        """Side by side."""
        return Beside(-1, layout, dtype)
