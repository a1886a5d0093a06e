"""Training on documents in tar shards, on ranks that start their own private daemons."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import webdataset
from gyre_trainer.training.history import read

DOCUMENTS = [b"", b"a", b"some words", b"as many as fit", "longer, é: ".encode() * 20, b"z" * 256]
CONFIG = """
[run]
out = "{out}"
steps = 4
log_every = 1
device = "cpu"
threads = 1
[data]
dataset = "{shards}"
format = "webdataset"
options = {{ fields = ["txt"] }}
field = "txt"
batch_size = 3
sequence_length = 14
[model]
vocab_size = 257
num_layers = 1
dim = 16
num_heads = 2
num_kv_heads = 1
hidden_dim = 32
[optimizer]
accumulation_steps = 3
[checkpoint]
every = 0
"""


def test_documents_of_any_length_are_learned_from(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    with webdataset.TarWriter(str(tmp_path / "shards" / "text-000000.tar")) as writer:
        for index, document in enumerate(DOCUMENTS):
            writer.write({"__key__": f"{index:04}", "txt": document})
    (tmp_path / "train.toml").write_text(
        CONFIG.format(out=tmp_path / "run", shards=tmp_path / "shards")
    )

    environment = {name: value for name, value in os.environ.items() if name != "GYRE_ADDRESS"}
    command = [sys.executable, "-m", "gyre_trainer", "run", str(tmp_path / "train.toml")]
    done = subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    records = read(tmp_path / "run" / "history.jsonl").steps
    # of each document its bytes and its end but for the first token, or a full row
    targets_of_an_epoch = 0 + 1 + 10 + 14 + 14 + 14
    assert [
        sum(record.num_targets for record in records[start : start + 2]) for start in (0, 2)
    ] == [targets_of_an_epoch] * 2
    assert all(4 < record.loss < 7 for record in records)
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]
    assert not left
