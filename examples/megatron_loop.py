"""Read as Megatron-Core's schedules do, stop inside an epoch, and resume with other sizes.

torchrun --nproc-per-node 2 examples/megatron_loop.py
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from gyre_client.integrations.megatron import data_iterator
from megatron.core import parallel_state

BATCH_SIZE, LENGTH, NUM_STEPS, STOP_AT = 16, 8, 18, 8


def main() -> None:
    """Read with two tensor-parallel ranks until the stop, then with two data-parallel ones."""
    parser = argparse.ArgumentParser(description="Read as Megatron-Core does, stop, and resume.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo/megatron"))
    workdir = parser.parse_args().workdir
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        np.arange(100 * (LENGTH + 1), dtype=np.uint16).tofile(workdir / "tokens.bin")
    dist.barrier()
    whole = read(workdir, STOP_AT, tensor_parallel_size=2)
    parts = read(workdir, NUM_STEPS - STOP_AT, tensor_parallel_size=1, resumed=True)
    own = slice(dist.get_rank() * BATCH_SIZE // 2, (dist.get_rank() + 1) * BATCH_SIZE // 2)
    (workdir / f"rank-{dist.get_rank()}.json").write_text(
        json.dumps([step[own] for step in whole] + parts)
    )
    print(f"stopped after {len(whole)} steps, then took {len(parts)} more", flush=True)
    dist.destroy_process_group()


def read(
    workdir: Path, num_steps: int, *, tensor_parallel_size: int, resumed: bool = False
) -> list[list[int]]:
    """Returns the sample ids of each step."""
    parallel_state.initialize_model_parallel(tensor_parallel_size)
    num_parts = 2  # micro-batches of a step
    data = data_iterator(
        str(workdir / "tokens.bin"),
        global_batch_size=BATCH_SIZE,
        micro_batch_size=BATCH_SIZE // parallel_state.get_data_parallel_world_size() // num_parts,
        seq_length=LENGTH,
        tail="drop",
        format="tokens",
        options={"sequence_length": LENGTH + 1, "dtype": "uint16"},
    )
    assert data is not None  # there are no pipeline stages between the first and the last
    if resumed:
        data.load_state_dict(torch.load(workdir / "data.pt", weights_only=True))
    seen = []
    for _ in range(num_steps):
        step = torch.cat([next(data)["tokens"][:, 0] for _ in range(num_parts)])
        seen.append((step // (LENGTH + 1)).tolist())
    if dist.get_rank() == 0 and not resumed:
        torch.save(data.state_dict(), workdir / "data.pt")
    dist.barrier()
    data.close()
    parallel_state.destroy_model_parallel()
    return seen


if __name__ == "__main__":
    main()
