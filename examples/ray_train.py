"""Train with Ray Train on two workers, stop inside an epoch, and resume.

An actor keeps one daemon for the workers of a node.

    python examples/ray_train.py
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from gyre_client.integrations.ray import GyreDataIterator
from ray.train.torch import TorchTrainer

BATCH_SIZE, LENGTH, NUM_WORKERS = 16, 9, 2
NUM_STEPS, STOP_AT = 18, 8


def train(config: dict[str, Any]) -> None:
    """Reads to a step, from the checkpoint on; reports a checkpoint."""
    data = GyreDataIterator(
        config["tokens"],
        batch_size=BATCH_SIZE,
        tail="drop",
        format="tokens",
        options={"sequence_length": LENGTH, "dtype": "uint16"},
    )
    if config["checkpoint"]:
        with ray.train.Checkpoint(config["checkpoint"]).as_directory() as folder:
            data.load_state_dict(torch.load(Path(folder, "data.pt"), weights_only=True))
    seen: list[list[int]] = []
    while data.loader.step < config["num_steps"]:
        for batch in data.iter_torch_batches():
            seen.append(batch["sample_id"].tolist())
            if data.loader.step == config["num_steps"]:
                break
    rank = ray.train.get_context().get_world_rank()
    with Path(config["workdir"], f"steps-{rank}.jsonl").open("a") as file:
        file.writelines(json.dumps(step) + "\n" for step in seen)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(data.state_dict(), Path(folder, "data.pt"))
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def fit(workdir: Path, name: str, num_steps: int, checkpoint: str) -> str:
    """Returns the path of the checkpoint that the workers reported."""
    config = {
        "workdir": str(workdir),
        "tokens": str(workdir / "tokens.bin"),
        "num_steps": num_steps,
        "checkpoint": checkpoint,
    }
    result = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=NUM_WORKERS),
        run_config=ray.train.RunConfig(name=name, storage_path=str(workdir / "storage")),
    ).fit()
    assert result.checkpoint
    return str(result.checkpoint.path)


def main() -> None:
    """Train until the stop, then from the checkpoint to the end."""
    parser = argparse.ArgumentParser(description="Train with Ray Train, stop, and resume.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo/ray"))
    workdir = parser.parse_args().workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    for rank in range(NUM_WORKERS):
        (workdir / f"steps-{rank}.jsonl").unlink(missing_ok=True)
    np.arange(100 * LENGTH, dtype=np.uint16).tofile(workdir / "tokens.bin")
    ray.init(include_dashboard=False)
    saved = fit(workdir, "first", STOP_AT, "")
    fit(workdir, "second", NUM_STEPS, saved)
    for rank in range(NUM_WORKERS):
        steps = (workdir / f"steps-{rank}.jsonl").read_text().splitlines()
        (workdir / f"rank-{rank}.json").write_text(json.dumps([*map(json.loads, steps)]))
    print(f"stopped after {STOP_AT} steps, then took {NUM_STEPS - STOP_AT} more")
    ray.shutdown()


if __name__ == "__main__":
    main()
