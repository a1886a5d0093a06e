"""Ranks that call different modules of bundles: exact where nothing is mixed up, else refused."""

from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.shared_memory import transport
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.conftest import StartRanks
from tests.distributed.gloo_ranks import HOP_TIMEOUT_S
from tests.distributed.training import whole

BUNDLED = RotationPolicy(bundle_numel=9 * 2**15)  # the default
WIDE = 450  # two such layers do not fit into one bundle


def pair(width: int) -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(width, width).double() for name in ("one", "other")})


def rotated(width: int, mesh: DeviceMesh | None = None) -> Any:
    model = pair(width)
    rotate_all(model, mesh=mesh or make_mesh("cpu"), policy=BUNDLED)
    assert (model["one"].bundle is model["other"].bundle) == (width < WIDE)
    return model


def calls_of(rank: int) -> tuple[str, str]:
    """The order in which a rank calls both layers."""
    return ("other", "one") if rank == 0 else ("one", "other")


def mine(width: int, rank: int) -> Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(rank)).double()


def evaluated(width: int) -> float:
    """How far the output of one layer, each rank's own, is from the plain layer's."""
    plain, model, rank = pair(width), rotated(width), dist.get_rank()
    name, x = calls_of(rank)[0], mine(width, rank)
    with torch.no_grad():
        return float((model[name](x) - plain[name](x)).abs().max())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_may_evaluate_different_modules_of_one_bundle(
    ranks: StartRanks, num_ranks: int
) -> None:
    assert max(ranks(num_ranks).run(evaluated, 6)) <= 1e-12


def trained_in_other_orders() -> float:
    """How far gradients are from the mean over the ranks, each with its own order of calls."""
    plain, model = pair(6), rotated(6)
    for each, ranks in ((model, [dist.get_rank()]), (plain, range(dist.get_world_size()))):
        for rank in ranks:
            x = mine(6, rank)
            for name in calls_of(rank):
                x = each[name](x).sin()
            loss: Any = x.mean() / len(ranks)
            loss.backward()
    return max(
        float((whole(p.grad) - plain.get_parameter(name).grad).abs().max())
        for name, p in model.named_parameters()
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_may_call_the_modules_of_one_bundle_in_other_orders(
    ranks: StartRanks, num_ranks: int
) -> None:
    assert max(ranks(num_ranks).run(trained_in_other_orders)) <= 1e-12


def told_of_one_bundle() -> tuple[str, str]:
    """What a backward ends in where ranks called different layers, and the next one."""
    model, rank = rotated(6), dist.get_rank()
    x, name = mine(6, rank), calls_of(rank)[0]
    with pytest.raises(RotationError) as refused:
        model[name](x).sum().backward()
    model["other"](model["one"](x)).sum().backward()
    return str(refused.value), str(all(p.grad is not None for p in model.parameters()))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_train_different_modules_of_one_bundle_are_told_which(
    ranks: StartRanks, num_ranks: int
) -> None:
    others = "rank 1" if num_ranks == 2 else "ranks 1, 2"
    for told, goes_on in ranks(num_ranks).run(told_of_one_bundle):
        assert told == (
            "the ranks have gradients of different parameters: rank 0: other.weight, other.bias; "
            f"{others}: one.weight, one.bias; "
            "all ranks must call the same modules, and use what they return"
        )
        assert goes_on == "True"  # no hop was mixed up, so the ring can be used


def told_of_two_bundles(reach: str, when: str) -> str:
    with ExitStack() as context:
        if reach == "group":
            context.enter_context(
                patch.object(transport, "connect_neighbours", lambda group, timeout: {})
            )
        mesh = DeviceMesh.from_group(
            dist.new_group(timeout=timedelta(seconds=HOP_TIMEOUT_S)),
            "cpu",
            mesh_dim_names=("rotate",),
        )
        model, rank = rotated(WIDE, mesh), dist.get_rank()
        x, text = mine(WIDE, rank), ""
        try:
            if when == "forward":
                model[calls_of(rank)[0]](x)
            else:
                outputs = {name: model[name](x) for name in ("one", "other")}
                outputs[calls_of(rank)[0]].sum().backward()
        except RotationError as error:
            text = str(error)
        dist.barrier()  # a rank that ends at once could be missed before the difference is seen
    return text


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize(("num_ranks", "reach"), [(2, "memory"), (3, "group")])
def test_ranks_that_call_modules_of_different_bundles_are_told_which(
    ranks: StartRanks, num_ranks: int, reach: str, when: str
) -> None:
    told = ranks(num_ranks).run_to_the_end(told_of_two_bundles, reach, when)
    part = "forward" if when == "forward" else "backward, gradients"
    for rank, message in enumerate(told):
        assert message.startswith(f"rank {rank}: "), message
        for name in ("one", "other"):
            assert f"in a bundle of {name}" in message
        assert f"{part}, step 1 of round 0" in message
        assert "all ranks must call the same modules in the same order" in message
    if when == "forward":
        # the rank that finds out knows which of its own modules it calls
        assert "calls other (forward" in told[0] or "calls one (forward" in told[0]
    assert len({message.partition(": ")[2].partition(": ")[2] for message in told}) == 1
