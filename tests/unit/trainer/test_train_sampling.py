"""Which prompts a run can continue, and how they become token ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.config import build
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.library import LibraryConfig
from gyre_trainer.training.sampling import SampleConfig, Sampler, codec_of

GPT = {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 2, "hidden_dim": 32}


def gpt(vocab_size: int) -> GPTConfig:
    return build(GPTConfig, {**GPT, "vocab_size": vocab_size, "max_seq_len": 8})


def test_a_tokenizer_is_taken_from_the_folder_of_the_weights(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"<|ask|>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["<|ask|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 3}))
    codec = codec_of(SampleConfig(), LibraryConfig(pretrained=str(tmp_path)))
    assert codec.encode("<|ask|>b") == [0, 2]
    assert codec.decode([2]) == "b"


def test_a_vocabulary_of_bytes_needs_no_tokenizer() -> None:
    codec = codec_of(SampleConfig(), gpt(257))
    assert codec.encode("é") == [0xC3, 0xA9]
    assert codec.decode([0xC3, 0xA9, 256, 0xC3]) == "é\ufffd"


@pytest.mark.parametrize(
    ("sample", "vocabulary", "told"),
    [
        ({"prompts": ["a"]}, 300, "`sample.prompts` needs `sample.tokenizer`"),
        ({"prompts": ["a"], "tokenizer": "/nowhere.json"}, 300, "/nowhere.json is no tokenizer"),
        ({"prompts": ["é"], "tokenizer": "bytes"}, 70, "`model` has 70 ids"),
    ],
)
def test_prompts_that_the_model_cannot_read_are_refused(
    sample: dict[str, Any], vocabulary: int, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Sampler(build(SampleConfig, sample), gpt(vocabulary))
