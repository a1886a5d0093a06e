"""Which tokens are hidden from models that see both sides, and what they are to find."""

import functools
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_trainer.errors import ConfigError, DataRejected
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.config import TrainConfig, build
from gyre_trainer.training.models.library import LibraryConfig, objective_of
from gyre_trainer.training.objectives.collators import collator_of, stand_in
from gyre_trainer.training.objectives.masking import masked
from gyre_trainer.training.objectives.settings import ObjectiveConfig, Tokens
from gyre_trainer.training.objectives.spans import Lengths, corrupted
from torch import Tensor

LENGTH = 24
BERT = {"model_type": "bert", "vocab_size": 300}
T5 = {"model_type": "t5", "vocab_size": 300}
BART = {"model_type": "bart", "vocab_size": 300}
TOKENS = Tokens(vocab_size=100, pad=0, end=1, start=0, mask=4, sentinel=99, special=frozenset({2}))


def config(model: dict[str, Any], *, seed: int = 0, **objective: Any) -> TrainConfig:
    sections = {
        "run": {"out": "nowhere", "steps": 1},
        "data": {"dataset": "words", "batch_size": 2, "sequence_length": LENGTH, "seed": seed},
        "model": model if "config" in model else {"config": model},
        "objective": objective,
    }
    return build(TrainConfig, sections)


def windows(*sample_ids: int) -> dict[str, Tensor]:
    """Rows that follow from the sample."""
    rows = [torch.arange(LENGTH) + 10 + 3 * each for each in sample_ids]
    return {"tokens": torch.stack(rows), "sample_id": torch.tensor(sample_ids)}


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
        (BERT, "masked"),
        (BERT | {"is_decoder": True}, "causal"),
        ({"model_type": "modernbert"}, "masked"),
        ({"model_type": "distilbert"}, "masked"),
        (T5, "denoising"),
        (BART, "denoising"),
        (BART | {"architectures": ["BartForCausalLM"]}, "causal"),
    ],
)
def test_the_family_says_what_is_predicted(keys: dict[str, Any], objective: str) -> None:
    assert objective_of(LibraryConfig(config=keys)) == objective


def test_of_the_chosen_tokens_eight_in_ten_are_masked_and_one_is_random() -> None:
    row = np.arange(100_000) % 90 + 5
    row[::7] = 2
    inputs, chosen = masked(row, row != 8, 0.15, TOKENS, np.random.default_rng(5))
    assert not chosen[(row == 2) | (row == 8)].any(), "special, or not to be hidden"
    assert np.array_equal(inputs[~chosen], row[~chosen])
    allowed = ((row != 2) & (row != 8)).sum()
    assert chosen.sum() / allowed == pytest.approx(0.15, abs=0.005)
    is_mask, stays = inputs[chosen] == TOKENS.mask, inputs[chosen] == row[chosen]
    assert is_mask.mean() == pytest.approx(0.8 + 0.1 / 100, abs=0.015)
    assert stays.mean() == pytest.approx(0.1 + 0.1 / 100, abs=0.015)
    random = inputs[chosen & (inputs != TOKENS.mask) & (inputs != row)]
    assert (random.min(), random.max()) == (0, 99), "of the whole vocabulary"


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 7, 24, 100, 512])
def test_spans_and_what_stays_are_the_row(num_tokens: int) -> None:
    settings = ObjectiveConfig()
    row = np.arange(num_tokens) % 60 + 5
    lengths = Lengths.of(num_tokens, settings)
    for seed in range(20):
        inputs, targets = corrupted(row, settings, TOKENS, np.random.default_rng(seed))
        assert (len(inputs), len(targets)) == (lengths.inputs, lengths.targets)
        assert inputs[-1] == targets[-1] == TOKENS.end
        sentinels = [each for each in inputs if each > 70]
        assert sentinels == [99 - index for index in range(lengths.spans)]
        found: dict[int, list[int]] = {}
        for each in targets[:-1].tolist():
            found.setdefault(each, []) if each > 70 else found[list(found)[-1]].append(each)
        assert list(found) == sentinels
        again = [token for each in inputs[:-1].tolist() for token in found.get(each, [each])]
        assert again == row.tolist()
        assert all(found.values())
    if num_tokens == 512:  # of T5's own mask: 77 tokens, in 26 spans
        assert (lengths.noise, lengths.spans) == (77, 26)


def test_infilled_rows_have_a_mask_for_a_span_and_all_their_tokens_as_targets() -> None:
    settings = ObjectiveConfig(corruption="mask", rate=0.3)
    row = np.arange(40) + 10
    inputs, targets = corrupted(row, settings, TOKENS, np.random.default_rng(0))
    assert targets.tolist() == [*row.tolist(), TOKENS.end]
    assert (inputs == TOKENS.mask).sum() == 4
    assert len(inputs) == 40 - 12 + 4 + 1


def test_rows_are_infilled_where_there_is_a_mask_and_no_sentinel() -> None:
    given: dict[str, dict[str, Any]] = {
        "mask": {"mask_id": 4},
        "both": {"mask_id": 4, "sentinel_id": 299},
        "both, infilled": {"mask_id": 4, "sentinel_id": 299, "corruption": "mask"},
    }
    targets = {
        name: collator_of(config(BART, **objective)).collate(windows(1), 0).targets[0].tolist()
        for name, objective in given.items()
    }
    row = windows(1)["tokens"][0].tolist()
    assert targets["mask"] == targets["both, infilled"] == [*row, 2]
    assert 299 in targets["both"]
    with pytest.raises(ConfigError, match="there are no sentinels"):
        collator_of(config(BART, mask_id=4, corruption="sentinel"))


def test_the_places_of_spans_are_drawn() -> None:
    row = np.arange(20) + 10  # one span
    generators = [np.random.default_rng(seed) for seed in range(300)]
    rows = [corrupted(row, ObjectiveConfig(), TOKENS, rng)[0] for rng in generators]
    assert {int(np.flatnonzero(each == TOKENS.sentinel)[0]) for each in rows} == set(range(1, 18))


@pytest.mark.parametrize(
    "settings",
    [
        config(BERT, mask_id=4, seed=3),
        config(T5, sentinel_id=299, seed=3),
        config(BART, mask_id=4, seed=3),
    ],
    ids=["masked", "sentinels", "infilled"],
)
def test_a_row_is_hidden_alike_on_any_rank_and_otherwise_in_the_next_step(
    settings: TrainConfig,
) -> None:
    collator = collator_of(settings)
    whole = collator.collate(windows(5, 6, 7, 8, 9, 10), 3)
    for size in (1, 2, 3):
        parts = [
            collator_of(settings).collate(windows(*ids), 3)
            for ids in np.split(np.arange(5, 11), size)
        ]
        for name in ("inputs", "targets", "counts", "is_token", "decoder_inputs"):
            tensors = [getattr(part, name) for part in parts]
            expected = getattr(whole, name)
            assert expected is None or torch.equal(torch.cat(tensors), expected), name
    assert not torch.equal(collator.collate(windows(5, 6, 7, 8, 9, 10), 4).inputs, whole.inputs)
    shapes = stand_in(settings, 6)
    assert (shapes.inputs.shape, shapes.targets.shape) == (whole.inputs.shape, whole.targets.shape)
    assert whole.counts is not None
    assert shapes.num_targets() == pytest.approx(whole.num_targets(), rel=0.3)


def test_padding_is_neither_seen_nor_hidden_nor_found() -> None:
    documents = [list(range(10, 15)), [], list(range(10, 80))]
    examples = collator_of(config(BERT, mask_id=4, rate=0.9)).collate(ragged(*documents), 0)
    assert examples.inputs.shape == (3, LENGTH)
    assert examples.is_token is not None
    assert examples.counts is not None
    assert examples.is_token.sum(1).tolist() == [5, 1, LENGTH]
    assert not examples.counts[~examples.is_token].any()
    assert not examples.counts[1].any()
    examples = collator_of(config(T5, sentinel_id=299)).collate(ragged(*documents), 0)
    lengths = [Lengths.of(num, ObjectiveConfig()) for num in (5, 0, LENGTH)]
    assert examples.is_token is not None
    assert examples.counts is not None
    assert examples.is_token.sum(1).tolist() == [each.inputs for each in lengths]
    assert examples.counts.sum(1).tolist() == [each.targets for each in lengths]
    assert examples.decoder_inputs is not None
    assert torch.equal(examples.decoder_inputs[:, 1:], examples.targets[:, :-1])
    assert not examples.decoder_inputs[:, 0].any()


def test_packed_rows_hide_what_counts_and_see_no_padding() -> None:
    positions = torch.tensor([[*range(10), *range(8), *range(6)]], dtype=torch.int32)
    counts = positions > 0
    counts[:, 18:] = False
    batch = windows(5) | {"position": positions, "loss_mask": counts}
    examples = collator_of(config(BERT, mask_id=4, rate=0.9)).collate(batch, 0)
    assert examples.counts is not None
    assert examples.is_token is not None
    assert not examples.counts[~counts].any()
    assert examples.counts.any()
    assert examples.is_token.tolist() == [[True] * 18 + [False] * 6]
    assert torch.equal(examples.positions, positions.long())  # type: ignore[arg-type]


def test_sources_and_targets_end_and_are_cut() -> None:
    settings = config(
        {"config": T5, "objective": "seq2seq"}, target_field="answer", target_length=4
    )
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


def test_ids_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    names = {"[PAD]": 0, "[CLS]": 7, "[MASK]": 9, "<extra_id_0>": 299, "plain": 12}
    added = [
        {"id": each, "content": name, "special": name != "plain"} for name, each in names.items()
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    path = str(tmp_path / "tokenizer.json")
    batch = windows(1)
    batch["tokens"][:, :12] = 7
    examples = collator_of(config(BERT, tokenizer=path, rate=0.99)).collate(batch, 0)
    assert examples.inputs[0, :12].tolist() == [7] * 12
    assert (examples.inputs[0, 12:] == 9).sum() > 5
    examples = collator_of(config(T5, tokenizer=path)).collate(batch, 0)
    assert (examples.inputs == 299).sum() == 1


@pytest.mark.parametrize(
    ("model", "objective", "told"),
    [
        (BERT, {}, "there is no mask token: set `objective.mask_id`"),
        (T5, {}, "there are no sentinels: set `objective.sentinel_id`"),
        (BART, {}, "such as BART that fills in a mask token, `objective.mask_id`"),
        (BART, {"corruption": "mask"}, "there is no mask token: set `objective.mask_id`"),
        (T5, {"sentinel_id": 0, "mean_span": 1}, "has 4 spans, but there are 1 ids"),
        (BERT, {"mask_id": 300}, "the mask token is 300, but `model` has 300 ids"),
        (BERT, {"tokenizer": "/nowhere.json"}, "/nowhere.json cannot be read"),
        ({"config": T5, "objective": "seq2seq"}, {}, "`objective.target_field`"),
    ],
)
def test_what_cannot_be_hidden_is_refused(
    model: dict[str, Any], objective: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        collator_of(config(model, **objective))


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"words": torch.zeros(1)}, "have no field 'tokens'; they have sample_id, words"),
        ({"tokens": torch.zeros(1, LENGTH)}, "whole numbers or bytes, but 'tokens' is torch.float"),
        ({"tokens": torch.ones(1, LENGTH + 1, dtype=torch.int64)}, "no token more"),
        ({"tokens": torch.full((1, LENGTH), 300)}, "token 300 of 'words' is outside"),
    ],
)
def test_batches_of_other_tokens_are_refused(batch: dict[str, Tensor], told: str) -> None:
    with pytest.raises(DataRejected, match=told):
        collator_of(config(BERT, mask_id=4)).collate(batch | {"sample_id": torch.arange(1)}, 0)


def test_parts_of_examples_have_parts_of_every_tensor() -> None:
    examples = collator_of(config(T5, sentinel_id=299)).collate(windows(1, 2, 3, 4), 0)
    first, second = examples.split(2)
    assert isinstance(first, Examples)
    assert second.decoder_inputs is not None
    assert examples.decoder_inputs is not None
    assert torch.equal(second.decoder_inputs, examples.decoder_inputs[2:])
    assert examples.shortened(3).decoder_inputs.shape == (4, 3)  # type: ignore[union-attr]
