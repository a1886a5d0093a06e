"""The epochs that Hugging Face's Trainer logs for a Loader, whole and resumed."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from gyre_client.integrations.huggingface import LoaderState
from torch import Tensor
from transformers import Trainer, TrainingArguments

from tests.batches import NUM_SAMPLES, SAMPLE_LENGTH

pytestmark = pytest.mark.usefixtures("private_daemon")

BATCH_SIZE = 6
NUM_BATCHES = NUM_SAMPLES // BATCH_SIZE


class Model(torch.nn.Module):
    """Learns one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"loss": (tokens.float() * 1e-3 - self.weight).square().mean()}


def logged(folder: Path, tokens: Path, accumulated: int, **arguments: Any) -> dict[int, float]:
    """The epoch after each step of a run that saves checkpoints, those before resuming too."""
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=accumulated,
        num_train_epochs=2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    checkpoint = arguments.pop("resume", None)
    vars(args).update(arguments)
    options = {"sequence_length": SAMPLE_LENGTH, "dtype": "int16"}
    with Loader(tokens, batch_size=BATCH_SIZE, format="tokens", options=options, tail="drop") as it:
        trainer = Trainer(Model(), args, train_dataset=it, callbacks=[LoaderState()])
        trainer.train(resume_from_checkpoint=checkpoint)
    return {each["step"]: each["epoch"] for each in trainer.state.log_history if "loss" in each}


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_resumed_run_logs_the_epochs_of_a_whole_one(
    numbers_file: Path, tmp_path: Path, accumulated: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = logged(tmp_path / "whole", numbers_file, accumulated)
    assert NUM_BATCHES % accumulated == 0
    assert len(whole) == 2 * NUM_BATCHES // accumulated > 6
    assert max(whole.values()) == 2.0
    run = tmp_path / "run"
    logged(run, numbers_file, accumulated, max_steps=2)
    with caplog.at_level(logging.WARNING):
        resumed = logged(run, numbers_file, accumulated, resume=str(run / "checkpoint-2"))
    assert resumed == pytest.approx(whole)
    assert "does not divide" not in caplog.text


def test_steps_that_a_resumed_run_lacks_are_told(
    numbers_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged(tmp_path, numbers_file, 3, max_steps=2)
    logged(tmp_path, numbers_file, 3, max_steps=3, resume=str(tmp_path / "checkpoint-2"))
    assert NUM_BATCHES % 3
    assert f"{NUM_BATCHES} batches, which gradient_accumulation_steps=3 does not" in caplog.text


def test_a_wrong_batch_size_is_refused_on_a_resume_too(numbers_file: Path, tmp_path: Path) -> None:
    """The checkpoint has the right one; the Trainer would take that in place of the argument."""
    wrong = {"per_device_train_batch_size": BATCH_SIZE // 2}
    with pytest.raises(InvalidRequest, match=f"per_device_train_batch_size={BATCH_SIZE} "):
        logged(tmp_path, numbers_file, 1, **wrong)
    logged(tmp_path, numbers_file, 1, max_steps=2)
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(InvalidRequest, match=f"a batch size of {BATCH_SIZE // 2} is asked for"):
        logged(tmp_path, numbers_file, 1, **wrong, resume=checkpoint)
