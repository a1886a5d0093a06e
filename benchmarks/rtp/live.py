"""Live bytes at the peak of a step, on real ranks or on fake tensors."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from gyre_trainer.accounting.counters import Category, Counters
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers import head
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.rtp.contenders import Contender, How, build
from benchmarks.rtp.workloads import Workload, make_batch, make_optimizer

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """The cost of one step of a rank.

    Attributes:
        peak: bytes by category at the peak.
        sent: bytes that the rank sent.
    """

    peak: dict[str, int]
    sent: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


def fake_step(contender: Contender, workload: Workload, num_ranks: int) -> Step:
    """The second step of a rank, on fake tensors.

    For one process it is a step with the batch of all ranks, its bytes divided by their number.
    """
    alone = contender.how is How.ALONE
    # one process takes as many chunks, each N times as large
    chunk = head._MAX_LOGITS * (num_ranks if alone else 1)
    with (
        patch.object(head, "_MAX_LOGITS", chunk),
        nullcontext(None) if alone else _fake_ring(num_ranks) as mesh,
        FakeTensorMode(),
    ):
        step = measured_step(contender, workload, mesh, num_ranks if alone else 1, fake=True)
    return (
        Step({category: num_bytes // num_ranks for category, num_bytes in step.peak.items()}, 0)
        if alone
        else step
    )


def fake_steps(cases: Sequence[tuple[Contender, Workload, int]]) -> Iterator[Step]:
    """The steps of all cases, in their order; each runs on a core of its own."""
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    ) as pool:
        yield from pool.map(fake_step, *zip(*cases, strict=True))


def measured_step(
    contender: Contender,
    workload: Workload,
    mesh: DeviceMesh | None,
    num_batches: int,
    *,
    fake: bool,
) -> Step:
    """The cost of a second step; the first one makes the optimizer's states."""
    with Counters() as live:
        model = build(contender, workload, mesh, _CPU, fake=fake)
        live.label(Category.PARAMETERS, model.parameters())
        optimizer = make_optimizer(workload, model)
        batch = make_batch(workload, num_batches, _CPU)
        for _ in range(2):
            live.mark("step")
            sent_before = live.sent_bytes
            model(*batch).backward()
            live.label(Category.GRADIENTS, (parameter.grad for parameter in model.parameters()))
            with live.during(Category.OPTIMIZER):
                optimizer.step()
            optimizer.zero_grad()
        peak = live.timeline().since("step").peak()
        return Step(
            {str(category): num_bytes for category, num_bytes in peak.items()},
            # of real ranks, those of DDP's own C++ are not seen
            live.sent_bytes - sent_before if fake else 0,
        )


@contextmanager
def _fake_ring(num_ranks: int) -> Iterator[DeviceMesh]:
    """A context with a ring on which this process is rank 0 and the other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield make_mesh("cpu")
    finally:
        dist.destroy_process_group()
