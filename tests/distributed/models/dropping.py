"""Blocks that drop out at each place, and one process that drops out by the same masks."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotation.recomputation import DropoutMasks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WIDTH, CHANNELS, TIME = 8, 4, 5


class Attention(nn.Module):
    """Drops out its input, the probabilities and its output; returns the probabilities, too."""

    def __init__(self, num_heads: int, *, fused: bool = False) -> None:
        super().__init__()
        self.num_heads, self.fused = num_heads, fused
        self.q, self.k, self.v = (nn.Linear(WIDTH, num_heads * CHANNELS) for _ in range(3))
        self.o = nn.Linear(num_heads * CHANNELS, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        x = self.drop(x)
        q, k, v = (
            layer(x).unflatten(-1, (-1, CHANNELS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.fused:
            rate = 0.4 if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
            return self.drop(self.o(y.transpose(1, 2).flatten(2)))
        weights = F.dropout((q @ k.mT).softmax(-1), 0.4, self.training)
        return self.drop(self.o((weights @ v).transpose(1, 2).flatten(2))), weights


class Written(nn.Linear):
    """Uses its weight in its own way, as the layers of Falcon do."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Perceptron(nn.Module):
    """Drops out its hidden width, in place, and its output."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = Written(WIDTH, hidden), Written(hidden, WIDTH)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(self.drop(F.gelu(self.up(x)))), 0.25, self.training)


class Layers(nn.Module):
    """Two layers of both, as items of a list."""

    def __init__(self, num_heads: int, *, fused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"attention": Attention(num_heads, fused=fused), "mlp": Perceptron(2 * num_heads)}
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer["attention"](x)  # type: ignore[index]
            x = x + (y if isinstance(y, Tensor) else y[0])
            x = x + layer["mlp"](x)  # type: ignore[index]
        return x


def rules(num_heads: int) -> Any:
    """Rules for both."""
    return {
        Attention: AttentionRule(num_heads, ("q", "k", "v"), "o", drops_out=True),
        Perceptron: MLPRule(("up",), "down", drops_out=True),
    }


Seen = list[tuple[int, Tensor]]


@contextmanager
def masks_recorded() -> Iterator[Seen]:
    """A context that records each mask: where its slice begins, 0 for all slices, and factors."""
    seen: Seen = []
    apply = DropoutMasks.apply

    def recording(masks: DropoutMasks, x: Tensor, p: float) -> Tensor:
        again = replace(masks, positions=copy(masks.positions))
        seen.append((masks.first, apply(again, torch.ones_like(x), p).detach()))
        return apply(masks, x, p)

    DropoutMasks.apply = recording  # type: ignore[method-assign,assignment]
    try:
        yield seen
    finally:
        DropoutMasks.apply = apply  # type: ignore[method-assign]


def masks_of_whole(seen: Seen, num_slices: int, num_dropouts: list[int]) -> list[Tensor]:
    """The masks of whole modules, of those that their slices had, in the order of calls.

    Args:
        seen: those of one forward.
        num_slices: of each module.
        num_dropouts: how often each module drops out.
    """
    found, place = [], 0
    for number in num_dropouts:
        slices = [seen[place + index * number :][:number] for index in range(num_slices)]
        place += num_slices * number
        for masks in zip(*slices, strict=True):
            parts = [mask for _, mask in sorted(masks, key=lambda each: each[0])]
            if len({start for start, _ in masks}) == 1:
                assert all(torch.equal(part, parts[0]) for part in parts)
                found.append(parts[0])
            else:
                dim = 1 if parts[0].ndim == 4 else -1  # heads, or the hidden width
                found.append(torch.cat(parts, dim))
    assert place == len(seen)
    return found


class GivenMasks(TorchFunctionMode):
    """A context in which dropouts take the next of the given masks."""

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self._masks = iter(masks)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.dropout:
            return func(*args, **kwargs or {})
        mask = next(self._masks)
        assert mask.shape == args[0].shape
        return args[0] * mask
