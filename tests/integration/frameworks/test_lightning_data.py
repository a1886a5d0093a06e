"""Lightning's trainer with a DataModule of Loaders, in one process; ranks are in the examples."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from gyre_client.integrations.lightning import GyreDataModule
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.batches import NUM_SAMPLES, SAMPLE_LENGTH

pytestmark = [
    pytest.mark.usefixtures("private_daemon"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice
]

BATCH_SIZE = 10
OPTIONS = {"sequence_length": SAMPLE_LENGTH, "dtype": "int16"}


class Model(lightning.LightningModule):
    """Records the samples that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained: list[list[int]] = []
        self.evaluated: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self.trained.append(batch["sample_id"].tolist())
        return self.weight.square()

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.evaluated += batch["sample_id"][batch["mask"]].tolist()

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, **arguments: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )


def data(tokens: Path, **stages: Any) -> GyreDataModule:
    return GyreDataModule(
        **stages, dataset=tokens, batch_size=BATCH_SIZE, format="tokens", options=OPTIONS
    )


def planned(tokens: Path, num_steps: int) -> list[list[int]]:
    arguments: dict[str, Any] = {"batch_size": BATCH_SIZE, "format": "tokens", "options": OPTIONS}
    with Loader(tokens, tail="drop", **arguments) as loader:
        return [next(loader)["sample_id"].tolist() for _ in range(num_steps)]


@pytest.mark.parametrize("saved_at", [1, 9, 10, 13])  # an epoch has ten steps
def test_a_checkpoint_resumes_at_its_step(
    numbers_file: Path, tmp_path: Path, saved_at: int
) -> None:
    first, second = Model(), Model()
    trainer(tmp_path, max_steps=saved_at).fit(first, data(numbers_file, train={}))
    trainer(tmp_path, max_epochs=2).fit(
        second, data(numbers_file, train={}), ckpt_path=str(tmp_path / f"step={saved_at}.ckpt")
    )
    assert first.trained + second.trained == planned(numbers_file, 20)


def test_evaluation_has_each_sample_once(numbers_file: Path, tmp_path: Path) -> None:
    """At each validation, in the middle of an epoch too, and in a test."""
    model, everything = Model(), list(range(NUM_SAMPLES))
    both = data(numbers_file, train={}, val={}, test={})
    trainer(tmp_path, max_steps=10, val_check_interval=5).fit(model, both)
    assert model.evaluated == everything * 2
    trainer(tmp_path).test(model, both)
    assert model.evaluated == everything * 3
    assert model.trained == planned(numbers_file, 10)


def test_loaders_that_are_asked_for_again_go_on(numbers_file: Path, tmp_path: Path) -> None:
    model = Model()
    reload = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
    trainer(tmp_path, **reload).fit(model, data(numbers_file, train={"seed": 0}))
    assert model.trained == planned(numbers_file, 30)


def test_training_without_a_length_is_refused(numbers_file: Path) -> None:
    """Lightning takes a batch ahead of its checkpoints then, and a resumed run would lack it."""
    with pytest.raises(InvalidRequest, match="loses a batch at each resume"):
        data(numbers_file, train={"epochs": None})
