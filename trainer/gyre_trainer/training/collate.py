# names carry shape letters
"""From a loader's batch to the examples of a language model.

A batch becomes inputs and targets:

    tokens   a window of sequence_length + 1 tokens: inputs are all but the last, targets all but
             the first
    packed   the same, of several documents: the targets are those of `loss_mask`, so none is the
             first token of a document or padding
    text     a document of any length, as bytes; the vocabulary is 256 bytes and END_OF_TEXT; one
             row per document, as above

A document longer than sequence_length + 1 is cut to a window of that length. The window's place is
a function of the step and the sample id, so it differs between epochs and is the same in every
rerun. A shorter document ends with END_OF_TEXT, followed by padding without a loss. An epoch shows
only a part of each long document, so cut a corpus of long documents into smaller samples.

Dims: B samples of this rank, T = sequence_length, or the tokens of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyre_trainer.errors import DataRejected
from gyre_trainer.training.config import DataConfig, TrainConfig
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.losses import moved

END_OF_TEXT = 256


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

    def counting_rows(self, is_sample: Tensor) -> "Examples":
        """The same without a loss for samples [B] that only fill up the last batch of an epoch."""
        rows = is_sample.to(self.targets.device)[:, None].expand_as(self.targets)
        return replace(self, counts=rows if self.counts is None else rows & self.counts)

    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, each.name) for each in fields(self)]


class Collator:
    """Turns the batches of one run into examples."""

    def __init__(
        self, data: DataConfig, vocab_size: int, *, inside_documents: bool = False
    ) -> None:
        """Collate nothing yet.

        Args:
            data: of the run.
            vocab_size: of the model.
            inside_documents: whether the model must know where documents of a window begin.
        """
        self._data = data
        self._vocab_size = vocab_size
        self._inside_documents = inside_documents

    def collate(self, batch: Mapping[str, Tensor], step: int) -> Examples:
        """The examples of a batch.

        Raises:
            DataRejected: the batch has no such field, a sample has another length, or a token is
                outside the vocabulary.
        """
        values = batch.get(self._data.field)
        if values is None:
            there = ", ".join(sorted(batch))
            raise DataRejected(
                f"`data.field` is {self._data.field!r}, but {self._data.dataset!r} delivers {there}"
            )
        offsets = batch.get(f"{self._data.field}.offsets")
        examples = (
            self._windows(values, batch.get("loss_mask"), batch.get("position"))
            if offsets is None
            else self._documents(values, offsets, batch["sample_id"], step)
        )
        if "mask" in batch:
            examples = examples.counting_rows(batch["mask"])
        require_known_tokens(examples, self._data, self._vocab_size)
        return examples

    def _windows(
        self, tokens: Tensor, is_target: Tensor | None, positions: Tensor | None
    ) -> Examples:
        length = self._data.sequence_length + 1
        if tokens.shape[1:] != (length,):
            shape = " by ".join(map(str, tokens.shape[1:])) or "a scalar"
            raise DataRejected(
                f"`data.sequence_length` {self._data.sequence_length} needs samples of {length} "
                f"tokens, but a sample of {self._data.dataset!r} is {shape}"
            )
        if tokens.is_floating_point():
            raise DataRejected(
                f"token ids must be whole numbers, but {self._data.field!r} is {tokens.dtype}"
            )
        # The loader has converted unsigned ids to int64 already, so this copies only signed ones.
        rows = tokens.long()
        if positions is None and self._inside_documents:
            raise DataRejected(
                f"`model.inside_documents` needs packed rows, and those of {self._data.dataset!r} "
                "do not say where documents begin. Pack the dataset, or leave the option out."
            )
        return Examples(
            rows[:, :-1],
            rows[:, 1:],
            None if is_target is None else self._counts(is_target[:, 1:]),
            None if positions is None else positions[:, :-1].long(),
        )

    def _counts(self, is_target: Tensor) -> Tensor:
        counts = is_target.bool()
        if not torch.equal(counts.to(is_target.dtype), is_target):
            raise DataRejected(
                f"`loss_mask` of {self._data.dataset!r} has other values than 0 and 1, and targets "
                "have no weights. Store true for those that count"
            )
        return counts

    def _documents(
        self, values: Tensor, offsets: Tensor, sample_ids: Tensor, step: int
    ) -> Examples:
        if values.dtype != torch.uint8 and not values.is_floating_point():
            raise DataRejected(
                f"{self._data.field!r} of {self._data.dataset!r} has documents of {values.dtype}, "
                "which differ in length: token ids of documents must be packed into sequences, by "
                f'pack = {{field = "{self._data.field}", '
                f"length = {self._data.sequence_length + 1}}} in the dataset's definition"
            )
        if values.dtype != torch.uint8:
            raise DataRejected(
                f"text must come as bytes, but {self._data.field!r} is {values.dtype}"
            )
        length = self._data.sequence_length + 1
        bounds, text = offsets.tolist(), values.cpu().numpy()
        rows = np.full((len(sample_ids), length), END_OF_TEXT, dtype=np.int64)
        lengths = np.zeros(len(sample_ids), dtype=np.int64)
        for row, sample_id in enumerate(sample_ids.tolist()):
            document = text[bounds[row] : bounds[row + 1]].astype(np.int64)
            ended = np.append(document, END_OF_TEXT)
            tokens = window(ended, length, [self._data.seed, step, sample_id])
            rows[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        counts = np.arange(1, length) < lengths[:, None]
        tokens_and_padding = torch.from_numpy(rows)
        return Examples(
            tokens_and_padding[:, :-1], tokens_and_padding[:, 1:], torch.from_numpy(counts)
        )


def require_known_tokens(examples: Examples, data: DataConfig, vocab_size: int) -> None:
    """Check that all tokens are in the vocabulary.

    Raises:
        DataRejected: one is outside.
    """
    extremes = torch.stack(
        [examples.inputs.amin(), examples.inputs.amax(), examples.targets.amax()]
    )
    smallest, *greatest = extremes.tolist()
    largest = max(greatest)
    if largest >= vocab_size or smallest < 0:
        raise DataRejected(
            f"token {largest} of {data.dataset!r} is outside the vocabulary; "
            f"`model.vocab_size` is {vocab_size}"
        )


def window(tokens: npt.NDArray[np.int64], length: int, key: list[int]) -> npt.NDArray[np.int64]:
    """At most ``length`` tokens that follow each other, from a place that ``key`` seeds."""
    if len(tokens) <= length:
        return tokens
    start = int(np.random.default_rng(key).integers(len(tokens) - length + 1))
    return tokens[start : start + length]


def collator_of(config: TrainConfig) -> Collator:
    """The maker of a run's examples."""
    inside = isinstance(config.model, GPTConfig) and config.model.inside_documents
    return Collator(config.data, config.model.vocab_size, inside_documents=inside)


def stand_in(config: TrainConfig, num_rows: int, seed: int) -> Examples:
    """Random tokens with the shapes that those of a run have on this rank; all targets count."""
    shape = num_rows, config.data.sequence_length
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(config.model.vocab_size, shape, generator=generator)
    return Examples(inputs, inputs, None)
