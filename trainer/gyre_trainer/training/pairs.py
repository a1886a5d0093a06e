# ruff: noqa: N806  # names carry shape letters
"""From a loader's batch to the sources and targets of an encoder-decoder.

Both fields have rows of one length, in which `pad` is padding, or documents of any length, as bytes
or as token ids.

Dims: R rows of this rank, T tokens of a row.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyre_trainer.errors import ConfigError, DataRejected
from gyre_trainer.training.collate import Collator, Examples, require_known_tokens
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.models.gpt import GPTConfig
from gyre_trainer.training.models.library import LibraryConfig, library_config, objective_of

_Ids = npt.NDArray[np.int64]


class Collates(Protocol):
    """Turns the batches of one run into examples."""

    def collate(self, batch: Mapping[str, Tensor], step: int) -> Examples:
        """The examples of a batch.

        Raises:
            DataRejected: the batch has no such field, or not what the model is trained on.
        """
        ...


def collator_of(config: TrainConfig) -> Collates:
    """What makes the examples of a run.

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
