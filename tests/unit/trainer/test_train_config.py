import re
import typing
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.build import plain
from gyre_trainer.training.config import TrainConfig, build, load
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.library import LibraryConfig

MINIMAL = """
[run]
out = "runs/a"
steps = 10
[data]
dataset = "words"
batch_size = 8
sequence_length = 32
[model]
vocab_size = 256
num_layers = 2
dim = 32
num_heads = 2
num_kv_heads = 2
hidden_dim = 64
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(MINIMAL)
    return path


def loaded(path: Path, *overrides: str) -> TrainConfig:
    return load(path, overrides)


def test_a_minimal_file_takes_defaults_for_the_rest(config_path: Path) -> None:
    config = loaded(config_path)
    assert (config.run.out, config.run.steps, config.run.device) == ("runs/a", 10, "auto")
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.precision.compute_dtype == "float32"  # `auto` where there is no CUDA
    assert not config.precision.tf32
    assert loaded(config_path, "run.device=cuda").precision.compute_dtype == "bfloat16"
    assert isinstance(config.model, GPTConfig)
    assert config.model.max_seq_len == config.data.sequence_length == 32


def test_overrides_win_and_are_toml_values_or_plain_text(config_path: Path) -> None:
    config = loaded(
        config_path,
        "run.steps=20",
        "optimizer.betas=[0.5, 0.6]",
        "optimizer.lr=1",
        "data.address=unix:/tmp/a.sock",
        "model.tie_embeddings=true",
        'data.field="txt"',
        "data.options={sequence_length = 33}",
    )
    assert config.run.steps == 20
    assert config.optimizer.betas == (0.5, 0.6)
    assert config.optimizer.lr == 1.0
    assert config.data.address == "unix:/tmp/a.sock"
    assert isinstance(config.model, GPTConfig)
    assert config.model.tie_embeddings is True
    assert config.data.field == "txt"
    assert config.data.options == {"sequence_length": 33}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.stepz=3", ["run.stepz", "did you mean `steps`"]),
        ("model.layers=3", ["model.layers", "num_layers"]),
        ("modle.dim=3", ["modle", "did you mean `model`"]),
        ("run.steps=many", ["run.steps", "`int`", "'many'"]),
        ("run.steps=1.5", ["run.steps", "int", "1.5"]),
        ("run.steps=true", ["run.steps", "int", "True"]),
        ("run.steps=0", ["run.steps", "is 0", "`int` >= 1"]),
        ("run.seed=-1", ["run.seed", "is -1", "`int` >= 0"]),
        ("run.device=tpu", ["run.device", "one of auto, cpu, cuda", "'tpu'"]),
        ("run.out=''", ["run.out", "is ''", "length >= 1"]),
        ("data.tail=cut", ["data.tail", "one of wrap, drop, pad", "'cut'"]),
        ("data.options=3", ["data.options", "table"]),
        ("model.dim=33", ["model.dim", "33"]),
        ("model.num_kv_heads=3", ["num_kv_heads", "3"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas", "list of length 2"]),
        ("optimizer.betas=[0.9, 1.0]", ["optimizer.betas", "`float` < 1.0"]),
        ("optimizer.warmup_steps=11", ["warmup_steps", "11", "10"]),
        ("precision.compute_dtype=float16", ["compute_dtype", "one of auto, float32, bfloat16"]),
        ("eval.every=5", ["eval.dataset"]),
        ("run=3", ["'run'", "section.key=value"]),
        ("run.steps", ["section.key=value"]),
    ],
)
def test_a_mistake_is_refused_and_named(config_path: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(config_path, override)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_or_section_is_named(config_path: Path) -> None:
    config_path.write_text(MINIMAL.replace("steps = 10\n", ""))
    with pytest.raises(ConfigError, match=r"`run\.steps` is missing"):
        loaded(config_path)
    config_path.write_text(MINIMAL[: MINIMAL.index("[model]")])
    with pytest.raises(ConfigError, match="`model` is missing"):
        loaded(config_path)


def test_a_section_that_is_a_value_is_refused(config_path: Path) -> None:
    config_path.write_text("eval = 3\n" + MINIMAL)
    with pytest.raises(ConfigError, match=r"`eval` is 3: expected a table"):
        loaded(config_path)
    with pytest.raises(ConfigError, match=r"`eval` must be a table"):
        loaded(config_path, "eval.every=1")


@pytest.mark.parametrize("content", [b"[run\n", b"\xff\xfe", b""])
def test_an_invalid_file_is_refused_and_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml|is missing"):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml")


def test_the_global_batch_must_divide_among_ranks_and_accumulation_steps(config_path: Path) -> None:
    config = loaded(config_path, "optimizer.accumulation_steps=2")
    config.require_divisible(4)
    with pytest.raises(ConfigError, match="multiple of 6"):
        config.require_divisible(3)


def test_the_manual_has_every_key_and_no_other() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "training.md").read_text("utf-8")
    documented = {
        line.split("`")[1]
        for line in manual.splitlines()
        if re.match(r"\| `[a-z]+\.[a-z_0-9]+` \|", line)
    }
    sections = typing.get_type_hints(TrainConfig)
    assert documented == {
        f"{name}.{field.name}"
        for name, section in sections.items()
        for each in typing.get_args(section) or (section,)
        for field in fields(each)
    }


_TINY_BERT = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1} | {
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 16,
}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"pretrained": "here", "config": {"model_type": "llama"}}, "either `pretrained`"),
        ({"config": {"hidden_size": 8}}, "`model.config` has no `model_type`"),
        ({"config": {"model_type": "no such family"}}, "has no `model_type` 'no such family'"),
        ({"config": {"model_type": "vit"}}, "causal language models, and a vit is none"),
        (
            {"config": {"model_type": "vit"}},
            "train it by a script with rotate_all, as docs/rotate.md",
        ),
        (
            {"config": {"model_type": "bart"}},
            "a bart is an encoder-decoder; train it by a script with rotate_all",
        ),
        (
            {"config": _TINY_BERT},
            "a bert sees the tokens that it is to predict",
        ),
        ({"pretrained": "nowhere"}, "name a folder with config.json"),
        ({"config": {}, "dim": 8}, "unknown key `model.dim`"),
    ],
)
def test_a_model_of_transformers_that_cannot_be(model: dict[str, object], said: str) -> None:
    table = {
        "run": {"out": "nowhere", "steps": 1},
        "data": {"dataset": "none", "batch_size": 1, "sequence_length": 8},
        "model": model,
    }
    with pytest.raises(ConfigError, match=re.escape(said)):
        plain(build(TrainConfig, table).model)


@pytest.mark.parametrize(
    "keys",
    [
        _TINY_BERT | {"is_decoder": True},
        {"model_type": "bart", "vocab_size": 16, "d_model": 8, "decoder_layers": 1}
        | {"decoder_attention_heads": 2, "decoder_ffn_dim": 8}
        | {"architectures": ["BartForCausalLM"]},
    ],
)
def test_a_family_of_encoders_with_a_causal_model_can_be_trained(keys: dict[str, object]) -> None:
    with torch.device("meta"):
        built = plain(LibraryConfig(config=keys))
    assert type(built).__name__ in ("BertLMHeadModel", "BartForCausalLM")


def test_the_examples_are_configurations() -> None:
    examples = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))
    assert [loaded(path).run.device for path in examples] == ["cpu"] * 3
