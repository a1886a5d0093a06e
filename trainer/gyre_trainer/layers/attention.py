# ruff: noqa: N803, N806  # names carry shape letters
"""Causal self-attention by groups of heads: a slice attends with its own heads, and the outputs add up.

Dims: B batch, T time, D model, H heads, K key/value heads, C channels of one head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import projections
from gyre_trainer.layout import Cut
from gyre_trainer.rule import Rule


@dataclass(frozen=True, slots=True)
class Heads:
    """How a model's width is divided among heads.

    Attributes:
        num_heads: of the queries.
        num_kv_heads: of keys and values; each serves num_heads / num_kv_heads queries' heads.
    """

    num_heads: int
    num_kv_heads: int


def rope_table(num_positions: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """The rotary position embedding (arXiv 2104.09864), shape (T, C), float32: cosines in the first half, then sines.

    Made once for all layers and slices, which keep it for backward.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device=device), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _turned(x_BHTC: Tensor, rope_TC: Tensor) -> Tensor:
    """Each pair of channels (i, i + C/2) turned by its position's angle, in the table's precision or better."""
    cos, sin = rope_TC.chunk(2, dim=-1)
    one, other = x_BHTC.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1).type_as(x_BHTC)


class Attention(nn.Module):
    """Self-attention with rotary positions and grouped key/value heads.

    The number of heads is read from the weights, so the same forward runs with all heads or with a slice of them.
    """

    def __init__(self, dim: int, heads: Heads, *, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads.num_heads
        kv_dim = heads.num_kv_heads * self.head_dim
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, kv_dim, bias=bias)
        self.v = nn.Linear(dim, kv_dim, bias=bias)
        self.o = nn.Linear(dim, dim, bias=bias)

    def forward(self, x_BTD: Tensor, rope_TC: Tensor) -> Tensor:
        """Each position attends to itself and those before; ``rope_TC`` is `rope_table` for T positions."""
        q, k, v = (layer(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        grouped = q.shape[1] != k.shape[1]
        y_BHTC = F.scaled_dot_product_attention(_turned(q, rope_TC), _turned(k, rope_TC), v, is_causal=True, enable_gqa=grouped)
        output: Tensor = self.o(y_BHTC.transpose(1, 2).flatten(2))
        return output


@dataclass(frozen=True)
class AttentionRule(Rule):
    """For a module that projects to queries, keys and values, attends head by head, and projects back.

    A slice holds the same key/value heads, and the queries' heads that they serve, of all four layers. The forward must read
    the number of heads from the weights (`view(..., -1, head_dim)`) and be linear in the last layer's weights.

    Attributes:
        num_kv_heads: of the whole module; a multiple of the ring's size.
        inputs: names of the linear layers from the input to the heads.
        output: name of the linear layer from the heads to the output.
    """

    num_kv_heads: int
    inputs: tuple[str, ...] = ("q", "k", "v")
    output: str = "o"

    @property
    def linear_in(self) -> tuple[str, ...]:
        """The last layer's."""
        return f"{self.output}.weight", f"{self.output}.bias"

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Rows of q, k and v, columns of o, a segment of its bias."""
        if self.num_kv_heads % num_slices:
            names = ", ".join((*self.inputs, self.output))
            raise RotationError(
                f"{type(module).__name__} has {self.num_kv_heads} key/value heads, "
                f"which {num_slices} ranks cannot share evenly; take a divisor of that many ranks, "
                f"or rotate its layers {names} one by one instead"
            )
        return projections(module, self.inputs, self.output)
