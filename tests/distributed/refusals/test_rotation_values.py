"""Ranks whose replicated parameters, or seeds, differ: refused before the first step."""

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import materialize, rotate_all
from gyre_trainer.shards.layout import local_of
from torch import nn

from tests.distributed.conftest import StartRanks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4))


def trained_with_a_norm_of_its_own(replicate: int) -> tuple[str, bool]:
    """What rank 0's change of a norm ends in, and whether equal values train afterwards."""
    mesh = make_mesh("cpu", replicate=replicate)
    changed = model()
    rotate_all(changed, mesh=mesh)
    if dist.get_rank() == 0:
        norm = changed.get_parameter("1.weight")
        local_of(norm).detach().add_(1e-3)
    with torch.no_grad():
        changed(torch.ones(2, 6))  # an evaluation of other values is no mistake
    with pytest.raises(RotationError) as refusal:
        changed(torch.ones(2, 6))
    equal = model()
    rotate_all(equal, mesh=mesh)
    equal(torch.ones(2, 6)).sum().backward()
    return str(refusal.value), equal.get_parameter("1.weight").grad is not None


@pytest.mark.parametrize(("num_ranks", "replicate"), [(2, 1), (3, 1), (4, 2)])
def test_replicated_values_that_differ_are_refused_before_the_first_step(
    ranks: StartRanks, num_ranks: int, replicate: int
) -> None:
    for told, trains in ranks(num_ranks).run(trained_with_a_norm_of_its_own, replicate):
        assert told.startswith("1.weight of ")
        assert "other values on one rank than on another" in told
        assert "sync_from=0" in told
        assert trains


def materialized_by_rank() -> str:
    with torch.device("meta"):
        made = model()
    rotate_all(made, mesh=make_mesh("cpu"))
    with pytest.raises(RotationError) as refusal:
        materialize(made, seed=2**63 + dist.get_rank())
    materialize(made, seed=2**63)
    made(torch.ones(2, 6)).sum().backward()
    return str(refusal.value)


def test_seeds_that_differ_are_refused(ranks: StartRanks) -> None:
    for rank, told in enumerate(ranks(2).run(materialized_by_rank)):
        assert f"materialize got the seed {2**63 + rank} on rank {rank}" in told
        assert "Pass the same seed on all ranks" in told
