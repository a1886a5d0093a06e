"""Ranks that call different modules are told so at once; unused experts take part all the same."""

from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RingError, RotationError
from gyre_trainer.rotate import ReadRule, rotate_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import told


class Reads(nn.Linear):
    """Reads its weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return x @ self.weight


class Pair(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        # each of 3 ranks has a shard
        self.one, self.other = nn.Linear(4, 6), nn.Linear(4, num_features)
        self.reads_one, self.reads_other = Reads(4, 4), Reads(4, 4)


def told_when_ranks_differ(num_features: int, works: str, when: str) -> str:
    torch.manual_seed(0)
    joins = works == "one work a batch"
    with patch.object(dist, "batch_isend_irecv", _as_one_work) if joins else nullcontext():
        mesh = DeviceMesh.from_group(
            dist.new_group(timeout=timedelta(seconds=60)), "cpu", mesh_dim_names=("rotate",)
        )
        pair = Pair(num_features)
        rotate_all(pair, mesh=mesh, rules={Reads: ReadRule()})
        text = told(lambda: _call(pair, when))
        dist.barrier()  # a rank that ends at once could be missed before the difference is seen
    return text


class _Joint:
    """One work for a whole batch, which is what NCCL returns."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


_BATCH = dist.batch_isend_irecv


def _as_one_work(operations: list[dist.P2POp]) -> list[_Joint]:
    return [_Joint(_BATCH(operations))]


def _call(pair: Pair, when: str) -> None:
    x, is_first = torch.ones(2, 4), dist.get_rank() == 0
    if when == "forward":
        (pair.other if is_first else pair.one)(x)
    elif when == "read":
        (pair.reads_other if is_first else pair.reads_one)(x)
    else:
        outputs = pair.one(x), pair.other(x)
        outputs[is_first].sum().backward()


@pytest.mark.parametrize("when", ["forward", "backward", "read"])
@pytest.mark.parametrize(
    ("num_ranks", "num_features", "works"),
    [
        (2, 6, "one work a tensor"),
        (3, 6, "one work a tensor"),
        (3, 6, "one work a batch"),
        (2, 15, "one work a tensor"),
        (3, 15, "one work a tensor"),
    ],
)
def test_ranks_that_call_different_modules_are_told_which(
    ranks: StartRanks, num_ranks: int, num_features: int, works: str, when: str
) -> None:
    texts = ranks(num_ranks).run_to_the_end(told_when_ranks_differ, num_features, works, when)
    kind, when = ("reads_", "forward") if when == "read" else ("", when)
    step = f"({when}, step "  # 1, or 2 where two hops are under way
    others = [f"rank {rank} calls {kind}one {step}" for rank in range(1, num_ranks)]
    for rank, message in enumerate(texts):
        assert message.startswith(f"rank {rank}: "), message
        assert f"rank 0 calls {kind}other {step}" in message
        assert any(other in message for other in others), message
        assert "weights" in message or "gradients" in message
    assert len({message.partition(": ")[2].partition(": ")[2] for message in texts}) == 1


def hops_of_few_rows() -> int:
    layer, mesh = nn.Linear(4, 2), make_mesh("cpu")  # two of four ranks have no row
    rotate_all(layer, mesh=mesh, sync_from=0, min_numel=0)
    layer(torch.ones(2, 4)).sum().backward()
    return ring_of(mesh).hang_diagnosis._hop[0]


def test_ranks_count_hops_alike_where_slices_are_empty(ranks: StartRanks) -> None:
    assert len(set(ranks(4).run(hops_of_few_rows))) == 1


def evaluated_on_the_first_rank() -> str:
    text = ""
    mesh = DeviceMesh.from_group(
        dist.new_group(timeout=timedelta(seconds=10)), "cpu", mesh_dim_names=("rotate",)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    rotate_all(model, mesh=mesh, min_numel=0)
    model(torch.ones(2, 4)).sum().backward()
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
    except (RotationError, RingError) as error:
        text = str(error)
    dist.barrier()
    return text


def test_an_evaluation_on_one_rank_alone_names_the_command(ranks: StartRanks) -> None:
    for message in ranks(2).run_to_the_end(evaluated_on_the_first_rank):
        assert "call the model on all ranks, or use gyre-train eval" in message, message
