"""Resident memory as the kernel counts it, as a cross-check of the live bytes."""

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from torch import Tensor, nn

from benchmarks.rtp.contenders import Contender, build
from benchmarks.rtp.workloads import Workload, make_batch, make_optimizer

_CPU = torch.device("cpu")
_PROC = Path("/proc/self")


class Resident(NamedTuple):
    """Resident memory in bytes.

    Attributes:
        proportional: a page of Gyre's buffers, which several processes map, counts in each of them
            with its share.
        all_pages: such a page counts in full in each process, once for every mapping.
    """

    proportional: int
    all_pages: int


def resident_peak_of_step(contender: Contender, workload: Workload, num_batches: int) -> Resident:
    """The peak of resident memory in the second step, less what was resident before the model.

    Before that, a model of one small block took as many steps and was dropped. So the subtracted
    part contains the interpreter, torch, and the modules and code that first steps load, however
    large the model is.

    The kernel has a high-water mark for all pages only. Gyre's buffers stay as they are after the
    first step, so the part that they count beyond their share is subtracted as it is at the end.
    Libraries count in full before and after.
    """
    small = replace(
        workload.model,
        num_layers=1,
        dim=4 * workload.model.num_heads,
        hidden_dim=64,
        vocab_size=64,
        max_seq_len=8,
    )
    _two_steps(contender, replace(workload, model=small), num_batches)
    gc.collect()
    make_batch(workload, num_batches, _CPU)
    dist.barrier()
    before = _status("VmRSS")
    kept = _two_steps(contender, workload, num_batches)
    dist.barrier()
    all_pages, shared = _status("VmHWM") - before, _shared()
    dist.barrier()  # of a process that ended there would be no share
    del kept
    return Resident(all_pages - shared, all_pages)


def _two_steps(
    contender: Contender, workload: Workload, num_batches: int
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = build(contender, workload, make_mesh("cpu"), _CPU, fake=False)
    optimizer = make_optimizer(workload, model)
    batch = make_batch(workload, num_batches, _CPU)
    for _ in range(2):
        (_PROC / "clear_refs").write_text("5")  # resets the high-water mark
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, batch


def _shared() -> int:
    """Bytes that pages of buffers count beyond their share."""
    mappings = re.split(r"^(?=[0-9a-f]+-)", (_PROC / "smaps").read_text(), flags=re.MULTILINE)
    buffers = [mapping for mapping in mappings if "/memfd:gyre" in mapping]
    return sum(_bytes(mapping, "Rss") - _bytes(mapping, "Pss") for mapping in buffers)


def _status(field: str) -> int:
    return _bytes((_PROC / "status").read_text(), field)


def _bytes(text: str, field: str) -> int:
    line = next(line for line in text.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
