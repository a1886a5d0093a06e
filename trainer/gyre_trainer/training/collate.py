# ruff: noqa: N806  # names carry shape letters
"""From a loader's batch to the examples of a language model.

A causal model has inputs and targets:

    tokens   a window of sequence_length + 1 tokens: inputs are all but the last, targets all but
             the first
    packed   the same, of several documents: the targets are those of `loss_mask`, so none is the
             first token of a document or padding. Where sequences have several lengths, a window is
             that of the longest: a batch has as many rows of a shorter length as have its tokens
    text     a document of any length, as bytes; the vocabulary is 256 bytes and END_OF_TEXT; one
             row per document, as above

A document longer than sequence_length + 1 is cut to a window of that length. The window's place is
a function of the step and the sample id, so it differs between epochs and is the same in every
rerun. A shorter document ends with END_OF_TEXT, followed by padding without a loss. An epoch shows
only a part of each long document, so cut a corpus of long documents into smaller samples.

An encoder-decoder has sources and targets: rows of one length, in which `pad` is padding, or
documents of any length, as bytes or as token ids.

Dims: B samples of this rank, R rows, T = sequence_length, or the tokens of a row. Of shorter
sequences there are more rows, whose T is less. The inputs of an encoder have S tokens; elsewhere S
is T.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyre_trainer.errors import ConfigError, DataRejected
from gyre_trainer.training.config import DataConfig, TrainConfig
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.library import LibraryConfig, library_config, objective_of

END_OF_TEXT = 256


@dataclass(frozen=True, slots=True)
class Examples:
    """Inputs and targets of one rank for one step.

    Attributes:
        inputs: int64 [B, S].
        targets: int64 [B, T].
        counts: bool [B, T], the targets that have a loss; None for all. Either all ranks have it or
            none.
        positions: int64 [B, S], the place of each input in its document, where several documents
            are packed into a row; None where a row is one document. Either all ranks have it or
            none.
        is_token: bool [B, S], false for padding of the inputs; None where they see only what is
            before them, so that no padding matters.
        decoder_inputs: int64 [B, T], the inputs of the decoder; None for models without one.
    """

    inputs: Tensor
    targets: Tensor
    counts: Tensor | None
    positions: Tensor | None = None
    is_token: Tensor | None = None
    decoder_inputs: Tensor | None = None

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
        """The same examples on a device; copies to CUDA are queued, and nothing waits for them."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or tensor.device.type == device.type:
                return tensor
            if device.type == "cuda":
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        return Examples(*map(moved, self._tensors()))  # type: ignore[arg-type]

    def shortened(self, num_tokens: int) -> "Examples":
        """The first ``num_tokens`` of the inputs and of the targets of each row."""
        cut = (None if each is None else each[:, :num_tokens] for each in self._tensors())
        return Examples(*cut)  # type: ignore[arg-type]

    def counting_rows(self, is_sample: Tensor) -> "Examples":
        """The same without a loss for samples [B] that only fill up the last batch of an epoch."""
        is_row = is_sample.repeat_interleave(len(self.targets) // len(is_sample))
        rows = is_row.to(self.targets.device)[:, None].expand_as(self.targets)
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
        """The examples of a batch: windows on the batch's device, documents on the CPU.

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
            self._windows(
                values, len(batch["sample_id"]), batch.get("loss_mask"), batch.get("position")
            )
            if offsets is None
            else self._documents(values, offsets, batch["sample_id"], step)
        )
        if "mask" in batch:
            examples = examples.counting_rows(batch["mask"])
        require_known_tokens(examples, self._data, self._vocab_size)
        return examples

    def _windows(
        self, tokens: Tensor, num_samples: int, is_target: Tensor | None, positions: Tensor | None
    ) -> Examples:
        length = self._data.sequence_length + 1
        # the rows of shorter sequences have as many tokens as windows of the longest
        if tokens.ndim != 2 or tokens.numel() != num_samples * length or length % tokens.shape[1]:
            shape = " by ".join(map(str, _sample_shape(tokens, num_samples))) or "a scalar"
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
            None if is_target is None else is_target[:, 1:],
            None if positions is None else positions[:, :-1].long(),
        )

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
    smallest, *greatest = extremes.tolist()  # this waits for a device only once
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


def _sample_shape(values: Tensor, num_samples: int) -> tuple[int, ...]:
    """The shape of a sample, where one may be several rows of a batch."""
    num_rows, *rest = values.shape
    per_sample = num_rows // num_samples
    return (per_sample * rest[0], *rest[1:]) if per_sample > 1 and rest else tuple(rest)


_Ids = npt.NDArray[np.int64]


class Collates(Protocol):
    """Turns the batches of one run into examples."""

    def collate(self, batch: Mapping[str, Tensor], step: int) -> Examples:
        """The examples of a batch.

        Raises:
            DataRejected: the batch has no such field, or not one for this model.
        """
        ...


def collator_of(config: TrainConfig) -> Collates:
    """The maker of a run's examples.

    Raises:
        ConfigError: an encoder-decoder is trained without a field of targets.
    """
    if isinstance(config.model, GPTConfig) or objective_of(config.model) == "causal":
        inside = isinstance(config.model, GPTConfig) and config.model.inside_documents
        return Collator(config.data, config.model.vocab_size, inside_documents=inside)
    return PairCollator(config, config.model)


class PairCollator:
    """Makes examples of sources and targets, which lose their last tokens if they are too long."""

    def __init__(self, config: TrainConfig, model: LibraryConfig) -> None:
        """Collate nothing yet.

        Raises:
            ConfigError: there is no field of targets.
        """
        objective, described = config.objective, library_config(model)
        if not objective.target_field:
            raise ConfigError(
                f"an encoder-decoder ({described.model_type}) is trained on sources and targets, "
                "but `objective.target_field` is not set. Set it to the field of a sample's target"
            )
        self._data, self._vocab_size = config.data, model.vocab_size
        self._fields = config.data.field, objective.target_field
        self._lengths = lengths_of(config)
        self._pad = _id(described.pad_token_id) or 0
        self._end = _id(described.eos_token_id)
        start = _id(getattr(described, "decoder_start_token_id", None))
        self._start = self._pad if start is None else start

    def collate(self, batch: Mapping[str, Tensor], step: int) -> Examples:
        """The examples of a batch, on the CPU."""
        source_RT, target_RT = (
            self._filled(
                [self._ended(row, length) for row in self._rows(batch, field, length)], length
            )
            for field, length in zip(self._fields, self._lengths, strict=True)
        )
        decoder_RT = np.roll(target_RT[0], 1, axis=1)
        decoder_RT[:, 0] = self._start
        seen_RT = source_RT[1]
        seen_RT[:, 0] = True  # attention of a row without any token sees its first place
        examples = Examples(
            torch.from_numpy(source_RT[0]),
            torch.from_numpy(target_RT[0]),
            torch.from_numpy(target_RT[1]),
            None,
            torch.from_numpy(seen_RT),
            torch.from_numpy(decoder_RT),
        )
        if "mask" in batch:
            examples = examples.counting_rows(batch["mask"])
        require_known_tokens(examples, self._data, self._vocab_size)
        return examples

    def _rows(self, batch: Mapping[str, Tensor], field: str, length: int) -> list[_Ids]:
        """The rows of a field, without padding.

        Raises:
            DataRejected: there is no such field, or it has no tokens, or rows of another length.
        """
        values, name = batch.get(field), self._data.dataset
        if values is None:
            raise DataRejected(
                f"the batches of {name!r} have no field {field!r}; they have "
                f"{', '.join(sorted(batch))}"
            )
        if values.is_floating_point() or values.dtype == torch.bool:
            raise DataRejected(
                f"tokens are whole numbers or bytes, but {field!r} is {values.dtype}"
            )
        ids, offsets = values.cpu().numpy().astype(np.int64), batch.get(f"{field}.offsets")
        if offsets is not None:
            return [ids[start:stop] for start, stop in pairwise(offsets.tolist())]
        if ids.shape != (len(batch["sample_id"]), length):
            raise DataRejected(
                f"{field!r} of {name!r} has rows of {length} tokens (got the shape "
                f"{tuple(ids.shape)}). Set `data.sequence_length`, or `objective.target_length`, "
                "to the tokens of a row, or deliver documents of any length"
            )
        return [row[row != self._pad] for row in ids]

    def _ended(self, document: _Ids, length: int) -> _Ids:
        """At most ``length`` tokens, of which the last one ends a text, if the model has one."""
        if self._end is None:
            return document[:length]
        is_ended = len(document) > 0 and document[-1] == self._end
        return np.append((document[:-1] if is_ended else document)[: length - 1], self._end)

    def _filled(self, rows: list[_Ids], length: int) -> tuple[_Ids, npt.NDArray[np.bool_]]:
        """Rows that end and have padding after that, and which places are no padding."""
        ended = [self._ended(row, length) for row in rows]
        filled_RT = np.full((len(ended), length), self._pad, dtype=np.int64)
        for row, tokens in enumerate(ended):
            filled_RT[row, : len(tokens)] = tokens
        lengths_R = np.array([len(tokens) for tokens in ended], np.int64)
        return filled_RT, np.arange(length) < lengths_R[:, None]


def lengths_of(config: TrainConfig) -> tuple[int, int]:
    """The tokens of a row of inputs, and of targets."""
    length = config.data.sequence_length
    if isinstance(config.model, GPTConfig) or objective_of(config.model) == "causal":
        return length, length
    return length, config.objective.target_length or length


def stand_in(config: TrainConfig, num_rows: int, seed: int | None = None) -> Examples:
    """Examples with the shapes that those of a run have; all targets count.

    Args:
        config: of the run.
        num_rows: of this rank.
        seed: of random tokens; None for zeros.
    """

    def row(num_tokens: int) -> Tensor:
        if seed is None:
            return torch.zeros(num_rows, num_tokens, dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(config.model.vocab_size, (num_rows, num_tokens), generator=generator)

    num_inputs, num_targets = lengths_of(config)
    inputs, targets = row(num_inputs), row(num_targets)
    if isinstance(config.model, GPTConfig) or objective_of(config.model) == "causal":
        return Examples(inputs, inputs, None)
    counts, is_token = (torch.ones_like(each, dtype=torch.bool) for each in (targets, inputs))
    return Examples(inputs, targets, counts, None, is_token, targets)


def _id(value: Any) -> int | None:
    """The id, or the first of several."""
    found = value[0] if isinstance(value, list) and value else value
    return found if isinstance(found, int) else None
