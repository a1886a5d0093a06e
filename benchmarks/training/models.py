"""The models: each takes a loader's batch and returns its loss."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gyre_trainer.training.gpt import GPT, GPTConfig
from torch import Tensor, nn

from benchmarks.training import glyphs
from benchmarks.training.samples import SEQUENCE_LENGTH, Name

_VOCABULARY = 256
_GRID = 4


class Transformer(nn.Module):
    """A GPT over bytes; its loss is nats per byte."""

    def __init__(self, dim: int, num_layers: int) -> None:
        super().__init__()
        self.gpt = GPT(
            GPTConfig(_VOCABULARY, num_layers, dim, 2, 2, 4 * dim, SEQUENCE_LENGTH, gated_mlp=False)
        )

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean over all bytes of the batch."""
        tokens = batch["tokens"].long()  # as Gyre's arrive; the others have bytes
        return F.cross_entropy(self.gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class ConvNet(nn.Module):
    """Three strided convolutions, averages over a grid of places, a linear layer.

    Its loss is nats per image.
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        widths = [3, num_channels, 2 * num_channels, 4 * num_channels]
        stages = [_stage(before, after) for before, after in itertools.pairwise(widths)]
        head = nn.Linear(widths[-1] * _GRID**2, len(glyphs.CHARACTERS))
        self.layers = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(_GRID), nn.Flatten(), head)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean over all images of the batch."""
        return F.cross_entropy(self.layers(batch["npy"].float() / 128 - 1), batch["cls"])


def _stage(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 5, 2, 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


@dataclass(frozen=True)
class Architecture:
    """A model and its data.

    Attributes:
        label: its name in the reports.
        data: the dataset that it learns.
        width: channels of the residual stream, or of the first convolution.
        lr: AdamW's learning rate at the beginning.
    """

    label: str
    data: Name
    width: int
    lr: float = 3e-3

    def build(self, seed: int) -> nn.Module:
        """The model; the same seed gives the same weights."""
        torch.manual_seed(seed)
        return (
            ConvNet(self.width) if self.data == "glyphs" else Transformer(self.width, num_layers=2)
        )

    def about(self) -> str:
        """A description of its size."""
        num_parameters = sum(parameter.numel() for parameter in self.build(0).parameters())
        return f"{self.label}: {num_parameters:,} parameters"
