"""The tokens with a meaning of their own: of a configuration, its model and its tokenizer."""

from pathlib import Path
from typing import Any

from gyre_trainer.errors import ConfigError
from gyre_trainer.training.models.library import LibraryConfig, library_config
from gyre_trainer.training.objectives.settings import ObjectiveConfig, Tokens
from gyre_trainer.training.objectives.tokenizer_files import (
    TOKENIZER_FILE,
    SpecialIds,
    special_ids,
)


def tokens_of(model: LibraryConfig, objective: ObjectiveConfig) -> Tokens:
    """The special tokens of a run.

    Raises:
        ConfigError: there is no such model or tokenizer, or an id is outside the vocabulary.
    """
    described, of_file = library_config(model), SpecialIds()
    own = Path(model.pretrained) / TOKENIZER_FILE
    if objective.tokenizer:
        of_file = special_ids(Path(objective.tokenizer))
    elif model.pretrained and own.exists():
        of_file = special_ids(own)
    is_seq2seq = bool(described.is_encoder_decoder)
    pad = _id(described.pad_token_id)
    start = _id(getattr(described, "decoder_start_token_id", None))
    pad = 0 if pad is None else pad
    mask = of_file.mask if objective.mask_id is None else objective.mask_id
    sentinel = of_file.sentinel if objective.sentinel_id is None else objective.sentinel_id
    tokens = Tokens(
        vocab_size=model.vocab_size,
        pad=pad,
        end=_id(described.eos_token_id) if is_seq2seq else None,
        start=pad if start is None else start,
        mask=mask,
        sentinel=sentinel,
        special=of_file.all | frozenset(objective.special_ids),
    )
    for name, each in (("mask", mask), ("sentinel", sentinel)):
        if each is not None and each >= model.vocab_size:
            raise ConfigError(
                f"the {name} token is {each}, but `model` has {model.vocab_size} ids, from 0"
            )
    return tokens


def _id(value: Any) -> int | None:
    """The id, or the first of several."""
    found = value[0] if isinstance(value, list) and value else value
    return found if isinstance(found, int) else None
