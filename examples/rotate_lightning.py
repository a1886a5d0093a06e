"""Train a rotated model with Lightning, stop, and resume from its checkpoint.

Lightning's own strategy for models of DTensors takes it: rotate in `configure_model`. With
`--shard fsdp2` the same module trains with FSDP2, with the same losses.

    torchrun --nproc-per-node 2 examples/rotate_lightning.py
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from gyre_trainer.rotate import make_mesh, rotate_all
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

VOCABULARY, NUM_STEPS, SAVE_AT = 50, 6, 3


class Model(lightning.LightningModule):
    """Guesses the next token from the present one; records its losses."""

    def __init__(self, shard: str) -> None:
        super().__init__()
        self.shard = shard
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Makes the layers and shards them; the ranks know of each other here."""
        self.layers = nn.Sequential(
            nn.Embedding(VOCABULARY, 16), nn.LayerNorm(16), nn.Linear(16, VOCABULARY)
        )
        if self.shard == "rotation":
            rotate_all(self.layers, mesh=make_mesh(self.device.type))
        else:
            fully_shard(self.layers)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """Returns the loss of this rank's rows."""
        logits = self.layers(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self.losses.append(float(mean))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    """Train to the end, then once more from the checkpoint."""
    parser = argparse.ArgumentParser(description="Train a rotated model with Lightning.")
    parser.add_argument("--shard", nargs="+", choices=("rotation", "fsdp2"), default=["rotation"])
    parser.add_argument("--workdir", type=Path, default=Path(".demo/rotate_lightning"))
    args = parser.parse_args()
    for shard in args.shard:
        folder = args.workdir / shard
        losses = train(shard, folder, seed=0)
        resumed = train(shard, folder, seed=1, checkpoint=f"step={SAVE_AT}.ckpt")
        if os.environ.get("RANK", "0") == "0":
            (args.workdir / f"{shard}.json").write_text(json.dumps([losses, resumed]))


def train(shard: str, workdir: Path, seed: int, checkpoint: str | None = None) -> list[float]:
    """Returns the loss of each micro-batch."""
    torch.manual_seed(seed)
    num_ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (2 * NUM_STEPS, 8, 8), generator=generator)
    # a Loader of Gyre finds its place by itself: see lightning_loop.py
    left = rows[2 * SAVE_AT :] if checkpoint else rows
    model = Model(shard)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=ModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1),
        max_steps=NUM_STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(workdir, "{step}", every_n_train_steps=SAVE_AT, save_top_k=-1)],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches: Any = DataLoader(left[:, rank::num_ranks], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(model, batches, ckpt_path=None if checkpoint is None else str(workdir / checkpoint))
    return model.losses


if __name__ == "__main__":
    main()
