"""Resident memory as the kernel counts it: a cross-check of the live bytes that tensors account for."""

from pathlib import Path

import torch
import torch.distributed as dist
from gyre_trainer.mesh import make_mesh

from benchmarks.rtp.contenders import Contender, build
from benchmarks.rtp.workloads import Workload, make_batch, make_optimizer


def resident_peak_of_step(contender: Contender, workload: Workload, num_batches: int) -> int:
    """Most bytes resident in the second step, less what was resident before the model was built."""
    device = torch.device("cpu")
    make_batch(workload, num_batches, device)
    dist.barrier()
    before = _status("VmRSS")
    model = build(contender, workload, make_mesh("cpu"), device, fake=False)
    optimizer = make_optimizer(workload, model)
    batch = make_batch(workload, num_batches, device)
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
