"""What `gyre-train` refuses before any rank starts: status 2, one sentence, and nothing written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gyre_trainer.cli import main
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.config import load
from gyre_trainer.training.recorder import RunFacts, RunRecorder

from tests.special_files import SPECIAL_FILES

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


def manifest(**changes: object) -> dict[str, object]:
    return {
        "format": 2,
        "step": 5,
        "world_size": 1,
        "model": MODEL,
        "loader": {"cursor": "AAAA"},
        "files": {".metadata": [1, 2]},
        **changes,
    }


@pytest.fixture
def config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
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


def test_two_runs_do_not_mix_in_one_folder(
    tmp_path: Path, config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run from another one's checkpoint that died before its first, and one over another run."""
    run = config_path.parent / "run"
    run.mkdir()
    (run / "history.jsonl").write_text('{"resumed_at": 5}\n')
    with pytest.raises(ConfigError, match="continued at step 5, but no checkpoint"):
        RunRecorder(load(config_path), RunFacts(1, 1, 1, abs), 0, may_restart=True)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("step-00000009\n")
    text = refused(capsys, str(config_path), "--resume", str(tmp_path / "other" / "step-00000005"))
    assert "choose another `run.out`" in text


def test_weights_to_begin_with_that_no_run_begins_with(
    tmp_path: Path, config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = "--init-from", str(tmp_path / "none")
    assert "is no folder" in refused(capsys, str(config_path), *nowhere)
    both = "--init-from", str(tmp_path), "--resume"
    assert "Leave one of them out" in refused(capsys, str(config_path), *both)


def test_a_checkpoint_of_another_model_says_what_differs(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_path.parent / "run" / "checkpoints"
    write_checkpoint(
        folder / "step-00000005",
        manifest(model=MODEL | {"dim": 64, "norm": "layer"}),
    )
    (folder / "latest").write_text("step-00000005\n")
    for resume in (
        ["--resume"],
        ["--resume", "latest"],
        ["--resume", str(folder / "step-00000005")],
    ):
        text = refused(capsys, str(config_path), *resume)
        assert "dim is 64 there and 32 here, norm is 'layer' there and 'rms' here" in text


@pytest.mark.parametrize("content", [{"format": 1}, {}, [], "text"])
def test_checkpoints_of_other_formats_and_torn_ones(
    config_path: Path, capsys: pytest.CaptureFixture[str], content: object
) -> None:
    path = write_checkpoint(config_path.parent / "other", content)
    text = refused(capsys, str(config_path), "--resume", str(path))
    assert "format 1, but this version reads format 2" in text or "is not a checkpoint" in text


DAMAGED: list[tuple[dict[str, object], str]] = [
    ({"step": -1}, "$.step"),
    ({"step": 1.5}, "$.step"),
    ({"step": None}, "$.step"),
    ({"world_size": 0}, "$.world_size"),
    ({"model": []}, "$.model"),
    ({"model": {}}, "vocab_size is None there"),
    ({"model": MODEL | {"dim": 32.0}}, "dim is 32.0 there and 32 here"),
    ({"loader": {}}, "`loader` has no `cursor`"),
    ({"loader": {"cursor": ""}}, "`loader` has no `cursor`"),
    ({"loader": {"cursor": "AAA"}}, "base64 encoded string - at `$.loader"),
    ({"loader": {"cursor": "A\u00e9=="}}, "base64 encoded string - at `$.loader"),
    ({"loader": {"cursor": 3}}, "$.loader"),
    ({"loader": None}, "$.loader"),
    ({"files": {}}, "`files` has no `.metadata`"),
    ({"files": {"../x": [1, 2]}}, "$.files"),
    ({"files": {".metadata": [1]}}, "$.files"),
]


@pytest.mark.parametrize("missing", ["step", "world_size", "model", "loader", "files"])
def test_a_checkpoint_without_a_key_is_refused_by_the_keys_name(
    config_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    content = manifest()
    del content[missing]
    path = write_checkpoint(config_path.parent / "other", content)
    text = refused(capsys, str(config_path), "--resume", str(path))
    assert "checkpoint.json cannot be read: " in text
    assert f"`{missing}`" in text


def test_a_damaged_manifest_is_refused_with_file_and_key(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (changes, words) in enumerate(DAMAGED):
        path = write_checkpoint(config_path.parent / f"other-{number}", manifest() | changes)
        text = refused(capsys, str(config_path), "--resume", str(path))
        assert str(path) in text
        assert words in text


@pytest.mark.parametrize("latest", [b"", b"step-5", b"../../etc", b"\xff\x00", b"step-0000000x"])
def test_a_damaged_pointer_to_the_latest_checkpoint(
    config_path: Path, capsys: pytest.CaptureFixture[str], latest: bytes
) -> None:
    folder = config_path.parent / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "latest").write_bytes(latest)
    text = refused(capsys, str(config_path), "--resume")
    assert f"{folder}/latest holds " in text
    assert "--resume CHECKPOINT" in text


ODD = {kind: make for kind, make in SPECIAL_FILES.items() if kind != "a link to itself"}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", ["history.jsonl", "report.json"])
def test_what_is_no_file_among_the_records_is_refused_at_once(
    config_path: Path, make: Callable[[Path], None], name: str
) -> None:
    (config_path.parent / "run").mkdir()
    make(config_path.parent / "run" / name)
    with pytest.raises(ConfigError, match=f"run/{name} is no regular file but a folder, a pipe"):
        RunRecorder(load(config_path), RunFacts(1, 1, 1, abs), 0)


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_is_no_file_and_names_the_latest_checkpoint_is_refused_at_once(
    config_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    folder = config_path.parent / "run" / "checkpoints"
    folder.mkdir(parents=True)
    make(folder / "latest")
    for flag in ("--resume", "--resume-if-any"):
        text = refused(capsys, str(config_path), flag)
        assert "checkpoints/latest is no regular file" in text
