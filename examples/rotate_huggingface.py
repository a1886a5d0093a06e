"""Train a rotated model with Hugging Face's Trainer, stop, and resume from its checkpoint.

With `--shard fsdp2` the same Trainer trains a model that FSDP2 shards, with the same losses.

    torchrun --nproc-per-node 2 examples/rotate_huggingface.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gyre_trainer.frameworks.huggingface import ShardedTrainer
from gyre_trainer.rotate import make_mesh, rotate_all
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

NUM_STEPS, SAVE_AT = 6, 3
CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    use_cache=False,
)


class Trainer(ShardedTrainer):
    """Records the mean loss over all ranks of each micro-batch."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns this rank's loss."""
        loss = super().training_step(*args, **kwargs)
        mean = self.accelerator.reduce(loss.detach().clone(), "mean")
        self.losses.append(mean.item())
        return loss


def main() -> None:
    """Train to the end, then once more from the checkpoint."""
    parser = argparse.ArgumentParser(description="Train a rotated model with the Trainer.")
    parser.add_argument("--shard", nargs="+", choices=("rotation", "fsdp2"), default=["rotation"])
    parser.add_argument("--workdir", type=Path, default=Path(".demo/rotate_huggingface"))
    options = parser.parse_args()
    for shard in options.shard:
        args = TrainingArguments(
            output_dir=str(options.workdir / shard),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=0.01,
            max_steps=NUM_STEPS,
            save_steps=SAVE_AT,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        losses = train(args, shard, seed=0)
        checkpoint = f"{args.output_dir}/checkpoint-{SAVE_AT}"
        resumed = train(args, shard, seed=1, checkpoint=checkpoint)
        if args.process_index == 0:
            (options.workdir / f"{shard}.json").write_text(json.dumps([losses, resumed]))


def train(
    args: TrainingArguments, shard: str, seed: int, checkpoint: str | None = None
) -> list[float]:
    """Returns the loss of each micro-batch, those of a resumed run from its checkpoint on."""
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(CONFIG)
    if shard == "rotation":
        rotate_all(model, mesh=make_mesh(args.device.type))
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    rows = torch.randint(50, (64, 8), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, args, train_dataset=dataset)
    trainer.losses = []
    trainer.train(resume_from_checkpoint=checkpoint)
    losses: list[float] = trainer.losses
    return losses


if __name__ == "__main__":
    main()
