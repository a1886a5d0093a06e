"""A profiler sees each step of a rotation by its module, slice and hop."""

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import name_modules, rotate_all
from torch import nn
from torch.profiler import profile

from tests.distributed.conftest import StartRanks


def ranges() -> tuple[int, set[str]]:
    model = nn.Sequential(nn.Embedding(64, 4), nn.Linear(4, 6))
    rotate_all(model, mesh=make_mesh("cpu"), min_numel=0)
    name_modules(model)
    with profile() as profiler:
        model(torch.arange(3)).sum().backward()
    return dist.get_rank(), {event.key for event in profiler.key_averages()}


def test_ranges_name_the_module_the_slice_and_the_hop(ranks: StartRanks) -> None:
    for rank, names in ranks(2).run(ranges):
        for phase in ("forward", "backward"):
            assert f"1 {phase}: slice {rank}, hop 0" in names
            assert f"1 {phase}: slice {1 - rank}, hop 1" in names
        assert {"0 forward: fetching rows", "0 backward: sending gradients of rows"} <= names
        assert f"rank {rank}: receiving weights from rank {1 - rank}" in names
