"""`gyre-train eval`: the loss of a checkpoint on a whole dataset, each sample once."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from gyre_trainer.training.gpt import GPT, GPTConfig
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.train_jobs import DEADLINE_S, TINY_GPT, Jobs, tiny_run

WINDOWS = 23  # a multiple of no number of ranks
FLOAT64 = 1e-5  # of a sum in float64 of losses in float32


def loss_alone(run: Path, tokens: np.ndarray) -> float:
    """The mean loss of the newest checkpoint, by torch in one process."""
    newest = run / "checkpoints" / (run / "checkpoints/latest").read_text().strip()
    dcp_to_torch_save(newest, run / "whole.pt")
    config = GPTConfig(**TINY_GPT, max_seq_len=8)  # type: ignore[arg-type]
    model = GPT(config).double()
    model.load_state_dict(torch.load(run / "whole.pt", weights_only=True)["model"])
    rows = torch.from_numpy(tokens.astype(np.int64)).view(WINDOWS, 9)
    with torch.no_grad():
        return float(model.loss(rows[:, :-1], rows[:, 1:]))


def test_each_sample_counts_once_on_any_number_of_ranks(
    tmp_path: Path, tiny_jobs: Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    config, tokens = tmp_path / "train.toml", np.random.default_rng(1).integers(0, 65, WINDOWS * 9)
    tokens.astype(np.uint16).tofile(tmp_path / "held-out.bin")
    config.write_text(tiny_run(tmp_path, eval={"dataset": str(tmp_path / "held-out.bin")}))
    status, errors = tiny_jobs.ran("eval", str(config))
    assert (status, "name weights with --weights" in errors) == (2, True), errors
    status, errors = tiny_jobs.ran("run", str(config))
    assert status == 0, errors
    expected = loss_alone(tmp_path / "run", tokens)
    for num_ranks in (1, 3):
        capfd.readouterr()
        job = tiny_jobs.start("eval", str(config), f"--nproc={num_ranks}", "--json")
        assert job.wait(DEADLINE_S) == 0, job.errors(DEADLINE_S)
        found = json.loads(capfd.readouterr().out)
        assert (found["samples"], found["tokens"], found["step"]) == (WINDOWS, WINDOWS * 8, 2)
        assert found["loss"] == pytest.approx(expected, rel=FLOAT64)
        assert found["perplexity"] == pytest.approx(math.exp(expected), rel=10 * FLOAT64)
        assert found["ranks"] == num_ranks
    status, errors = tiny_jobs.ran("eval", str(config), "--set=eval.dataset=''")
    assert (status, "`eval.dataset` is not set" in errors) == (2, True), errors


def test_packed_documents_are_evaluated_alike_on_any_number_of_ranks(
    tmp_path: Path, tiny_jobs: Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    generator = np.random.default_rng(2)
    with webdataset.TarWriter(str(tmp_path / "texts" / "0.tar")) as writer:
        for index in range(WINDOWS):
            text = generator.integers(32, 127, 99).astype(np.uint8).tobytes()
            writer.write({"__key__": f"{index:04}", "txt": text})
    config = tmp_path / "train.toml"
    tokenize = {"name": "tokenize", "field": "txt", "tokenizer": "bytes", "end": 256}
    pack = {"field": "tokens", "length": 9, "overlong": "split"}
    options = {"fields": ["txt"], "transforms": [tokenize], "pack": pack}
    data = {"dataset": str(tmp_path / "texts"), "format": "webdataset"}
    config.write_text(
        tiny_run(
            tmp_path,
            data={**data, "options": options},
            model={**TINY_GPT, "vocab_size": 257},
            eval={"dataset": str(tmp_path / "texts")},
        )
    )
    status, errors = tiny_jobs.ran("run", str(config))
    assert status == 0, errors
    losses = []
    for num_ranks in (1, 3):  # in global batches of 4 and of 6 samples
        capfd.readouterr()
        job = tiny_jobs.start("eval", str(config), f"--nproc={num_ranks}", "--json")
        assert job.wait(DEADLINE_S) == 0, job.errors(DEADLINE_S)
        losses.append(json.loads(capfd.readouterr().out)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=FLOAT64)
