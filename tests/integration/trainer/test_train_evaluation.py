"""Evaluations of `gyre-train run`, and the texts after them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gyre_trainer.training.records.history import Evaluation, Sample, committed, notes

from tests.preloaded.interpreter import Interpreter
from tests.train_jobs import IMPORTS, Jobs

DEADLINE_S = 240.0
CONFIG = """
[run]
out = "{folder}/run"
steps = 2
device = "cpu"
threads = 1
[data]
dataset = "{folder}/tokens.bin"
format = "tokens"
options = {{ dtype = "uint16", sequence_length = 9 }}
batch_size = 4
sequence_length = 8
[model.config]
model_type = "gpt2"
vocab_size = 257
n_embd = 16
n_head = 2
n_layer = 1
n_positions = 32
resid_pdrop = 0.5
[optimizer]
lr = 1e-30
min_lr = 0
[eval]
dataset = "{folder}/tokens.bin"
every = 1
batches = 1
[sample]
prompts = ["a b", "c"]
max_new_tokens = 3
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    (np.arange(400) % 64).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    interpreter = Interpreter(IMPORTS)
    jobs = Jobs(interpreter, tmp_path)
    yield jobs
    jobs.end(DEADLINE_S)
    interpreter.close()


def test_evaluations_are_without_dropout_and_followed_by_texts(tmp_path: Path, jobs: Jobs) -> None:
    (tmp_path / "train.toml").write_text(CONFIG.format(folder=tmp_path))
    job = jobs.start("run", str(tmp_path / "train.toml"), "--nproc=2")
    errors = job.errors(DEADLINE_S)
    assert job.wait(DEADLINE_S) == 0, errors
    history = tmp_path / "run/history.jsonl"
    assert [each.step for each in committed(history)] == [0, 1]
    first, second = notes(history, Evaluation)
    assert (first.evaluated_at, second.evaluated_at) == (1, 2)
    assert first.eval_loss == second.eval_loss, "the weights stay, and dropout is off"
    samples = notes(history, Sample)
    assert [(each.sampled_at, each.prompt) for each in samples] == [
        (step, prompt) for step in (1, 2) for prompt in ("a b", "c")
    ]
    assert samples[0].text == samples[2].text
    assert "step 2: c | " in errors
    job = jobs.start("run", str(tmp_path / "train.toml"), "--set=eval.every=0")
    assert "`eval.every` is 0" in job.errors(DEADLINE_S)
