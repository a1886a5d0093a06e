"""An embedding by rows of its vocabulary.

Its rows are sent to the ranks whose tokens they are for. On one rank it goes
round the ring as other modules do: a slice gives its own tokens' rows, zero for others.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rule import ModuleSlice, RowsRule
from gyre_trainer.shards.layout import Cut


@dataclass(frozen=True)
class EmbeddingRule(RowsRule):
    """For `nn.Embedding`. Its gradient needs no weights, so these travel only in forward.

    Attributes:
        num_embeddings: the vocabulary's size.
        padding_idx: the token whose row takes no gradient; None for no such token.
    """

    num_embeddings: int
    padding_idx: int | None = None

    backward_reads_weights: ClassVar[bool] = False
    recompute_pays: ClassVar[bool] = False
    divisible: ClassVar[bool] = True

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The weight, along the vocabulary."""
        assert isinstance(module, nn.Embedding)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option) is not None and getattr(module, option) is not False:
                raise RotationError(f"{module}: an embedding with {option} cannot be rotated")
        return [Cut("weight", tuple(module.weight.shape), 0)]

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The rows of the tokens in the slice's range of the vocabulary, zero for others."""
        (tokens,) = (*args, *kwargs.values())
        weight = current.weights["weight"]
        start, stop = current.bounds["weight"]
        if start == stop:
            return weight.new_zeros(*tokens.shape, weight.shape[1])
        outside = torch.zeros_like(tokens, dtype=torch.bool)
        # Tokens outside of all slices are left to the first and the last slice, where torch refuses
        # them.
        if start > 0:
            outside |= tokens < start
        if stop < self.num_embeddings:
            outside |= tokens >= stop
        padding = self.padding_idx
        here = None if padding is None or not start <= padding < stop else padding - start
        rows = self._rows(current, torch.where(outside, 0, tokens - start), here)
        return rows.masked_fill(outside.unsqueeze(-1), 0)

    def of_rows(self, current: ModuleSlice, places: Tensor, padding: int | None) -> Tensor:
        """The rows of the tokens, as the module makes them of ``current``'s."""
        return self._rows(current, places, padding)

    def _rows(self, current: ModuleSlice, tokens: Tensor, padding_idx: int | None) -> Tensor:
        """What the module makes of ``tokens`` that are counted from the slice's first row."""
        return F.embedding(tokens, current.weights["weight"], padding_idx=padding_idx)


@dataclass(frozen=True)
class OwnEmbeddingRule(EmbeddingRule):
    """For a subclass of `nn.Embedding` whose forward changes each row alike, such as by a scale.

    The forward takes the tokens alone, and calls its parent's.
    """

    backward_reads_weights: ClassVar[bool] = True

    def _rows(self, current: ModuleSlice, tokens: Tensor, padding_idx: int | None) -> Tensor:
        before = current.module.padding_idx
        current.module.padding_idx = padding_idx  # type: ignore[assignment]
        try:
            rows: Tensor = current.forward(tokens)
        finally:
            current.module.padding_idx = before
        return rows
