"""A table of what `gyre-train` refuses: status 2, one line that names the thing, no traceback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gyre_trainer.cli import main

from tests.integration.trainer.test_train_refusals import CONFIG

DEADLINE_S = 150.0
RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29599",
}
VALUES = {
    # lengths of the run, and how its ranks run
    "run.steps=0": "`run.steps` is 0",
    "run.steps=-1": "`run.steps` is -1",
    "run.steps=1e3": "`run.steps`",
    "run.steps=nan": "`run.steps`",
    "run.steps=99999999999999999999999": "`run.steps`",
    "run.steps=" + "9" * 5000: "run.steps",
    "run.steps=0x" + "f" * 5000: "run.steps",
    "run.steps=[1]": "`run.steps`",
    "run.out=": "`run.out`",
    "run.out=3": "`run.out`",
    'run.out="a\\u0000b"': "`run.out`",
    'run.out="a\\u001b[2J"': "`run.out`",
    "run.out=/dev/null/run": "`run.out`",
    "run.out=/proc/self/run": "`run.out`",
    "run.out=" + "x" * 300: "`run.out`",
    "run.device=gpu": "`run.device`",
    "run.threads=-1": "`run.threads`",
    "run.threads=1000000000": "`run.threads`",
    "run.log_every=0": "`run.log_every`",
    "run.seed=-1": "`run.seed`",
    "run.seed=18446744073709551616": "`run.seed`",
    "run.timeout_s=0": "`run.timeout_s`",
    "run.timeout_s=-1": "`run.timeout_s`",
    "run.timeout_s=nan": "`run.timeout_s`",
    "run.timeout_s=inf": "`run.timeout_s`",
    "run.timeout_s=1e300": "`run.timeout_s`",
    # data
    "data.dataset=''": "`data.dataset`",
    "data.dataset=3": "`data.dataset`",
    'data.dataset="a\\u009bb"': "`data.dataset`",
    "data.dataset=\udcff": "data.dataset",
    "data.batch_size=0": "`data.batch_size`",
    "data.batch_size=9223372036854775808": "`data.batch_size`",
    "data.sequence_length=0": "`data.sequence_length`",
    "data.sequence_length=-5": "`data.sequence_length`",
    "data.field=''": "`data.field`",
    "data.seed=1.5": "`data.seed`",
    "data.tail=wrapped": "`data.tail`",
    "data.prefetch_batches=-1": "`data.prefetch_batches`",
    "data.options=[]": "`data.options`",
    "data.options=sekret": "`data.options`",
    "data.option={key='sekret'}": "did you mean `options`",
    "data.options=" + "[" * 5000: "data.options",
    # the model
    "model.vocab_size=0": "`model.vocab_size`",
    "model.vocab_size=-3": "`model.vocab_size`",
    "model.num_layers=0": "`model.num_layers`",
    "model.num_layers=1000000000": "`model.num_layers`",
    "model.dim=0": "`model.dim`",
    "model.dim=-4": "`model.dim`",
    "model.dim=31": "`model.dim`",
    "model.dim=true": "`model.dim`",
    "model.num_heads=0": "`model.num_heads`",
    "model.num_heads=-2": "`model.num_heads`",
    "model.num_kv_heads=0": "`model.num_kv_heads`",
    "model.num_kv_heads=3": "`model.num_kv_heads`",
    "model.hidden_dim=0": "`model.hidden_dim`",
    "model.hidden_dim=2147483648": "`model.hidden_dim`",
    "model.max_seq_len=0": "`model.max_seq_len`",
    "model.max_seq_len=8": "`model.max_seq_len`",
    "model.max_seq_len='16'": "`model.max_seq_len`",
    "model.rope_theta=0": "`model.rope_theta`",
    "model.rope_theta=-1.0": "`model.rope_theta`",
    "model.rope_theta=1e-300": "`model.rope_theta`",
    "model.rope_theta=nan": "`model.rope_theta`",
    "model.rope_theta=inf": "`model.rope_theta`",
    "model.tie_embeddings=1": "`model.tie_embeddings`",
    "model.norm=batch": "`model.norm`",
    "model.dropout=2": "unknown key `model.dropout`",
    # precision and memory
    "precision.compute_dtype=int8": "`precision.compute_dtype`",
    "precision.grad_dtype=float64": "`precision.grad_dtype`",
    "memory.recompute=yes": "`memory.recompute`",
    # the optimizer
    "optimizer.lr=0": "`optimizer.lr`",
    "optimizer.lr=-1e-3": "`optimizer.lr`",
    "optimizer.lr=inf": "`optimizer.lr`",
    "optimizer.lr=nan": "`optimizer.lr`",
    "optimizer.lr=1e39": "`optimizer.lr`",
    "optimizer.min_lr=nan": "`optimizer.min_lr`",
    "optimizer.min_lr=-1": "`optimizer.min_lr`",
    "optimizer.min_lr=1": "`optimizer.min_lr` is 1, above `optimizer.lr`, 0.001",
    "optimizer.lr=2e-5": "`optimizer.min_lr` is 0.0001, above `optimizer.lr`, 2e-05",
    "optimizer.warmup_steps=-1": "`optimizer.warmup_steps`",
    "optimizer.warmup_steps=11": "`optimizer.warmup_steps`",
    "optimizer.betas=[0.9, 1]": "`optimizer.betas`",
    "optimizer.betas=[-0.1, 0.9]": "`optimizer.betas`",
    "optimizer.betas=[0.9, nan]": "`optimizer.betas`",
    "optimizer.betas=0.9": "`optimizer.betas`",
    "optimizer.betas=[[0.9], 0.9]": "`optimizer.betas`",
    "optimizer.eps=0": "`optimizer.eps`",
    "optimizer.eps=-1e-8": "`optimizer.eps`",
    "optimizer.eps=1e-60": "`optimizer.eps`",
    "optimizer.eps=nan": "`optimizer.eps`",
    "optimizer.weight_decay=nan": "`optimizer.weight_decay`",
    "optimizer.weight_decay=inf": "`optimizer.weight_decay`",
    "optimizer.weight_decay=-0.1": "`optimizer.weight_decay`",
    "optimizer.clip_norm=nan": "`optimizer.clip_norm`",
    "optimizer.clip_norm=-1": "`optimizer.clip_norm`",
    "optimizer.accumulation_steps=0": "`optimizer.accumulation_steps`",
    "optimizer.accumulation_steps=3": "`data.batch_size`",
    # the rest
    "checkpoint.every=-1": "`checkpoint.every`",
    "checkpoint.keep=0": "`checkpoint.keep`",
    "eval.every=1": "`eval.dataset`",
    "eval.batches=0": "`eval.batches`",
    "eval.seed=-1": "`eval.seed`",
    "run.steps=1\n[eval]\nevery=3": "control characters",
    "run.steps=\x1b[2J": "control characters",
    "x\x1b[2J.y=1": "control characters",
    "nothing.key=1": "unknown key `nothing`",
    "a.b.c=1": "unknown key `a`",
    "run.steps": "section.key=value",
    "=": "section.key=value",
    "": "section.key=value",
    ".=1": "section.key=value",
}
FILES = {
    "integers of 5,000 digits": (b"[run]\nsteps = " + b"9" * 5000, "is not valid TOML"),
    "a deep array": (b"a = " + b"[" * 100_000, "is not valid TOML"),
    "a deep array that ends": (b"a = " + b"[" * 50 + b"]" * 50, "unknown key `a`"),
    "a section twice": (b"[run]\n[run]\n", "is not valid TOML"),
    "a list of sections": (b"[[run]]\n[data]\n[model]\n", "`run`"),
    "bytes that are no text": (b"\xff\xfe\x00", "is not valid TOML"),
    "nothing": (b"", "`run` is missing"),
    "a key of control characters": (b'"\\u001b[2J\\n" = 1', "unknown key"),
    "a secret under a wrong key": (b"secret_access_key = 'sekret'", "`secret_acc"),
}
FLAGS = {
    ("--resume", ""): "--resume is empty",
    ("--resume=",): "--resume is empty",
    ("--resume", "/dev/null"): "is not a checkpoint",
    ("--resume", "/nowhere"): "is not a checkpoint",
    ("--resume", "a\0b"): "is not a checkpoint",
    ("--nproc", "3"): "multiple of 3",
    ("--nproc", "1000"): "multiple of 1000",
}
USAGE = [
    ["--nproc", "-1"],
    ["--nproc", "1e3"],
    ["--nproc", "9" * 5000],
    ["--nproc", "1000000000"],
    ["--nproc", ""],
    ["--resume", "--resume-if-any"],
    ["--unknown"],
    ["--set"],
]
VARIABLES: list[tuple[dict[str, str | None], str]] = [
    ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
    ({"MASTER_ADDR": " "}, "MASTER_ADDR is not"),
    ({"MASTER_PORT": None}, "MASTER_PORT is not"),
    ({"WORLD_SIZE": None}, "WORLD_SIZE is not"),
]


@pytest.fixture
def config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in RANK:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.toml"
    path.write_text(CONFIG.format(out=tmp_path / "run"))
    return path


Refused = Callable[..., str]


@pytest.fixture
def refused(config_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    def refused(*flags: str) -> str:
        """The line of the refusal."""
        assert main(["run", str(config_path), *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("gyre-train: error: ")
        line = captured.err.removesuffix("\n")
        assert line.isprintable()
        assert len(line) < 1000
        assert "sekret" not in line
        assert sorted(path.name for path in config_path.parent.iterdir()) == ["train.toml"]
        return line

    return refused


@pytest.mark.parametrize("section", ["run", "data", "model", "optimizer", ""])
def test_values(refused: Refused, section: str) -> None:
    sections = ("run.", "data.", "model.", "optimizer.")
    ours = [text for text in VALUES if text.startswith(f"{section}.")]
    for override in ours if section else [text for text in VALUES if not text.startswith(sections)]:
        assert VALUES[override] in refused("--set", override), override[:80]


def test_files(refused: Refused, config_path: Path) -> None:
    for content, words in FILES.values():
        config_path.write_bytes(content)
        assert words in refused()


def test_a_configuration_that_is_no_file(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("/dev/zero", "/nowhere.toml", str(config_path.parent), "a\0b", ""):
        assert main(["run", path]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    os.mkfifo(config_path.parent / "pipe")
    assert main(["plan", str(config_path.parent / "pipe")]) == 2
    assert "not a regular file" in capsys.readouterr().err


def test_flags(refused: Refused) -> None:
    for flags, words in FLAGS.items():
        assert words in refused(*flags)


def test_usage(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in USAGE:
        with pytest.raises(SystemExit) as caught:
            main(["run", str(config_path), *flags])
        assert caught.value.code == 2
        errors = capsys.readouterr().err
        assert flags[0] in errors
        assert "Traceback" not in errors


def test_variables_of_launchers(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, words in VARIABLES:
        for name in (*RANK, *changes):
            value = (RANK | changes)[name]
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        assert words in refused()


def test_nproc_in_one_rank_of_a_launcher(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert "leave --nproc out" in refused("--nproc=2")


def test_a_file_in_the_way_of_outputs(refused: Refused, tmp_path: Path) -> None:
    here = str(tmp_path / "train.toml")
    assert f"`run.out` is {here}: File exists" in refused("--set", f"run.out={here}")
    inside = f"{here}/run/a"
    assert f"`run.out` is {inside}: Not a directory" in refused("--set", f"run.out={inside}")


def started(*arguments: str, stdout: int | None = None) -> "subprocess.Popen[str]":
    others = (*RANK, "PYTHONUNBUFFERED")  # argparse ignores a write that fails at once
    environment = {name: value for name, value in os.environ.items() if name not in others}
    command = [sys.executable, "-m", "gyre_trainer", *arguments]
    return subprocess.Popen(
        command, text=True, env=environment, stdout=stdout, stderr=subprocess.PIPE
    )


def test_a_pipe_that_nobody_reads_and_a_full_disk() -> None:
    for output, status, told in (("pipe", 141, ""), ("/dev/full", 1, "No space left on device")):
        if output == "pipe":
            read_end, write_end = os.pipe()
            os.close(read_end)
        else:
            write_end = os.open(output, os.O_WRONLY)
        process = started("--help", stdout=write_end)
        os.close(write_end)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == status
        assert told in errors
        assert errors.count("\n") == (1 if told else 0), errors


def test_ctrl_c_ends_a_command_without_a_traceback(config_path: Path) -> None:
    """The interrupt comes while the command imports torch, or later."""
    process = started("plan", str(config_path), "--set=model.num_layers=2000")
    maps = Path(f"/proc/{process.pid}/maps")
    deadline_s = time.monotonic() + DEADLINE_S
    while "libtorch" not in maps.read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


def test_ranks_that_cannot_meet(config_path: Path) -> None:
    environment = os.environ | RANK | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "gyre_trainer",
            "run",
            str(config_path),
            "--set=run.timeout_s=1",
            "--set=run.device=cpu",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert process.returncode == 1
    assert "rank 1 cannot join the other ranks at 127.0.0.1:1: " in process.stderr
    assert "Traceback" not in process.stderr
