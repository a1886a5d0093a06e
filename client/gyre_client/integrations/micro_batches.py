"""Batches for trainers of language models: inputs and targets, in micro-batches of one rank.

A Loader's batch is a rank's part of one step of the optimizer. Trainers that accumulate
gradients, or have pipeline stages, take it in parts of `micro_batch_size` samples.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gyre_client.errors import InvalidRequest
from gyre_client.loader.loader import Loader


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Inputs and targets of B rows of S tokens.

    Attributes:
        tokens: int64 [B, S].
        targets: int64 [B, S]; the token that follows each of `tokens`.
        counts: bool [B, S]; false for targets that are padding, or that a loss leaves out.
        position: int64 [B, S]; it counts from 0 in each document.
    """

    tokens: Tensor
    targets: Tensor
    counts: Tensor
    position: Tensor

    def split(self, size: int) -> "Iterator[TokenBatch]":
        """Yields views of `size` rows each."""
        fields = (self.tokens, self.targets, self.counts, self.position)
        for parts in zip(*(torch.split(each, size) for each in fields), strict=True):
            yield TokenBatch(*parts)


def next_tokens(
    batch: Mapping[str, Tensor], sequence_length: int, field: str = "tokens"
) -> TokenBatch:
    """Returns the inputs and targets of a Loader's batch.

    Args:
        batch: Its field has S + 1 ids for each sample: windows of the format `tokens`, packed
            documents (with their `loss_mask` and `position`), or documents cut or padded to one
            length. Samples whose `mask` is false do not count.
        sequence_length: S.
        field: The name of the field.

    Raises:
        InvalidRequest: The batch has no such field, or its rows have another length; or see
            `counted_tokens`.
    """
    tokens = batch.get(field)
    if tokens is None or tokens.ndim != 2 or tokens.shape[1] != sequence_length + 1:
        found = ", ".join(f"{name} {list(each.shape)}" for name, each in batch.items())
        raise InvalidRequest(
            f"{field}: rows of {sequence_length + 1} ids are needed, {sequence_length} inputs and "
            f"their targets (got {found}). Set `sequence_length` of the format `tokens`, or "
            f"`length` of `pack`, to {sequence_length + 1}"
        )
    targets = tokens[:, 1:].long()
    counts = counted_tokens(batch, tokens)[:, 1:]
    if "mask" in batch:
        counts = counts & batch["mask"][:, None]
    position = batch.get("position")
    if position is None:
        position = torch.arange(sequence_length + 1).expand_as(tokens)
    return TokenBatch(tokens[:, :-1].long(), targets, counts, position[:, :-1].long())


def counted_tokens(batch: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Returns where tokens count: `loss_mask` as bool, or true for all.

    Raises:
        InvalidRequest: The mask has other values than 0 and 1, such as weights.
    """
    mask = batch.get("loss_mask", torch.ones_like(tokens, dtype=torch.bool))
    counts = mask.bool()
    if not torch.equal(counts.to(mask.dtype), mask):
        raise InvalidRequest(
            "loss_mask: tokens count or do not, and have no weights (got other values than 0 and "
            "1). Store true for those that count"
        )
    return counts


class MicroBatches:
    """The token batches of a Loader in parts, with a state between two steps.

    Attributes:
        loader: Reads the batches of this rank.
    """

    def __init__(
        self, loader: Loader, micro_batch_size: int, sequence_length: int, field: str = "tokens"
    ) -> None:
        """Reads nothing.

        Args:
            loader: Its `batch_size` counts the samples of a step over all ranks.
            micro_batch_size: Samples of one part, on this rank.
            sequence_length: S, the tokens of an input.
            field: The name of the field of tokens.

        Raises:
            InvalidRequest: This rank's part of a step is not whole micro-batches.
        """
        if loader.local_batch_size % micro_batch_size:
            raise InvalidRequest(
                f"batch_size: a rank's {loader.local_batch_size} samples of a step are not whole "
                f"micro-batches of {micro_batch_size}. Take a multiple of micro_batch_size x ranks"
            )
        self.loader = loader
        self._micro_batch_size = micro_batch_size
        self._sequence_length = sequence_length
        self._field = field
        self._num_left = 0  # of the step in hand

    def iterate(self, *, endless: bool) -> Iterator[TokenBatch]:
        """Yields micro-batches from where the loader is: without an end, or to its epoch's."""
        self._num_left = 0
        for batch in self.loader.stream() if endless else self.loader:
            rows = next_tokens(batch, self._sequence_length, self._field)
            self._num_left = self.loader.local_batch_size // self._micro_batch_size
            for part in rows.split(self._micro_batch_size):
                self._num_left -= 1
                yield part

    def state_dict(self) -> dict[str, Any]:
        """Returns the Loader's state, the same on all ranks; it fits another number of ranks.

        Raises:
            InvalidRequest: Some micro-batches of the step were not taken yet.
        """
        if self._num_left:
            raise InvalidRequest(
                f"state_dict: {self._num_left} micro-batches of this step were not taken yet. Save "
                "between two steps"
            )
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the step after that state the next one, for iterations that begin from now on."""
        self.loader.load_state_dict(state_dict)
        self._num_left = 0
