"""Convolutions by output channels: the slices' outputs lie side by side."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.layers.linear import rows
from gyre_trainer.rotation.output_reduction import ConcatenatedOutputs, OutputReduction
from gyre_trainer.rotation.rule import ModuleSlice, Rule
from gyre_trainer.shards.layout import Cut, Layout

_FUNCTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class ConvRule(Rule):
    """For `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`. A cut may fall inside of a group.

    Attributes:
        conv: the module whose stride, padding and dilation are used.
    """

    conv: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Weight and bias, along the output channels."""
        return rows(module)

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """Side by side, along the channels."""
        return ConcatenatedOutputs(
            self._channels, layout.all_bounds(layout.cuts[0]), "weight", dtype
        )

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The slice's output channels."""
        (x,) = (*args, *kwargs.values())
        start, stop = current.bounds["weight"]
        weight, bias = current.weights["weight"], current.weights.get("bias")
        # torch has no convolution without output channels; one of zeros has the shape
        if start == stop:
            nothing = self._convolved(
                self._inputs(x, 0, 1), weight.new_zeros(1, *weight.shape[1:]), None, 1
            )
            return nothing.narrow(self._channels, 0, 0)
        if self.conv.groups == 1:
            return self._convolved(x, weight, bias, 1)
        parts = []
        for first, num_channels, group, num_groups in self._runs(start, stop):
            own = slice(first - start, first - start + num_channels)
            inputs = self._inputs(x, group, num_groups)
            parts.append(
                self._convolved(
                    inputs, weight[own], None if bias is None else bias[own], num_groups
                )
            )
        return torch.cat(parts, self._channels)

    @property
    def _channels(self) -> int:
        """The dim of the channels, with or without a batch in front."""
        return -1 - len(self.conv.kernel_size)

    def _inputs(self, x: Tensor, group: int, num_groups: int) -> Tensor:
        """The input channels of ``num_groups`` groups, from ``group`` on."""
        size = self.conv.in_channels // self.conv.groups
        return x.narrow(self._channels, group * size, num_groups * size)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """First output channel, number of channels, first group, number of groups.

        One convolution computes as many whole groups as there are, or a part of one group.
        """
        size = self.conv.out_channels // self.conv.groups
        while start < stop:
            group, inside = divmod(start, size)
            num_groups = 1 if inside else max(1, (stop - start) // size)
            num_channels = min(num_groups * size - inside, stop - start)
            yield start, num_channels, group, num_groups
            start += num_channels

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None, num_groups: int) -> Tensor:
        conv = self.conv
        padding: str | tuple[int, ...] | int = conv.padding
        if conv.padding_mode != "zeros":
            x, padding = F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
        function = _FUNCTIONS[len(conv.kernel_size)]
        return function(x, weight, bias, conv.stride, padding, conv.dilation, num_groups)
