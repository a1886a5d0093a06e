# names carry shape letters
"""From a loader's batch to the examples of a language model.

A sample is a window of sequence_length + 1 tokens: its inputs are all but the last, its targets all
but the first. Of packed rows, which hold several documents, the targets are those of `loss_mask`,
so none is the first token of a document or padding.

Dims: B samples of this rank, T = sequence_length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gyre_trainer.errors import DataRejected
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.losses import moved


@dataclass(frozen=True, slots=True)
class Examples:
    """Inputs and targets of one rank for one step.

    Attributes:
        inputs: int64 [B, T].
        targets: int64 [B, T].
        counts: bool [B, T], the targets that have a loss; None for all. Either all ranks have it or
            none.
        positions: int64 [B, T], the place of each input in its document, where several documents
            are packed into a row; None where a row is one document. Either all ranks have it or
            none.
    """

    inputs: Tensor
    targets: Tensor
    counts: Tensor | None
    positions: Tensor | None = None

    def num_targets(self) -> int:
        """The number of targets that have a loss."""
        return self.targets.numel() if self.counts is None else int(self.counts.sum())

    def split(self, num_parts: int) -> "list[Examples]":
        """The same rows in ``num_parts`` equal parts."""
        columns = [
            [None] * num_parts if each is None else each.chunk(num_parts)
            for each in self._tensors()
        ]
        return [Examples(*part) for part in zip(*columns, strict=True)]

    def to(self, device: torch.device) -> "Examples":
        """The same examples on a device; nothing waits for it."""
        there = (None if each is None else moved(each, device) for each in self._tensors())
        return Examples(*there)  # type: ignore[arg-type]

    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, each.name) for each in fields(self)]


def collate(batch: Mapping[str, Tensor], config: TrainConfig, vocab_size: int) -> Examples:
    """The examples of a batch.

    Args:
        batch: in the host's memory.
        config: of the run.
        vocab_size: of its model, whose configuration takes time to tell it.

    Raises:
        DataRejected: the batch has no such field, a sample has another length, or a token is
            outside the vocabulary.
    """
    data, length = config.data, config.data.sequence_length + 1
    if data.field not in batch:
        there = ", ".join(sorted(batch))
        raise DataRejected(f"`data.field` is {data.field!r}, but {data.dataset!r} delivers {there}")
    if f"{data.field}.offsets" in batch:
        raise DataRejected(
            f"{data.field!r} of {data.dataset!r} differs in length from sample to sample. Tokenise "
            "text by the transform `tokenize`, and pack token ids by "
            f'pack = {{field = "tokens", length = {length}}}, in the dataset\'s definition.'
        )
    tokens, is_target, positions = batch[data.field], batch.get("loss_mask"), batch.get("position")
    if tokens.shape[1:] != (length,):
        shape = " by ".join(map(str, tokens.shape[1:])) or "a scalar"
        raise DataRejected(
            f"`data.sequence_length` {data.sequence_length} needs samples of {length} "
            f"tokens, but a sample of {data.dataset!r} is {shape}"
        )
    if tokens.is_floating_point():
        raise DataRejected(f"token ids must be whole numbers, but {data.field!r} is {tokens.dtype}")
    is_inside = isinstance(config.model, GPTConfig) and config.model.inside_documents
    if is_inside and positions is None:
        raise DataRejected(
            f"`model.inside_documents` needs packed rows, and those of {data.dataset!r} "
            "do not say where documents begin. Pack the dataset, or leave the option out."
        )
    # The loader has converted unsigned ids to int64 already, so this copies only signed ones.
    rows = tokens.long()
    smallest, largest = int(rows.min()), int(rows.max())
    if smallest < 0 or largest >= vocab_size:
        raise DataRejected(
            f"token {smallest if smallest < 0 else largest} of {data.dataset!r} is outside the "
            f"vocabulary; `model.vocab_size` is {vocab_size}"
        )
    counts: Tensor | None = None
    if is_target is not None:
        counts = is_target[:, 1:].bool()
        if not torch.equal(counts.to(is_target.dtype), is_target[:, 1:]):
            raise DataRejected(
                f"`loss_mask` of {data.dataset!r} has other values than 0 and 1, and targets "
                "have no weights. Store true for those that count"
            )
    if "mask" in batch:  # the other rows only fill up the last batch of an epoch
        is_sample = batch["mask"][:, None].expand_as(rows[:, 1:])
        counts = is_sample if counts is None else is_sample & counts
    return Examples(
        rows[:, :-1],
        rows[:, 1:],
        counts,
        None if positions is None else positions[:, :-1].long(),
    )


def stand_in(config: TrainConfig, num_rows: int, seed: int) -> Examples:
    """Random tokens with the shapes that those of a run have on this rank; all targets count."""
    shape = num_rows, config.data.sequence_length
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(config.model.vocab_size, shape, generator=generator)
    return Examples(inputs, inputs, None)
