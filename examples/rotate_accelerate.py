"""Train a rotated model with accelerate: accumulation, clipping, a schedule, saving, resuming.

With `--shard fsdp2` the same loop trains a model that FSDP2 shards, with the same losses.

    torchrun --nproc-per-node 2 examples/rotate_accelerate.py
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from gyre_trainer.frameworks.accelerate import prepare
from gyre_trainer.rotate import make_mesh, rotate_all
from torch import nn
from torch.distributed.fsdp import fully_shard

VOCABULARY, LENGTH, BATCH_SIZE = 50, 8, 8
NUM_STEPS, SAVE_AT, NUM_PARTS = 6, 3, 2


def main() -> None:
    """Train to the end, then once more from the checkpoint."""
    parser = argparse.ArgumentParser(description="Train a rotated model with accelerate.")
    parser.add_argument("--shard", nargs="+", choices=("rotation", "fsdp2"), default=["rotation"])
    parser.add_argument("--workdir", type=Path, default=Path(".demo/rotate_accelerate"))
    args = parser.parse_args()
    for shard in args.shard:
        checkpoint = str(args.workdir / shard / "checkpoint")
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_PARTS)
        losses = train(accelerator, shard, 0, checkpoint)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_PARTS)
        resumed = train(accelerator, shard, SAVE_AT, checkpoint)
        if accelerator.is_main_process:
            print(f"{shard}: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
            (args.workdir / f"{shard}.json").write_text(json.dumps([losses, resumed]))
    accelerator.end_training()


def train(accelerator: Accelerator, shard: str, first: int, checkpoint: str) -> list[float]:
    """Returns the mean loss over all ranks of each step from ``first`` on."""
    torch.manual_seed(first)  # other weights, which the checkpoint replaces
    model: nn.Module = nn.Sequential(
        nn.Embedding(VOCABULARY, 16), nn.LayerNorm(16), nn.Linear(16, VOCABULARY)
    )
    if shard == "rotation":
        rotate_all(model, mesh=make_mesh(accelerator.device.type))
    else:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, prepared = prepare(accelerator, model, optimizer)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    if first:
        accelerator.load_state(checkpoint)
    losses = []
    for step in range(first, NUM_STEPS):
        total = torch.zeros(())
        for part in range(NUM_PARTS):
            generator = torch.Generator().manual_seed(step * NUM_PARTS + part)
            batch = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH), generator=generator)
            tokens = batch.chunk(accelerator.num_processes)[accelerator.process_index]
            with accelerator.accumulate(model):
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                prepared.step()
                schedule.step()
                prepared.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean") / NUM_PARTS
        losses.append(total.item())
        if step + 1 == SAVE_AT and not first:
            accelerator.save_state(checkpoint)
    return losses


if __name__ == "__main__":
    main()
