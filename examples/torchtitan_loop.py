"""Read as torchtitan's Trainer does, stop inside an epoch, and resume from its checkpoint.

In a run of torchtitan, only `GyreDataLoader.Config(...)` goes into the run's configuration: see
docs/integrations/torchtitan.md. Here a loop without a model shows what that loader gives.

    python examples/torchtitan_loop.py
    torchrun --nproc-per-node 2 examples/torchtitan_loop.py
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gyre_client.integrations.torchtitan import GyreDataLoader
from torchtitan.components.checkpoint import CheckpointManager

BATCH_SIZE, LENGTH, NUM_STEPS = 16, 8, 18
# the two steps after the checkpoint are lost, and taken again
SAVE_AT, STOP_AT = 8, 10


class Trainer:
    """The steps of torchtitan's Trainer with data: build a loader, save its state, load it."""

    def __init__(self, workdir: Path) -> None:
        """Builds the loader and the checkpoints by torchtitan's own means."""
        options = {"sequence_length": LENGTH + 1, "dtype": "uint16"}  # inputs and one target more
        data = GyreDataLoader.Config(
            dataset=str(workdir / "tokens.bin"),
            global_batch_size=BATCH_SIZE,
            loader={"tail": "drop", "format": "tokens", "options": options},
        )
        num_ranks = dist.get_world_size()
        self.num_parts = 2  # micro-batches of a step
        self.step = 0
        self.dataloader = data.build(
            dp_world_size=num_ranks,
            dp_rank=dist.get_rank(),
            tokenizer=None,
            seq_len=LENGTH,
            local_batch_size=BATCH_SIZE // num_ranks // self.num_parts,
        )
        self.model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(self.model.parameters())
        self.checkpointer = CheckpointManager.Config(
            enable=True, interval=SAVE_AT, keep_latest_k=0
        ).build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=optimizer,
            lr_schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(workdir),
        )

    def train(self, num_steps: int) -> list[list[int]]:
        """Returns the first token of each row of each step, from the newest checkpoint on."""
        self.checkpointer.load(step=-1)
        batches = iter(self.dataloader)
        seen = []
        while self.step < num_steps:
            self.step += 1
            parts = [next(batches) for _ in range(self.num_parts)]
            for inputs, labels in parts:
                assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
            seen.append(torch.cat([inputs["input"] for inputs, _ in parts])[:, 0].tolist())
            self.checkpointer.save(self.step)
        self.checkpointer.close()
        return seen

    def state_dict(self) -> dict[str, Any]:
        """Returns the step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at a step."""
        self.step = state["step"]


def main() -> None:
    """Train until the stop, then from the checkpoint to the end."""
    parser = argparse.ArgumentParser(description="Read as torchtitan does, stop, and resume.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo/torchtitan"))
    workdir = parser.parse_args().workdir
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        np.arange(100 * (LENGTH + 1), dtype=np.uint16).tofile(workdir / "tokens.bin")
    dist.barrier()
    before = Trainer(workdir).train(STOP_AT)
    after = Trainer(workdir).train(NUM_STEPS)
    seen = [[first // (LENGTH + 1) for first in step] for step in before[:SAVE_AT] + after]
    (workdir / f"rank-{dist.get_rank()}.json").write_text(json.dumps(seen))
    print(f"stopped after {len(before)} steps, then took {len(after)} more", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
