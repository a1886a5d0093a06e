"""Trains a linear model on `numbers`, records each rank's steps, and goes on from its checkpoint.

`recorded_training.py FOLDER [NODES:STEP ...]`: on so many nodes, the first rank stays before the
step until it is killed.
"""

import json
import os
import socket
import struct
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed
from gyre_client import Loader

NUM_STEPS = 24
SAVE_EVERY = 4
BATCH_SIZE = 12
SAMPLE_LENGTH = 4096


def main(folder: Path, stays: dict[str, int]) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    weights, step, state = torch.zeros(8, dtype=torch.float64), 0, None
    checkpoint = folder / "last.pt"
    if checkpoint.exists():
        weights, step, state = torch.load(checkpoint).values()
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    record = (folder / f"steps-{num_nodes}-{rank}").open("a", buffering=1)
    with record, Loader("numbers", batch_size=BATCH_SIZE, seed=3) as loader:
        if state:
            loader.load_state_dict(state)
        batches = loader.stream()
        while step < NUM_STEPS:
            tokens = next(batches)["tokens"]
            values = tokens[:, :8].double() / 2**21
            errors = values @ weights - 1
            sums = torch.cat([2 * values.T @ errors, (errors**2).sum()[None]])
            while rank == 0 and step == stays.get(num_nodes):
                time.sleep(0.1)
            if world_size > 1:
                torch.distributed.all_reduce(sums)
            weights -= 0.1 * sums[:-1] / BATCH_SIZE
            samples = [[row[0].item() // SAMPLE_LENGTH, zlib.crc32(row.numpy())] for row in tokens]
            facts = {"step": step, "rank": rank, "world_size": world_size, "samples": samples}
            facts["loss"] = sums[-1].item() / BATCH_SIZE
            record.write(json.dumps(facts | memory_groups()) + "\n")
            step += 1
            if rank == 0 and step % SAVE_EVERY == 0:
                saved = {"weights": weights, "step": step, "loader": loader.state_dict()}
                torch.save(saved, folder / "new.pt")
                (folder / "new.pt").rename(checkpoint)


def memory_groups() -> dict[str, str | int]:
    """The control groups of the daemon and of this process, and the shared memory of the latter."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["GYRE_ADDRESS"].removeprefix("unix:"))
        asked = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    own, daemon = memory_group(os.getpid()), memory_group(struct.unpack("3i", asked)[0])
    counts = Path(f"/sys/fs/cgroup/memory{own}/memory.stat")
    lines = counts.read_text().splitlines() if counts.exists() else []
    shared = next((int(line.split()[1]) for line in lines if line.startswith("total_shmem ")), 0)
    return {"daemon_group": daemon, "own_group": own, "shared_bytes": shared}


def memory_group(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next((line.split(":")[2] for line in lines if ":memory:" in line), "")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]), {n: int(step) for n, step in (each.split(":") for each in sys.argv[2:])}
    )
