# ruff: noqa: N803  # names carry shape letters
"""How Gyre's own attention rotates: by key/value heads, by query heads, or layer by layer.

Where the ranks cannot share the key/value heads evenly but can share the query heads, layers that
rotate by themselves compute keys and values first, and a slice attends to those that its query
heads use. Where the ranks can share neither, all four layers rotate one by one, and each rank
attends with all heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gyre_trainer.layers.attention import Attention, AttentionRule, Heads
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.projections import projections
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rule import ModuleSlice, Rule
from gyre_trainer.rotation.wrap import PartialRotation, RotationTarget, wrap
from gyre_trainer.shards.layout import Cut


@dataclass(frozen=True)
class QueryHeadsRule(Rule):
    """For `Attention.attend`: a slice holds query heads of q and o, and gets all keys and values.

    Attributes:
        heads: the heads of the whole module; the ring's size divides the query heads.
        head_dim: channels of one head.
    """

    heads: Heads
    head_dim: int

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Rows of q, columns of o, and a segment of o's bias."""
        return projections(module, ("q",), "o")

    def run(
        self, current: ModuleSlice, /, x_BTD: Tensor, keys: Tensor, values: Tensor, *rest: Any
    ) -> Tensor:
        """The slice's contribution: its query heads attend to their keys and values."""
        start, stop = (bound // self.head_dim for bound in current.bounds["q.weight"])
        keys, values = (self._serving(y.to(x_BTD.dtype), start, stop) for y in (keys, values))
        output: Tensor = current.forward(x_BTD, keys, values, *rest)
        return output

    def _serving(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """The heads of keys or values that serve query heads ``start`` to ``stop``."""
        group = self.heads.num_heads // self.heads.num_kv_heads
        serving = [head // group for head in range(start, stop)]
        if serving[0] == serving[-1]:
            return keys.narrow(-1, serving[0] * self.head_dim, self.head_dim)
        by_head = keys.view(*keys.shape[:-1], self.heads.num_kv_heads, self.head_dim)
        return by_head.index_select(-2, torch.tensor(serving, device=keys.device)).flatten(-2)


class RotatedQueries(RotatedModule):
    """Mixed in before `Attention`: keys and values first, then one pass round the ring."""

    k: nn.Module
    v: nn.Module

    def forward(
        self,
        x_BTD: Tensor,
        rope_TC: Tensor | None = None,
        padding_BT: Tensor | None = None,
        allowed_B1TT: Tensor | None = None,
    ) -> Any:
        """The module's output for this rank's part of the batch, as without rotation."""
        keys, values = self.k(x_BTD), self.v(x_BTD)
        return self.ring_forward(x_BTD, keys, values, rope_TC, padding_BT, allowed_B1TT)


def rotate_attention(module: Attention, target: RotationTarget) -> None:
    """Rotate by key/value heads, else by query heads, else layer by layer, as the ring allows."""
    heads = module.heads
    if heads.num_kv_heads % target.num_slices == 0:
        wrap(module, AttentionRule(heads.num_kv_heads), target)
        return
    by_queries = heads.num_heads % target.num_slices == 0
    for layer in (module.k, module.v) if by_queries else (module.q, module.k, module.v, module.o):
        wrap(layer, LinearRule(), target)
    if by_queries:
        rule = QueryHeadsRule(heads, module.head_dim)
        wrap(module, rule, target, PartialRotation(module.attend, ("q", "o"), RotatedQueries))
