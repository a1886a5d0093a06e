"""Sources and targets of encoder-decoders, and which families have them."""

import functools
import operator
from typing import Any

import numpy as np
import pytest
import torch
from gyre_trainer.errors import ConfigError, DataRejected
from gyre_trainer.training.collate import Examples, collator_of, stand_in
from gyre_trainer.training.config import TrainConfig, build
from gyre_trainer.training.library import LibraryConfig, objective_of
from torch import Tensor

LENGTH = 24
BERT = {"model_type": "bert", "vocab_size": 300}
T5 = {"model_type": "t5", "vocab_size": 300}
BART = {"model_type": "bart", "vocab_size": 300}


def config(model: dict[str, Any], **objective: Any) -> TrainConfig:
    sections = {
        "run": {"out": "nowhere", "steps": 1},
        "data": {"dataset": "words", "batch_size": 2, "sequence_length": LENGTH},
        "model": {"config": model},
        "objective": objective,
    }
    return build(TrainConfig, sections)


def ragged(*documents: list[int]) -> dict[str, Tensor]:
    return {
        "tokens": torch.tensor(functools.reduce(operator.iadd, documents, []), dtype=torch.int32),
        "tokens.offsets": torch.tensor(np.cumsum([0, *map(len, documents)])),
        "sample_id": torch.arange(len(documents)),
    }


@pytest.mark.parametrize(
    ("keys", "objective"),
    [
        ({"model_type": "llama"}, "causal"),
        (BERT | {"is_decoder": True}, "causal"),
        (T5, "seq2seq"),
        (BART, "seq2seq"),
        (BART | {"architectures": ["BartForCausalLM"]}, "causal"),
    ],
)
def test_the_family_says_what_is_predicted(keys: dict[str, Any], objective: str) -> None:
    assert objective_of(LibraryConfig(config=keys)) == objective


def test_sources_and_targets_end_and_are_cut() -> None:
    settings = config(T5, target_field="answer", target_length=4)
    batch = ragged([10, 11, 1], [12]) | {
        f"answer{suffix}": each
        for suffix, each in (
            ("", torch.tensor([20, 21, 22, 23, 24, 30])),
            (".offsets", torch.tensor([0, 5, 6])),
        )
    }
    examples = collator_of(settings).collate(batch | {"mask": torch.tensor([True, False])}, 0)
    assert examples.inputs[:, :4].tolist() == [[10, 11, 1, 0], [12, 1, 0, 0]]
    assert examples.targets.tolist() == [[20, 21, 22, 1], [30, 1, 0, 0]]
    assert examples.decoder_inputs is not None
    assert examples.counts is not None
    assert examples.decoder_inputs.tolist() == [[0, 20, 21, 22], [0, 30, 1, 0]]
    assert examples.counts.sum(1).tolist() == [4, 0]
    assert stand_in(settings, 2).targets.shape == (2, 4)


def test_padding_of_rows_is_neither_seen_nor_found() -> None:
    rows = torch.full((2, LENGTH), 7)
    rows[0, 5:] = 0
    rows[1] = 0
    batch = {"tokens": rows, "answer": rows, "sample_id": torch.arange(2)}
    examples = collator_of(config(T5, target_field="answer")).collate(batch, 0)
    assert examples.is_token is not None
    assert examples.counts is not None
    assert examples.is_token.sum(1).tolist() == [6, 1], "with the end; a row sees its first place"
    assert examples.counts.sum(1).tolist() == [6, 1]


def test_an_encoder_decoder_needs_a_field_of_targets() -> None:
    with pytest.raises(ConfigError, match=r"`objective\.target_field` is not set"):
        collator_of(config(T5))


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"words": torch.zeros(1)}, "have no field 'tokens'; they have sample_id, words"),
        ({"tokens": torch.zeros(1, LENGTH)}, "whole numbers or bytes, but 'tokens' is torch.float"),
        ({"tokens": torch.ones(1, LENGTH + 1, dtype=torch.int64)}, r"got the shape \(1, 25\)"),
        ({"tokens": torch.full((1, LENGTH), 300)}, "token 300 of 'words' is outside"),
    ],
)
def test_batches_of_other_tokens_are_refused(batch: dict[str, Tensor], told: str) -> None:
    collator = collator_of(config(T5, target_field="tokens"))
    with pytest.raises(DataRejected, match=told):
        collator.collate(batch | {"sample_id": torch.arange(1)}, 0)


def test_parts_of_examples_have_parts_of_every_tensor() -> None:
    rows = torch.arange(4 * LENGTH).view(4, LENGTH) + 2
    batch = {"tokens": rows, "sample_id": torch.arange(4)}
    examples = collator_of(config(T5, target_field="tokens")).collate(batch, 0)
    first, second = examples.split(2)
    assert isinstance(first, Examples)
    assert second.decoder_inputs is not None
    assert examples.decoder_inputs is not None
    assert torch.equal(second.decoder_inputs, examples.decoder_inputs[2:])
    assert examples.shortened(3).decoder_inputs.shape == (4, 3)  # type: ignore[union-attr]
