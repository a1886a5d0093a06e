# ruff: noqa: N803, N806  # names carry shape letters
"""Self-attention by groups of heads: a slice attends with its own heads, and the outputs add up.

Dims: B batch, T time, D model, H heads, K key/value heads, C channels of one head.

Where the ranks cannot share the key/value heads evenly, its layers rotate one by one, and each rank
attends with all heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import (
    LinearRule,
    changed_counts,
    count_of,
    is_table,
    projections,
    require_counts,
)
from gyre_trainer.layers.mlp import refuse_dropout
from gyre_trainer.rotation.rotated_module import RotationTarget, wrap
from gyre_trainer.rotation.rule import (
    ArgumentCut,
    ConcatenatedOutputs,
    ModuleSlice,
    OutputReduction,
    Rule,
)
from gyre_trainer.shards.layout import Cut, Layout


def rope_table(num_positions: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Rotary position embeddings (arXiv 2104.09864): cosines in the first half, then sines.

    The table is made once for all layers and slices, whose graphs keep it for backward.

    Returns:
        A float32 tensor of shape (T, C).
    """
    frequencies = theta ** -(
        torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    )
    angles = torch.outer(
        torch.arange(num_positions, dtype=torch.float32, device=device), frequencies
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _apply_rope(x_BHTC: Tensor, rope_TC: Tensor) -> Tensor:
    """``x_BHTC`` with each pair of channels (i, i + C/2) rotated by its position's angle.

    The computation is in the table's precision or better.
    """
    cos, sin = rope_TC.chunk(2, dim=-1)
    one, other = x_BHTC.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1).type_as(x_BHTC)


class Attention(nn.Module):
    """Self-attention with rotary positions and grouped key/value heads.

    The forward reads the number of heads from the weights, so it runs with all heads or with a
    slice.
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, *, bias: bool = False) -> None:
        """Each of ``num_kv_heads`` serves num_heads / num_kv_heads query heads."""
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.head_dim = dim // num_heads
        kv_dim = num_kv_heads * self.head_dim
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, kv_dim, bias=bias)
        self.v = nn.Linear(dim, kv_dim, bias=bias)
        self.o = nn.Linear(dim, dim, bias=bias)

    def forward(self, x_BTD: Tensor, rope_TC: Tensor, allowed_B1TT: Tensor | None = None) -> Tensor:
        """The output: each position attends to itself and those before.

        Args:
            x_BTD: the input.
            rope_TC: the table of `rope_table` for T positions.
            allowed_B1TT: true where a position attends to another, in place of that.
        """
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        )
        q, k = _apply_rope(q, rope_TC), _apply_rope(k, rope_TC)
        causal, grouped = allowed_B1TT is None, q.shape[1] != k.shape[1]
        y_BHTC = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed_B1TT, is_causal=causal, enable_gqa=grouped
        )
        output: Tensor = self.o(y_BHTC.transpose(1, 2).flatten(2))
        return output


@dataclass(frozen=True)
class AttentionRule(Rule):
    """For a module that projects to queries, keys and values, attends, and projects back.

    A slice holds some key/value heads, and the query heads that they serve, of all four layers. The
    forward must read the numbers of heads from the weights (`view(..., -1, head_dim)`), or from
    ``counts``, and be linear in the last layer's weights. Other outputs have the query heads in dim
    1, as attention weights do, or are arguments that it returns as they are.

    Numbers that the forward reads are named as attributes of the module, such as "num_heads", or of
    its config, such as "config.num_attention_heads".

    Attributes:
        num_kv_heads: key/value heads of the whole module.
        inputs: names of the linear layers from the input to the heads; one layer may make queries,
            keys and values, if the rows of each key/value head are together. More than three are as
            wide as the queries, such as those for keys of positions.
        output: name of the linear layer from the heads to the output.
        counts: numbers that the forward reads and of which a slice has its part, as of heads.
        by_heads: names of the forward's parameters that may have a tensor of four dims with all
            query heads in dim 1, such as a bias of positions: a slice is given that of its own.
        tables: names of embeddings inside with a column for each query head, from which the forward
            makes such a bias.
    """

    num_kv_heads: int
    inputs: tuple[str, ...] = ("q", "k", "v")
    output: str = "o"
    counts: tuple[str, ...] = ()
    by_heads: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()

    @property
    def cut_arguments(self) -> tuple[str, ...]:
        """The arguments by heads."""
        return self.by_heads

    def argument_cut(self, name: str, shape: Sequence[int], layout: Layout) -> ArgumentCut | None:
        """By query heads; None where the tensor is the same for all heads."""
        if len(shape) != 4 or shape[1] == 1:
            return None
        num_heads = self.num_heads(layout.cuts)
        if shape[1] != num_heads:
            raise RotationError(
                f"an attention of {num_heads} heads is called with {name} of shape {tuple(shape)}; "
                f"to share it among slices, its dim 1 must be {num_heads} or 1"
            )
        return ArgumentCut(1, self._heads_of_slices(layout))

    @property
    def linear_in(self) -> tuple[str, ...]:
        """Weight and bias of the last layer."""
        return f"{self.output}.weight", f"{self.output}.bias"

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Rows of the input layers, columns of the output layer, and a segment of its bias."""
        refuse_dropout(module)
        if self.num_kv_heads % num_slices:
            raise RotationError(
                f"{type(module).__name__} has {self.num_kv_heads} key/value heads, which "
                f"{num_slices} ranks cannot share evenly. Use a number of ranks that divides them, "
                "or give no rule: its layers rotate one by one"
            )
        require_counts(module, self.counts, num_slices)
        cuts = projections(module, self.inputs, self.output)
        return cuts + [
            self._cut_of_table(module, name, self.num_heads(cuts)) for name in self.tables
        ]

    def _cut_of_table(self, module: nn.Module, name: str, num_heads: int) -> Cut:
        """Columns of an embedding that has one for each query head."""
        table = module.get_submodule(name)
        if is_table(table) and table.embedding_dim == num_heads:
            return Cut(f"{name}.weight", tuple(table.weight.shape), 1)
        raise RotationError(
            f"{type(module).__name__}.{name} is {table}, but the rule needs an Embedding of "
            f"{num_heads} columns there, one for each query head, without other arguments"
        )

    def num_heads(self, cuts: Sequence[Cut]) -> int:
        """The query heads of the whole module; 0 where the widths of the layers do not say it."""
        widths = {cut.name: cut.shape[cut.dim] for cut in cuts}
        queries = widths[f"{self.output}.weight"]
        inputs = [widths[f"{name}.weight"] for name in self.inputs]
        keys = (inputs[0] - queries) // 2 if len(inputs) == 1 else min(inputs)
        return self.num_kv_heads * queries // keys if keys > 0 else 0

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Any:
        """The slice's contribution; the module reads the slice's numbers of heads meanwhile."""
        counts = {
            name: (count_of(current.module, name) or 0) // current.num_slices
            for name in (self.counts if current.num_slices > 1 else ())
        }
        with changed_counts(current.module, counts):
            return current.forward(*args, **kwargs)

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """The first output adds up; heads are side by side."""
        if position == 0:
            return OutputReduction(dtype)
        return ConcatenatedOutputs(1, self._heads_of_slices(layout), self.output, dtype)

    def _heads_of_slices(self, layout: Layout) -> list[tuple[int, int]]:
        """For each slice, the half-open range of its query heads."""
        own = self.num_heads(layout.cuts) // layout.num_slices
        return [(index * own, (index + 1) * own) for index in range(layout.num_slices)]


def rotate_attention(module: Attention, target: RotationTarget) -> None:
    """Rotate by key/value heads where the ranks can share them evenly, else layer by layer."""
    if module.num_kv_heads % target.num_slices == 0:
        wrap(module, AttentionRule(module.num_kv_heads), target)
        return
    for layer in (module.q, module.k, module.v, module.o):
        wrap(layer, LinearRule(), target)
