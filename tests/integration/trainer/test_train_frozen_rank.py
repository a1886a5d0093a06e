"""A rank that is stopped inside a save is named with what happened to it, and to whom."""

from pathlib import Path

import numpy as np

from tests.preloaded.interpreter import Interpreter
from tests.train_jobs import IMPORTS, Jobs

DEADLINE_S = 240.0
CONFIG = """
[run]
out = "{folder}/run"
steps = 1
device = "cpu"
threads = 1
timeout_s = 10
[data]
dataset = "{folder}/tokens.bin"
format = "tokens"
options = {{ dtype = "uint16", sequence_length = 9 }}
batch_size = 3
sequence_length = 8
[model]
vocab_size = 65
num_layers = 1
dim = 16
num_heads = 2
num_kv_heads = 2
hidden_dim = 32
"""


def test_a_rank_that_is_stopped_in_a_save_is_named_first(tmp_path: Path) -> None:
    (np.arange(400) % 64).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    (tmp_path / "train.toml").write_text(CONFIG.format(folder=tmp_path))
    interpreter = Interpreter(IMPORTS)
    jobs = Jobs(interpreter, tmp_path)
    try:
        job = jobs.start(
            "run", str(tmp_path / "train.toml"), "--nproc=3", module="tests.frozen_in_save"
        )
        errors = job.errors(DEADLINE_S)
        assert job.wait(DEADLINE_S) == 1, errors
    finally:
        jobs.end(DEADLINE_S)
        interpreter.close()
    last = errors.strip().splitlines()[-1]
    assert last.startswith(
        "gyre-train: rank 2 is at fault: no sign of life within 5 s, so it has ended or was stopped"
    ), errors
    assert "writing a checkpoint" in last
    for word in ("Timed out", ".cc", "Traceback"):
        assert word not in errors
    logs = [path.read_text() for path in (tmp_path / "run").glob("rank-*.log")]
    assert logs
    assert any("writing a checkpoint failed: " in each and ".cc" in each for each in logs)
    assert not (tmp_path / "run/checkpoints/latest").exists()
