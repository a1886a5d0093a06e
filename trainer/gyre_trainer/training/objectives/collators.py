# ruff: noqa: N806  # names carry shape letters
"""From a loader's batch to the examples of a model that sees both sides of a token.

Random numbers are seeded for each row by `data.seed`, the step, the sample and the row's number in
it. So a rerun, a resumed run and any number of ranks hide the same tokens, and every epoch others.

Dims: R rows of this rank, T tokens of a row.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyre_trainer.errors import ConfigError
from gyre_trainer.training.collate import Collator, Examples, require_known_tokens, window
from gyre_trainer.training.config import DataConfig, TrainConfig
from gyre_trainer.training.models.gpt import GPTConfig
from gyre_trainer.training.models.library import LibraryConfig, objective_of
from gyre_trainer.training.models.sampling import Sampler
from gyre_trainer.training.objectives.masking import masked
from gyre_trainer.training.objectives.settings import Objective, ObjectiveConfig, Tokens
from gyre_trainer.training.objectives.spans import Lengths, corrupted
from gyre_trainer.training.objectives.special_tokens import tokens_of
from gyre_trainer.training.objectives.token_rows import (
    TokenRows,
    filled,
    keys_of_rows,
    token_rows,
    values_of,
)

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
        ConfigError: there are no tokens to stand for what is hidden.
    """
    objective = objective_of(config.model)
    if objective == "causal":
        inside = isinstance(config.model, GPTConfig) and config.model.inside_documents
        return Collator(config.data, config.model.vocab_size, inside_documents=inside)
    return HidingCollator(config, objective)


def sampler_of(config: TrainConfig) -> Sampler:
    """What continues or fills the prompts of a run.

    Raises:
        ConfigError: as `Sampler`.
    """
    mask = None
    if objective_of(config.model) == "masked":
        assert isinstance(config.model, LibraryConfig)
        mask = tokens_of(config.model, config.objective).the_mask()
    return Sampler(config.sample, config.model, mask)


class HidingCollator:
    """Makes examples of masked language modelling, of denoising, and of sources and targets."""

    def __init__(self, config: TrainConfig, objective: Objective) -> None:
        assert isinstance(config.model, LibraryConfig)
        self._data, self._objective = config.data, objective
        self._tokens = tokens_of(config.model, config.objective)
        self._settings = self._tokens.settled(config.objective)
        _require_possible(config.data, self._settings, objective, self._tokens)

    def collate(self, batch: Mapping[str, Tensor], step: int) -> Examples:
        """The examples of a batch, on the CPU."""
        if self._objective == "seq2seq":
            examples = self._pairs(batch)
        else:
            rows = self._rows(batch, step)
            make = self._masked if self._objective == "masked" else self._denoised
            examples = make(rows, self._generators(batch, step, len(rows.ids)))
        if "mask" in batch:
            examples = examples.counting_rows(batch["mask"])
        require_known_tokens(examples, self._data, self._tokens.vocab_size)
        return examples

    def _generators(
        self, batch: Mapping[str, Tensor], step: int, num_rows: int
    ) -> list[np.random.Generator]:
        seed = self._data.seed
        return [np.random.default_rng([seed, step, *key]) for key in keys_of_rows(batch, num_rows)]

    def _rows(self, batch: Mapping[str, Tensor], step: int) -> TokenRows:
        """The rows; a document that is too long is cut to a window, as of causal models."""
        field, length = self._data.field, self._data.sequence_length
        offsets = batch.get(f"{field}.offsets")
        if offsets is None:
            return token_rows(batch, field, self._data, length, self._tokens.pad)
        ids = values_of(batch, field, self._data).numpy().astype(np.int64)
        bounds = offsets.tolist()
        documents = []
        for row, sample_id in enumerate(batch["sample_id"].tolist()):
            document = ids[bounds[row] : bounds[row + 1]]
            documents.append(window(document, length, [self._data.seed, step, sample_id]))
        return filled(documents, length, self._tokens.pad)

    def _masked(self, rows: TokenRows, generators: list[np.random.Generator]) -> Examples:
        hidden = [
            masked(row, may_be, self._settings.rate, self._tokens, rng)
            for row, may_be, rng in zip(rows.ids, rows.may_be_hidden, generators, strict=True)
        ]
        return Examples(
            torch.from_numpy(np.stack([inputs for inputs, _ in hidden])),
            torch.from_numpy(rows.ids),
            torch.from_numpy(np.stack([chosen for _, chosen in hidden])),
            None if rows.positions is None else torch.from_numpy(rows.positions),
            _seen(rows),
        )

    def _denoised(self, rows: TokenRows, generators: list[np.random.Generator]) -> Examples:
        pairs = [
            corrupted(self._without_end(rows.tokens(row)), self._settings, self._tokens, rng)
            for row, rng in enumerate(generators)
        ]
        lengths = Lengths.of(rows.ids.shape[1], self._settings)
        pad = self._tokens.pad
        inputs = filled([source for source, _ in pairs], lengths.inputs, pad)
        targets = filled([target for _, target in pairs], lengths.targets, pad)
        return self._encoded_and_decoded(inputs, targets)

    def _pairs(self, batch: Mapping[str, Tensor]) -> Examples:
        """Sources and targets, which lose their last tokens where they are too long."""
        data, pad = self._data, self._tokens.pad
        lengths = data.sequence_length, self._settings.target_length or data.sequence_length
        fields = data.field, self._settings.target_field
        source, target = (
            token_rows(batch, field, data, length, pad)
            for field, length in zip(fields, lengths, strict=True)
        )
        ended = (
            filled(
                [self._ended(each.tokens(row), length) for row in range(len(each.ids))], length, pad
            )
            for each, length in zip((source, target), lengths, strict=True)
        )
        return self._encoded_and_decoded(*ended)

    def _encoded_and_decoded(self, inputs: TokenRows, targets: TokenRows) -> Examples:
        decoder_RT = np.roll(targets.ids, 1, axis=1)
        decoder_RT[:, 0] = self._tokens.start
        return Examples(
            torch.from_numpy(inputs.ids),
            torch.from_numpy(targets.ids),
            torch.from_numpy(targets.is_token),
            None,
            _seen(inputs),
            torch.from_numpy(decoder_RT),
        )

    def _without_end(self, document: _Ids) -> _Ids:
        end = self._tokens.end
        return document[:-1] if len(document) and document[-1] == end else document

    def _ended(self, document: _Ids, length: int) -> _Ids:
        """At most ``length`` tokens, of which the last one ends a text, where the model has one."""
        end = self._tokens.end
        if end is None:
            return document[:length]
        return np.append(self._without_end(document)[: length - 1], end)


def stand_in(config: TrainConfig, num_rows: int, seed: int | None = None) -> Examples:
    """Examples with the shapes that those of a run have.

    All targets count; of `masked` as many first ones of each row as are chosen on average.

    Args:
        config: of the run.
        num_rows: of this rank.
        seed: of random tokens; None for zeros.
    """
    objective, length = objective_of(config.model), config.data.sequence_length
    num_inputs, num_targets = length, length
    if objective == "denoising":
        assert isinstance(config.model, LibraryConfig)
        tokens = tokens_of(config.model, config.objective)
        lengths = Lengths.of(length, tokens.settled(config.objective))
        num_inputs, num_targets = lengths.inputs, lengths.targets
    if objective == "seq2seq":
        num_targets = config.objective.target_length or length

    def row(num_tokens: int) -> Tensor:
        if seed is None:
            return torch.zeros(num_rows, num_tokens, dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(config.model.vocab_size, (num_rows, num_tokens), generator=generator)

    inputs, targets = row(num_inputs), row(num_targets)
    if objective == "causal":
        return Examples(inputs, inputs, None)
    share = config.objective.rate if objective == "masked" else 1
    counts = torch.arange(num_targets) < max(1, round(share * num_targets))
    counts = counts.expand(num_rows, -1).contiguous()
    is_token = torch.ones(num_rows, num_inputs, dtype=torch.bool)
    return Examples(
        inputs, targets, counts, None, is_token, None if objective == "masked" else targets
    )


def _seen(rows: TokenRows) -> Tensor:
    """Which inputs attention sees: all tokens, and the first place of a row without any."""
    seen_RT = rows.is_token.copy()
    seen_RT[:, 0] = True
    return torch.from_numpy(seen_RT)


def _require_possible(
    data: DataConfig, settings: ObjectiveConfig, objective: Objective, tokens: Tokens
) -> None:
    """Ask for the tokens that the objective needs, before the first batch."""
    if objective == "masked" or (objective == "denoising" and settings.corruption == "mask"):
        tokens.the_mask()
    elif objective == "denoising":
        tokens.sentinels(Lengths.of(data.sequence_length, settings).spans)
    elif not settings.target_field:
        raise ConfigError(
            '`model.objective` is "seq2seq", but `objective.target_field`, the field of a '
            "sample's target, is not set"
        )
