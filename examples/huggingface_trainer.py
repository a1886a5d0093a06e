"""Train with Hugging Face's Trainer on one rank or several, stop inside an epoch, and resume.

The Loader is the `train_dataset`. `LoaderState` keeps its place in the Trainer's checkpoints.

    python examples/huggingface_trainer.py
    torchrun --nproc-per-node 2 examples/huggingface_trainer.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gyre_client import Loader
from gyre_client.integrations.huggingface import LoaderState
from transformers import Trainer, TrainingArguments

BATCH_SIZE, LENGTH, VOCABULARY = 16, 9, 100
# the two steps after the checkpoint are lost, and taken again
NUM_EPOCHS, SAVE_AT, STOP_AT = (3, 8, 10)


class Model(torch.nn.Module):
    """Guesses the next token from the present one; records the samples that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)
        )
        self.seen: list[list[int]] = []

    def forward(self, tokens: torch.Tensor, sample_id: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the loss; the arguments are fields of a batch."""
        tokens = tokens.long()
        if self.training:
            self.seen.append(sample_id.tolist())
        logits = self.layers(tokens[:, :-1])
        return {
            "loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        }


def main() -> None:
    """Train until the stop, then from the checkpoint to the end."""
    parser = argparse.ArgumentParser(
        description="Train with Hugging Face's Trainer, stop, and resume."
    )
    parser.add_argument("--workdir", type=Path, default=Path(".demo/huggingface"))
    workdir = parser.parse_args().workdir
    before = train(workdir, max_steps=STOP_AT)
    after = train(workdir, resumed=True)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (workdir / f"rank-{rank}.json").write_text(json.dumps(before[:SAVE_AT] + after))
    print(
        f"rank {rank}: stopped after {len(before)} steps, then took {len(after)} more", flush=True
    )


def train(workdir: Path, max_steps: int = -1, *, resumed: bool = False) -> list[list[int]]:
    """Returns the sample ids of each step that this rank took."""
    args = TrainingArguments(
        output_dir=str(workdir / "run"),
        per_device_train_batch_size=1,
        num_train_epochs=NUM_EPOCHS,
        max_steps=max_steps,
        save_steps=SAVE_AT,
        eval_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        # on CPUs, several ranks of a Trainer cannot load an optimizer with tensors
        optim="sgd",
    )
    # each rank's part of a batch
    args.per_device_train_batch_size = BATCH_SIZE // args.world_size
    args.per_device_eval_batch_size = BATCH_SIZE // args.world_size
    with args.main_process_first():
        tokens = workdir / "tokens.bin"
        if not tokens.exists():
            workdir.mkdir(parents=True, exist_ok=True)
            np.random.default_rng(0).integers(0, VOCABULARY, 100 * LENGTH).astype(np.uint16).tofile(
                tokens
            )
    model = Model()
    data: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "format": "tokens",
        "options": {"sequence_length": LENGTH, "dtype": "uint16"},
    }
    with (
        Loader(tokens, tail="drop", **data) as loader,
        Loader(tokens, order="sequential", restart=True, **data) as validation,
    ):
        trainer = Trainer(
            model, args, train_dataset=loader, eval_dataset=validation, callbacks=[LoaderState()]
        )
        trainer.train(
            resume_from_checkpoint=str(workdir / f"run/checkpoint-{SAVE_AT}") if resumed else None
        )
    return model.seen


if __name__ == "__main__":
    main()
