"""Training on documents in tar shards, on ranks that start their own private daemons."""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import psutil
import pytest
import webdataset
from gyre_client import Loader
from gyre_trainer.training.history import read

from tests.train_jobs import TINY_GPT, tiny_run

DOCUMENTS = [b"", b"a", b"some words", b"as many as fit", "longer, é: ".encode() * 20, b"z" * 256]
TOKENIZE = {"name": "tokenize", "field": "txt", "tokenizer": "bytes", "end": 256}
PACKED = {
    "fields": ["txt"],
    "transforms": [TOKENIZE],
    "pack": {"field": "tokens", "length": 15, "overlong": "split"},
}
NUM_STEPS = 4


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    with webdataset.TarWriter(str(tmp_path / "shards" / "text-000000.tar")) as writer:
        for index, document in enumerate(DOCUMENTS):
            writer.write({"__key__": f"{index:04}", "txt": document})
    return tmp_path / "shards"


def run(folder: Path, shards: Path, field: str, options: dict[str, object]) -> tuple[int, str]:
    """Train; return the exit status and standard error."""
    data = {"dataset": str(shards), "format": "webdataset", "options": options, "field": field}
    (folder / "train.toml").write_text(
        tiny_run(
            folder,
            run={"steps": NUM_STEPS, "log_every": 1},
            data={**data, "batch_size": 3, "sequence_length": 14},
            model={**TINY_GPT, "vocab_size": 257},
            optimizer={"accumulation_steps": 3},
            checkpoint={"every": 0},
        )
    )
    environment = {name: value for name, value in os.environ.items() if name != "GYRE_ADDRESS"}
    command = [sys.executable, "-m", "gyre_trainer", "run", str(folder / "train.toml")]
    done = subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


def test_documents_of_any_length_are_learned_from(tmp_path: Path, shards: Path) -> None:
    status, errors = run(tmp_path, shards, "tokens", PACKED)
    assert status == 0, errors
    records = read(tmp_path / "run" / "history.jsonl").steps
    with Loader(shards, batch_size=3, format="webdataset", options=PACKED) as loader:
        counted = [int(batch["loss_mask"].sum()) for batch in islice(loader.stream(), NUM_STEPS)]
    assert [record.num_targets for record in records] == counted
    assert all(4 < record.loss < 7 for record in records)
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]
    assert not left


def test_text_is_refused_with_the_transform_that_it_needs(tmp_path: Path, shards: Path) -> None:
    status, errors = run(tmp_path, shards, "txt", {"fields": ["txt"]})
    assert status == 2
    assert "Tokenise text by the transform `tokenize`" in errors.splitlines()[-1]
