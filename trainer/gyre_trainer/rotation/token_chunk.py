"""What one computation of a slice reads: all tokens of a call, or some of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from gyre_trainer.rotation.output_reduction import Sum


@dataclass(frozen=True, slots=True)
class Portion:
    """A call's inputs for some of its tokens.

    Attributes:
        inputs: passengers and arguments, cut off the graph around.
        sums: of their gradients; what is added for some tokens of an input lands in the sum of that input.
        tokens: their half-open range, counted over all dims but the last; None for all.
    """

    inputs: Sequence[Tensor]
    sums: Sequence[Sum]
    tokens: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor's rows of these tokens, with as many dims."""
        return tensor if self.tokens is None else _rows(tensor, self.tokens)

    def split(self, place: int, num_tokens: int) -> "Iterator[Portion]":
        """Of at most that many tokens each, as equal as can be; ``place`` is that of the contiguous input that has them."""
        source, total = self.inputs[place], self.sums[place]
        num_rows = source.shape[:-1].numel()
        num_portions = -(-num_rows // num_tokens)
        for index in range(num_portions):
            tokens = slice(index * num_rows // num_portions, (index + 1) * num_rows // num_portions)
            rows = _rows(source.detach(), tokens).requires_grad_(source.requires_grad)
            of_rows = total.within(_rows(total.room(source), tokens)) if source.requires_grad else total
            inputs, sums = list(self.inputs), list(self.sums)
            inputs[place], sums[place] = rows, of_rows
            yield Portion(inputs, sums, tokens)


def _rows(tensor: Tensor, tokens: slice) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])[tokens]
    return rows.view(*[1] * (tensor.ndim - 2), *rows.shape)
