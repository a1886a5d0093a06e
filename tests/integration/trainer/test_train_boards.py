"""Figures and texts of a run in Weights & Biases, by its own library, without a network."""

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.boards import BoardsConfig, require_installed

from tests.train_jobs import DEADLINE_S, TINY_GPT, Jobs, tiny_run

BLOCK_BYTES, HEADER_BYTES = 32768, 7


def logged(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The run's id, and what was logged: the file is a log as LevelDB has it, of messages."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    content, place, parts = path.read_bytes(), HEADER_BYTES, b""
    run_id, lines = "", []
    while place < len(content):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < HEADER_BYTES:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + HEADER_BYTES : place + HEADER_BYTES + length]
        place += HEADER_BYTES + length
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(parts)
            parts = b""
            if record.HasField("run"):
                run_id = record.run.run_id
                assert "options" not in str(record.run.config), "they may hold secrets"
                assert "batch_size" in str(record.run.config)
            if record.HasField("history"):
                items = {each.nested_key[0]: each.value_json for each in record.history.item}
                lines.append({name: json.loads(value) for name, value in items.items()})
    return run_id, lines


def test_a_resumed_run_is_the_same_run(tmp_path: Path, tiny_jobs: Jobs) -> None:
    (tmp_path / "train.toml").write_text(
        tiny_run(
            tmp_path,
            run={"log_every": 1},
            model={**TINY_GPT, "vocab_size": 257},
            eval={"dataset": str(tmp_path / "tokens.bin"), "every": 2, "batches": 1},
            boards={"wandb_project": "some project"},
        )
    )
    found = []
    for flags in (["--nproc=2"], ["--resume", "--set=run.steps=3"]):
        job = tiny_jobs.start(
            "run",
            str(tmp_path / "train.toml"),
            *flags,
            environment={**os.environ, "WANDB_MODE": "offline"},
        )
        errors = job.errors(DEADLINE_S)
        assert job.wait(DEADLINE_S) == 0, errors
        found.append({*(tmp_path / "run/wandb").glob("offline-run-*/*.wandb")})
    assert [len(each) for each in found] == [1, 2], "only rank 0 writes"
    (first,), (second,) = found[0], found[1] - found[0]
    (one, begun), (other, resumed) = logged(first), logged(second)
    assert one == other == (tmp_path / "run/wandb-run").read_text().strip()
    history = [
        json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()
    ]
    steps = {each["step"]: each for each in history if "step" in each}
    drawn = {line["step"]: line for line in begun + resumed if "train/loss" in line}
    assert drawn.keys() == {1, 2, 3}
    for step, line in drawn.items():
        record = steps[step - 1]
        assert line["train/loss"] == record["loss"]
        assert line["train/learning_rate"] == record["lr"]
        assert line["speed/tokens_per_s"] == record["num_targets"] / record["elapsed_s"]
    evaluations = [(line["step"], line["eval/loss"]) for line in begun if "eval/loss" in line]
    of_history = {name: each for each in history[:4] for name in each}
    assert evaluations == [(2, of_history["eval_loss"]["eval_loss"])]
    assert [line["step"] for line in resumed if "eval/loss" in line] == [3]


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    boards = BoardsConfig(wandb_project="p")
    require_installed(boards)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    require_installed(BoardsConfig())
    with pytest.raises(ConfigError) as refused:
        require_installed(boards)
    assert "pip install 'gyre-ml[boards]'" in str(refused.value)
