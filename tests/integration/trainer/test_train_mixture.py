"""Training on a mixture whose documents are tokenised and packed, from its definition in TOML."""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_trainer.training.history import digest, read

from tests.conftest import StartDaemon
from tests.mixtures import write_sources

CONFIG = """
[run]
out = "{out}"
steps = 6
log_every = 1
device = "cpu"
[data]
dataset = "all"
batch_size = 4
sequence_length = 31
seed = 5
[model]
vocab_size = 257
num_layers = 1
dim = 16
num_heads = 2
num_kv_heads = 1
hidden_dim = 32
[checkpoint]
every = 6
"""


def test_a_packed_mixture_is_learned_from(
    gyred: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = {
        "weights": {"web": 0.75, "code": 0.25},
        "block": 8,
        "schedule": [{"step": 4, "weights": {"code": 1}}],
        "transforms": [{"name": "tokenize", "field": "text", "tokenizer": "bytes", "end": 256}],
        "pack": {"field": "tokens", "length": 32},
    }
    daemon = gyred({"datasets": write_sources(tmp_path / "data"), "mixtures": {"all": mixture}})
    (tmp_path / "train.toml").write_text(CONFIG.format(out=tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-m", "gyre_trainer", "run", str(tmp_path / "train.toml")],
        env={**os.environ, "GYRE_ADDRESS": daemon.address},
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = read(tmp_path / "run" / "history.jsonl").steps
    with Loader("all", batch_size=4, seed=5, address=daemon.address) as loader:
        batches = list(islice(loader.stream(), 6))
    assert [record.sample_ids for record in records] == [
        digest(batch["sample_id"].tolist()) for batch in batches
    ]
    # the first token of a document and padding have no loss
    assert [record.num_targets for record in records] == [
        int(batch["loss_mask"].sum()) for batch in batches
    ]
    sources = [batch["source"].tolist() for batch in batches]
    assert [sum(sources[step] + sources[step + 1]) for step in (0, 2, 4)] == [2, 2, 8]
    assert main(["rewind", str(tmp_path / "run"), "--step=2:5", "--address", daemon.address]) == 0
    text = capsys.readouterr().out
    assert text.count("the history has the same samples") == 3
