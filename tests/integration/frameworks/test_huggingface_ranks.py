"""Hugging Face's Trainer with a Loader, resumed on another number of ranks."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gyre_client import Loader
from torch import Tensor

from tests.conftest import StartDaemon
from tests.distributed.conftest import StartRanks
from tests.distributed.models.test_rotation_trainer import torchrun

BATCH_SIZE, NUM_BATCHES, LENGTH = 8, 5, 4
SAVE_AT, NUM_STEPS = 6, 12  # inside the second and the third epoch


class Model(torch.nn.Module):
    """Learns one number; records the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.samples: list[list[int]] = []

    def forward(self, tokens: Tensor, sample_id: Tensor) -> dict[str, Tensor]:
        self.samples.append(sample_id.tolist())
        return {"loss": (tokens.double() * 1e-2 - self.weight).square().mean()}


class Part(NamedTuple):
    """What a rank has of a run.

    Attributes:
        samples: the ids of each step's samples on the rank.
        losses: as they are logged, one a step; those before a resume, too.
        weight: after the last step.
        total: the samples of a step as the Trainer counts them.
    """

    samples: list[list[int]]
    losses: list[float]
    weight: float
    total: int


@pytest.fixture
def corpus(gyred: StartDaemon, tmp_path: Path) -> str:
    """The address of a daemon that has an epoch of `NUM_BATCHES` batches."""
    np.arange(NUM_BATCHES * BATCH_SIZE * LENGTH, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    table = {"uri": str(tmp_path / "tokens.bin"), "format": "tokens", "dtype": "uint16"}
    return gyred({"datasets": {"corpus": {**table, "sequence_length": LENGTH}}}).address


def trained(address: str, folder: Path, checkpoint: str | None) -> Part:
    """A rank's part of a run."""
    from gyre_client.integrations.huggingface import LoaderState
    from transformers import Trainer, TrainingArguments

    with torchrun():
        args = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH_SIZE // dist.get_world_size(),
            max_steps=NUM_STEPS,
            save_steps=SAVE_AT,
            logging_steps=1,
            lr_scheduler_type="linear",
            learning_rate=0.1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            optim="sgd",  # on CPUs, several ranks cannot load an optimizer with tensors
        )
        model = Model()
        with Loader("corpus", batch_size=BATCH_SIZE, tail="drop", address=address) as loader:
            trainer: Any = Trainer(model, args, train_dataset=loader, callbacks=[LoaderState()])
            trainer.train(resume_from_checkpoint=checkpoint)
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        total = trainer.get_total_train_batch_size(args)
        return Part(model.samples, losses, model.weight.item(), total)


def joined(parts: list[Part]) -> list[list[int]]:
    """The samples of each global batch."""
    by_step = zip(*(part.samples for part in parts), strict=True)
    return [list(itertools.chain(*samples)) for samples in by_step]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_resume_on_other_ranks_is_the_uninterrupted_run(
    before: int, after: int, corpus: str, ranks: StartRanks, tmp_path: Path
) -> None:
    with Loader("corpus", batch_size=BATCH_SIZE, tail="drop", address=corpus) as loader:
        batches = itertools.islice(loader.stream(), NUM_STEPS)
        planned = [batch["sample_id"].tolist() for batch in batches]
    whole = ranks(before).run(trained, corpus, tmp_path / "run", None)
    assert joined(whole) == planned
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVE_AT}"
    resumed = ranks(after).run(trained, corpus, tmp_path / "again", str(checkpoint))
    assert joined(resumed) == planned[SAVE_AT:]
    for part in resumed:
        assert part.losses == pytest.approx(whole[0].losses, abs=2e-4)  # rounded in logs
        assert part.weight == pytest.approx(whole[0].weight, rel=1e-9)
        assert part.total == BATCH_SIZE
