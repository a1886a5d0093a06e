"""Train with accelerate on one rank or several, stop inside an epoch, and resume.

`Accelerator.prepare` takes a DataLoader over a Loader. Each rank reads its own part of every batch,
and the accelerator's checkpoints hold the place in the data.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from gyre_client import Loader
from torch.utils.data import DataLoader

BATCH_SIZE, LENGTH, VOCABULARY = 16, 9, 100
# the two steps after the checkpoint are lost, and taken again
NUM_EPOCHS, SAVE_AT, STOP_AT = (3, 8, 10)


def main() -> None:
    """Train until the stop, then from the checkpoint to the end."""
    parser = argparse.ArgumentParser(description="Train with accelerate, stop, and resume.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo/accelerate"))
    workdir = parser.parse_args().workdir
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        workdir.mkdir(parents=True, exist_ok=True)
        np.random.default_rng(0).integers(0, VOCABULARY, 100 * LENGTH).astype(np.uint16).tofile(
            workdir / "tokens.bin"
        )
    accelerator.wait_for_everyone()
    before = train(accelerator, workdir, STOP_AT)
    after = train(accelerator, workdir, resumed=True)
    consumed = before[:SAVE_AT] + after
    (workdir / f"rank-{accelerator.process_index}.json").write_text(json.dumps(consumed))
    print(
        f"rank {accelerator.process_index}: stopped after {len(before)} steps, then took "
        f"{len(after)} more",
        flush=True,
    )
    accelerator.end_training()


def train(
    accelerator: Accelerator, workdir: Path, stop_at: int = 0, *, resumed: bool = False
) -> list[list[int]]:
    """Returns the sample ids of each step that this rank took."""
    options = {"sequence_length": LENGTH, "dtype": "uint16"}
    with Loader(
        workdir / "tokens.bin", batch_size=BATCH_SIZE, tail="drop", format="tokens", options=options
    ) as loader:
        model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = accelerator.prepare(
            model, optimizer, DataLoader(loader, batch_size=None)
        )
        if resumed:
            accelerator.load_state(str(workdir / "checkpoint"))
        seen = []
        for _ in range(loader.epoch, NUM_EPOCHS):
            for batch in batches:
                tokens = batch["tokens"].long()
                loss = torch.nn.functional.cross_entropy(
                    model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
                )
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(batch["sample_id"].tolist())
                if loader.step == SAVE_AT:
                    accelerator.save_state(str(workdir / "checkpoint"))
                if loader.step == stop_at:
                    accelerator.free_memory()
                    return seen
        accelerator.free_memory()
        return seen


if __name__ == "__main__":
    main()
