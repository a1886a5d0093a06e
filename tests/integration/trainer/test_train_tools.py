"""`gyre-train plan`, as a user calls it."""

import json
from pathlib import Path

import pytest
from gyre_trainer.cli import main

CONFIG = """
[run]
out = "nowhere"
steps = 9
device = "cpu"
threads = 1
[data]
dataset = "none"
batch_size = 8
sequence_length = 16
[model]
vocab_size = 256
num_layers = 3
dim = 32
num_heads = 4
num_kv_heads = 4
hidden_dim = 64
tie_embeddings = true
"""
BY_SLICE = ("--set", "memory.min_numel=0")  # the model is small
KIB = 1024


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "train.toml"
    path.write_text(CONFIG)
    return str(path)


def rows(text: str) -> dict[str, list[str]]:
    """The lines of a table by their first word."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line}


def test_plan_shows_how_each_module_is_treated_and_the_cost_of_a_step(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, "--ranks", "4", *BY_SLICE]) == 0
    said = rows(capsys.readouterr().out)
    embedding, attention, mlp = 256 * 32 * 4, 4 * 32 * 32 * 4, 3 * 32 * 64 * 4
    norms = 7 * 32 * 4
    whole = embedding + 3 * (attention + mlp)
    mib = "{:.4f}".format
    assert said["embedding"] == [
        "embedding",
        "Embedding",
        "EmbeddingRule",
        mib(embedding / KIB**2),
        mib(embedding / 4 / KIB**2),
    ]
    assert said["blocks.*.mlp"] == [
        "blocks.*.mlp",
        "x3",
        "GatedMLP",
        "MLPRule",
        mib(3 * mlp / KIB**2),
        mib(3 * mlp / 4 / KIB**2),
    ]
    assert "head" not in said  # tied: it stands with the embedding
    assert said["norm"][1:3] == ["RMSNorm", "whole"]
    assert said["total"] == [
        "total",
        mib((whole + norms) / KIB**2),
        mib((whole / 4 + norms) / KIB**2),
    ]
    gyre, *others = (float(cell) for cell in said["peak"][1:])
    assert len(others) == 3  # FSDP2 twice, DDP
    assert all(gyre < other for other in others)
    identities = 9 * 8  # behind each shard that travels: the embedding and two in each block
    assert KIB**2 * float(said["parameters"][1]) == pytest.approx(
        whole / 4 + norms + identities, abs=100
    )
    assert main(["plan", config, "--ranks", "8", "--ranks-per-host", "4", *BY_SLICE]) == 2
    assert "Give --bytes-per-s-between" in capsys.readouterr().err
    between = ["--ranks-per-host", "2", "--bytes-per-s-between", "1e9", "--json"]
    assert main(["plan", config, "--ranks", "4", *BY_SLICE, *between]) == 0
    found = json.loads(capsys.readouterr().out)
    two, four = found["rings"]
    assert (two["size"], two["replicas"]) == (2, 2)
    assert four["peak_bytes"] == found["strategies"]["Gyre"]["peak_bytes"] < two["peak_bytes"]
    assert two["averaged_bytes"] == (whole + norms) // 2  # once the half of all gradients
    assert (two["thinnest"], four["thinnest"]) == (16, 8)  # of 32 columns
    assert found["layer_by_layer"] == []


def test_plan_takes_any_configuration_of_transformers_and_recommends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {
        "model_type": "qwen3",
        "vocab_size": 256,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    # With so many tokens all of a vocabulary's slices travel.
    model = ["plan", "--model", str(tmp_path), "--sequence", "16", "--batch", "64", "--ranks", "2"]
    model += ["--set", "memory.min_numel=0"]
    # A rank's link is so slow that only DDP, which sends least, is not the slowest.
    rates = ["--operations-per-s", "1e12", "--bytes-per-s", "1e6", "--memory"]
    assert main([*model, *rates, "1"]) == 0
    said = capsys.readouterr().out
    assert rows(said)["model.layers.*.self_attn"][1:4] == ["x2", "Qwen3Attention", "AttentionRule"]
    sent = float(rows(said)["sent"][3]) * 2**20
    assert float(rows(said)["step,"][2]) == pytest.approx(sent / 1e6, rel=0.01)
    assert "Take DDP" in said
    assert "Assumed" not in said
    assert main([*model, *rates, "0.0001"]) == 0
    assert "Nothing fits into 90%" in capsys.readouterr().out


def test_a_plan_of_experts_says_what_it_assumes_of_the_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {
        "model_type": "gpt_oss",
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    model = ["plan", "--model", str(tmp_path), "--batch", "2", "--ranks", "2"]
    model += ["--set", "memory.min_numel=0", "--sequence"]
    rates = ["--operations-per-s", "1e12", "--bytes-per-s", "1e9"]
    assert main([*model, "16", *rates]) == 0
    said = capsys.readouterr().out
    assert rows(said)["model.layers.0.mlp.experts"][2] == "ExpertsRule"
    assert len(rows(said)["peak"]) == 5  # all strategies
    assert "Assumed: every expert is chosen equally often." in said
    assert main([*model, "1", *rates]) == 2
    assert "choose 2 experts in a step, but there are 4. Plan with more" in capsys.readouterr().err


def test_a_plan_counts_layers_computed_again_where_blocks_do_not_rotate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {
        "model_type": "olmo2",
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    model = ["plan", "--model", str(tmp_path), "--batch", "8", "--ranks", "2", "--sequence", "64"]
    assert main([*model, "--set", "memory.min_numel=0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "Olmo2Attention: rotates layer by layer" in found["layer_by_layer"][0]
    assert found["peak_bytes_by_layer"] < found["strategies"]["Gyre"]["peak_bytes"]
    assert 'memory.recompute = "layer"' in found["recommendation"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--ranks", "2"], "either CONFIG.toml, or --model, --sequence and --batch"),
        (["--model", "nowhere", "--sequence", "8", "--batch", "4"], "nowhere cannot be read"),
        (
            ["--model", "m", "--sequence", "8", "--batch", "8", "--ranks", "3"],
            "`data.batch_size` is 8; it must be a multiple of 3, the number of ranks\n",
        ),
    ],
)
def test_a_plan_says_what_is_missing_or_wrong(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *flags]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(["--ranks", "3"], "multiple of 3"), (["--set", "model.dims=3"], "model.dim")],
)
def test_an_impossible_plan_is_one_sentence(
    flags: list[str], reason: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, *flags]) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert said.out == ""
