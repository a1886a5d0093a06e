"""What one computation of a slice reads: all tokens of a call, or some of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from gyre_trainer.rotation.output_reduction import RunningSum


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """A call's inputs for some of its tokens.

    Attributes:
        inputs: replicated parameters and arguments, detached from the graph around the call.
        sums: the sums of their gradients. What is added for some tokens of an input goes to those
            rows of the input's sum.
        tokens: the half-open range of tokens, counted over all dims but the last; None for all.
    """

    inputs: Sequence[Tensor]
    sums: Sequence[RunningSum]
    tokens: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of ``tensor`` for these tokens, with as many dims."""
        return tensor if self.tokens is None else _rows(tensor, self.tokens)

    def split(self, position: int, num_tokens: int) -> "Iterator[TokenChunk]":
        """Chunks of at most ``num_tokens`` tokens each, as equal as can be.

        ``position`` is the index of the contiguous input that has the tokens.
        """
        source, total = self.inputs[position], self.sums[position]
        num_rows = source.shape[:-1].numel()
        num_portions = -(-num_rows // num_tokens)
        for index in range(num_portions):
            tokens = slice(index * num_rows // num_portions, (index + 1) * num_rows // num_portions)
            rows = _rows(source.detach(), tokens).requires_grad_(source.requires_grad)
            of_rows = total.part_sum(_rows(total.writable(source), tokens)) if source.requires_grad else total
            inputs, sums = list(self.inputs), list(self.sums)
            inputs[position], sums[position] = rows, of_rows
            yield TokenChunk(inputs, sums, tokens)


def _rows(tensor: Tensor, tokens: slice) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])[tokens]
    return rows.view(*[1] * (tensor.ndim - 2), *rows.shape)
