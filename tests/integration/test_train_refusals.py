"""What `gyre-train` refuses before any rank starts: status 2, one sentence, and nothing written."""

import json
from pathlib import Path

import pytest
from gyre_trainer.cli import main

CONFIG = """
[run]
out = "{out}"
steps = 10
[data]
dataset = "bytes"
batch_size = 8
sequence_length = 16
[model]
vocab_size = 256
num_layers = 2
dim = 32
num_heads = 2
num_kv_heads = 2
hidden_dim = 64
"""
MODEL = {
    "vocab_size": 256,
    "num_layers": 2,
    "dim": 32,
    "num_heads": 2,
    "num_kv_heads": 2,
    "hidden_dim": 64,
    "max_seq_len": 16,
    "rope_theta": 10000.0,
    "tie_embeddings": False,
    "gated_mlp": True,
    "norm": "rms",
    "bias": False,
}


@pytest.fixture
def config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("RANK", "GYRE_TRAIN_LAUNCHER"):
        monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "train.toml"
    path.write_text(CONFIG.format(out=tmp_path / "run"))
    return path


def write_checkpoint(folder: Path, manifest: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence of the refusal."""
    assert main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gyre-train: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_wrong_configuration(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean `steps`" in refused(capsys, str(config_path), "--set", "run.step=3")
    assert "cannot read" in refused(capsys, str(config_path.parent))
    assert "multiple of 3" in refused(capsys, str(config_path), "--nproc", "3")
    assert not (config_path.parent / "run").exists()


def test_wrong_flags(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--nproc", "0"], ["--nproc", "two"], ["--fast"]):
        with pytest.raises(SystemExit) as caught:
            main(["run", str(config_path), *flags])
        assert caught.value.code == 2
        assert flags[0] in capsys.readouterr().err


def test_a_resume_without_a_checkpoint(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "begin the run without --resume" in refused(capsys, str(config_path), "--resume")
    assert "is not a checkpoint" in refused(
        capsys, str(config_path), "--resume", str(config_path.parent)
    )


def test_a_checkpoint_of_another_model_says_what_differs(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_path.parent / "run" / "checkpoints"
    write_checkpoint(
        folder / "step-00000005",
        {"format": 1, "step": 5, "model": MODEL | {"dim": 64, "norm": "layer"}},
    )
    (folder / "latest").write_text("step-00000005\n")
    for resume in (
        ["--resume"],
        ["--resume", "latest"],
        ["--resume", str(folder / "step-00000005")],
    ):
        text = refused(capsys, str(config_path), *resume)
        assert "dim is 64 there and 32 here, norm is layer there and rms here" in text


@pytest.mark.parametrize("manifest", [{"format": 2}, {}, [], "text"])
def test_checkpoints_of_other_formats_and_torn_ones(
    config_path: Path, capsys: pytest.CaptureFixture[str], manifest: object
) -> None:
    path = write_checkpoint(config_path.parent / "other", manifest)
    text = refused(capsys, str(config_path), "--resume", str(path))
    assert "format 2, but this version reads format 1" in text or "is not a checkpoint" in text
