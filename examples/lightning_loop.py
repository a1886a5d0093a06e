"""Train with Lightning on one rank or several, stop inside an epoch, and resume.

Lightning saves and loads the state of the training data by itself, with each checkpoint.

    python examples/lightning_loop.py
    torchrun --nproc-per-node 2 examples/lightning_loop.py
"""

import argparse
import json
import os
from pathlib import Path

import lightning
import numpy as np
import torch
from gyre_client.integrations.lightning import GyreDataModule
from lightning.pytorch.callbacks import ModelCheckpoint

BATCH_SIZE, LENGTH, VOCABULARY = 16, 9, 100
# the two steps after the checkpoint are lost, and taken again
NUM_EPOCHS, SAVE_AT, STOP_AT = (3, 8, 10)


class Model(lightning.LightningModule):
    """Guesses the next token from the present one; records the samples that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)
        )
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        self.seen.append(batch["sample_id"].tolist())
        return self.loss(batch)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Checks that each validation reads the same."""
        rank_size = BATCH_SIZE // self.trainer.world_size
        first = batch_idx * BATCH_SIZE + self.global_rank * rank_size
        assert batch["sample_id"].tolist() == list(range(first, first + rank_size))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the mean over all tokens."""
        tokens = batch["tokens"].long()
        return torch.nn.functional.cross_entropy(
            self.layers(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train until the stop, then from the checkpoint to the end."""
    parser = argparse.ArgumentParser(description="Train with Lightning, stop, and resume.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo/lightning"))
    workdir = parser.parse_args().workdir
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        np.random.default_rng(0).integers(0, VOCABULARY, 100 * LENGTH).astype(np.uint16).tofile(
            workdir / "tokens.bin"
        )
    before = train(workdir, max_steps=STOP_AT)
    after = train(workdir, resumed=True)
    (workdir / f"rank-{rank}.json").write_text(json.dumps(before[:SAVE_AT] + after))
    print(
        f"rank {rank}: stopped after {len(before)} steps, then took {len(after)} more", flush=True
    )


def train(workdir: Path, max_steps: int = -1, *, resumed: bool = False) -> list[list[int]]:
    """Returns the sample ids of each step that this rank took."""
    model = Model()
    tokens = {"dataset": workdir / "tokens.bin"}
    data = GyreDataModule(
        train=tokens,
        val={**tokens, "tail": "drop"},  # Model.validation_step takes whole batches
        batch_size=BATCH_SIZE,
        format="tokens",
        options={"sequence_length": LENGTH, "dtype": "uint16"},
    )
    checkpoints = ModelCheckpoint(workdir, "{step}", every_n_train_steps=SAVE_AT, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=NUM_EPOCHS,
        max_steps=max_steps,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = str(workdir / f"step={SAVE_AT}.ckpt") if resumed else None
    trainer.fit(model, data, ckpt_path=checkpoint)
    return model.seen


if __name__ == "__main__":
    main()
