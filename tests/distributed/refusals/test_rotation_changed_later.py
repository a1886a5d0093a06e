"""Parameters that are replaced, or frozen on some ranks alone, after rotating: refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import rotate_all
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import told

X = torch.ones(2, 6)


def rotated(replicate: int = 1, *, frozen: str = "") -> nn.Sequential:
    """A model that has taken one step, with a frozen part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4))
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
