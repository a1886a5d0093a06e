"""Parameters that are replaced after rotating, or differ among ranks: refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import materialize, rotate_all
from gyre_trainer.shards.layout import local_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import told

X = torch.ones(2, 6)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4))


def rotated(replicate: int = 1, *, frozen: str = "") -> nn.Sequential:
    """A model that has taken one step, with a frozen part."""
    model = made()
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    rotate_all(model, mesh=make_mesh("cpu", replicate=replicate))
    model(X).sum().backward()
    model.zero_grad()
    return model


def assigned(model: nn.Module) -> None:
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        model(X)


def called_with_others(model: nn.Module) -> None:
    with torch.no_grad():
        functional_call(model, {n: p.detach() * 2 for n, p in model.named_parameters()}, (X,))


def replaced(name: str) -> Callable[[nn.Module], None]:
    def call(model: nn.Module) -> None:
        path, _, last = name.rpartition(".")
        old = model.get_parameter(name)
        setattr(model.get_submodule(path), last, nn.Parameter(old.detach()))
        model(X).sum().backward()

    return call


def told_of(what: str, replicate: int) -> str:
    ways: dict[str, Callable[[nn.Module], None]] = {
        "assigned": assigned,
        "called with others": called_with_others,
    }
    way = ways.get(what) or replaced(what)
    model = rotated(replicate)
    return told(lambda: way(model))


@pytest.mark.parametrize("what", ["assigned", "called with others", "1.weight", "2.weight"])
@pytest.mark.parametrize(("num_ranks", "replicate"), [(3, 1), (4, 2)])
def test_parameters_that_are_replaced_are_refused(
    ranks: StartRanks, what: str, num_ranks: int, replicate: int
) -> None:
    for text in ranks(num_ranks).run(told_of, what, replicate):
        if what in ("assigned", "called with others"):
            assert "parameter weight is no longer in its rotated slice" in text
        else:
            assert f"{what} is another parameter than the model was rotated with" in text


def told_where_ranks_freeze_others(kind: str) -> str:
    """What a step ends in where rank 0 trains other parameters than the rest."""
    is_first = dist.get_rank() == 0
    if kind == "norm":
        model: Any = rotated(frozen="1")
        (model[1].weight if is_first else model[1]).requires_grad_()
    else:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("rotate",))
        rotate_all(model, mesh=mesh)
        model(X).sum().backward()
        model[0 if is_first else 2].requires_grad_(False)
    text = told(lambda: model(X).square().sum().backward())
    dist.barrier()  # a rank that ends at once could be missed before the difference is seen
    return text


@pytest.mark.parametrize("kind", ["norm", "layer"])
def test_ranks_that_train_other_parameters_are_told(ranks: StartRanks, kind: str) -> None:
    for text in ranks(3).run_to_the_end(told_where_ranks_freeze_others, kind):
        assert "reeze and unfreeze the same" in text
        if kind == "norm":
            assert "a parameter of shape (8,)" in text
            assert "trains on 2 of 3 ranks" in text
        else:
            assert "trains other parameters of RotatedSequential (backward, gradients" in text


def trained_with_a_norm_of_its_own(replicate: int) -> tuple[str, bool]:
    """What rank 0's change of a norm ends in, and whether equal values train afterwards."""
    mesh = make_mesh("cpu", replicate=replicate)
    changed = made()
    rotate_all(changed, mesh=mesh)
    if dist.get_rank() == 0:
        norm = changed.get_parameter("1.weight")
        local_of(norm).detach().add_(1e-3)
    with torch.no_grad():
        changed(X)  # an evaluation of other values is no mistake
    text = told(lambda: changed(X))
    equal = made()
    rotate_all(equal, mesh=mesh)
    equal(X).sum().backward()
    return text, equal.get_parameter("1.weight").grad is not None


@pytest.mark.parametrize(("num_ranks", "replicate"), [(2, 1), (3, 1), (4, 2)])
def test_replicated_values_that_differ_are_refused_before_the_first_step(
    ranks: StartRanks, num_ranks: int, replicate: int
) -> None:
    for text, trains in ranks(num_ranks).run(trained_with_a_norm_of_its_own, replicate):
        assert text.startswith("1.weight of ")
        assert "other values on one rank than on another" in text
        assert "sync_from=0" in text
        assert trains


def materialized_by_rank() -> str:
    with torch.device("meta"):
        model = made()
    rotate_all(model, mesh=make_mesh("cpu"))
    text = told(lambda: materialize(model, seed=2**63 + dist.get_rank()))
    materialize(model, seed=2**63)
    model(X).sum().backward()
    return text


def test_seeds_that_differ_are_refused(ranks: StartRanks) -> None:
    for rank, text in enumerate(ranks(2).run(materialized_by_rank)):
        assert f"materialize got the seed {2**63 + rank} on rank {rank}" in text
        assert "Pass the same seed on all ranks" in text
