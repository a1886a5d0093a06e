"""Training on sequences of several lengths: the batches differ in shape from step to step."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_trainer.training.history import committed, digest

from tests.conftest import StartDaemon, to_toml
from tests.train_jobs import TINY_GPT, Jobs

LENGTHS, STEPS, VOCABULARY = [8, 16, 32], 6, 65
PACK = {"field": "tokens", "length": LENGTHS}
DATA = {"dataset": "packed", "batch_size": 4, "sequence_length": 31, "seed": 1, "tail": "drop"}
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {**TINY_GPT, "vocab_size": VOCABULARY, "inside_documents": True},
    "llama": {"config": LLAMA},
}


def write_documents(folder: Path) -> Path:
    generator = np.random.default_rng(4)
    lengths = np.clip(generator.lognormal(2.2, 0.8, 300).astype(int), 1, 32)
    rows = [generator.integers(1, VOCABULARY, length).tolist() for length in lengths]
    folder.mkdir()
    pq.write_table(pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}), folder / "0.parquet")
    return folder


@pytest.mark.parametrize("family", sorted(MODELS))
def test_every_target_counts_once_on_any_ranks_and_parts(
    family: str,
    gyred: StartDaemon,
    tiny_jobs: Jobs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_documents(tmp_path / "data")
    daemon = gyred({"datasets": {"packed": {"uri": str(folder), "pack": PACK}}})
    losses = []
    for nproc, parts in ((1, 1), (2, 2)):
        out = tmp_path / f"run-{nproc}"
        tables: dict[str, Any] = {
            "run": {"out": str(out), "steps": STEPS, "device": "cpu", "threads": 1, "log_every": 1},
            "data": DATA,
            "model": MODELS[family],
            "optimizer": {"accumulation_steps": parts},
            "checkpoint": {"every": STEPS},
        }
        (tmp_path / "train.toml").write_text(to_toml(tables))
        environment = {**os.environ, "GYRE_ADDRESS": daemon.address}
        job = tiny_jobs.start(
            "run", str(tmp_path / "train.toml"), "--nproc", str(nproc), environment=environment
        )
        errors = job.errors(240)
        assert job.returncode == 0, errors
        losses.append([record.loss for record in committed(out / "history.jsonl")])
    with Loader("packed", batch_size=4, seed=1, tail="drop", address=daemon.address) as its:
        batches = [next(its) for _ in range(STEPS)]
    assert len({batch["tokens"].shape[1] for batch in batches}) == len(LENGTHS)
    records = committed(tmp_path / "run-2" / "history.jsonl")
    assert [record.sample_ids for record in records] == [
        digest(batch["sample_id"].tolist()) for batch in batches
    ]
    # the first token of a document and padding have no loss
    assert [record.num_targets for record in records] == [
        int(batch["loss_mask"].sum()) for batch in batches
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)

    flags = ["--step", f"0:{STEPS}", "--address", daemon.address]
    assert main(["rewind", str(tmp_path / "run-2"), *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.count("the history has the same samples") == STEPS
    for batch in batches:
        assert f"rows of {batch['tokens'].shape[1]} tokens" in shown
    assert main(["rewind", str(tmp_path / "run-2"), *flags[2:], "--step", "2", "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["shown"]
