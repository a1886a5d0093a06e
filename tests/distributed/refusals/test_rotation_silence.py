"""What would be wrong without an error: each is exact, refused, or warned of."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole


class Choosing(nn.Module):
    """Calls one of two norms, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, which: int) -> Tensor:
        output: Tensor = self.norms[which](self.layer(x))
        return output


def gradients_where_ranks_choose() -> list[Tensor | None]:
    torch.manual_seed(0)
    model = Choosing()
    rotate_all(model, mesh=make_mesh("cpu"))
    rank = dist.get_rank()
    model(torch.arange(8.0).view(2, 4) + rank, rank).square().sum().backward()
    return [None if p.grad is None else whole(p.grad).clone() for p in model.norms.parameters()]


def test_a_replicated_module_that_some_ranks_leave_out_has_the_mean(ranks: StartRanks) -> None:
    torch.manual_seed(0)
    plain = Choosing()
    for rank in range(2):
        loss = plain(torch.arange(8.0).view(2, 4) + rank, rank).square().sum() / 2
        loss.backward()
    for found in ranks(2).run(gradients_where_ranks_choose):
        for grad, parameter in zip(found, plain.norms.parameters(), strict=True):
            if parameter.grad is None:
                assert grad is None
            else:
                assert grad is not None
                torch.testing.assert_close(grad, parameter.grad)


class OnlyThere(nn.Module):
    """Calls a norm, its one replicated module, where that is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, normed: bool) -> Tensor:
        y: Tensor = self.layer(x)
        return self.norm(y) if normed else y


def adapted_where_one_rank_norms(min_numel: int) -> list[dict[str, Tensor]]:
    """Gradients of two steps in which the norm alone is trained; rank 0 leaves it out in one."""
    torch.manual_seed(0)
    model, rank = OnlyThere(), dist.get_rank()
    model.layer.requires_grad_(False)
    rotate_all(model, mesh=make_mesh("cpu"), min_numel=min_numel)
    found = []
    for step in range(2):
        normed = rank == 1 or step == 1
        other = torch.ones((), requires_grad=True)  # of a model that does not rotate
        loss = model(torch.arange(8.0).view(2, 4) + rank + step, normed).pow(3).sum() + other
        loss.backward()
        grads = {name: parameter.grad for name, parameter in model.norm.named_parameters()}
        found.append(
            {name: whole(grad).clone() for name, grad in grads.items() if grad is not None}
        )
        model.zero_grad()
    return found


@pytest.mark.parametrize("min_numel", [0, 1 << 20], ids=["a frozen layer rotates", "none rotates"])
def test_a_rank_whose_backward_reaches_nothing_that_trains_takes_part_in_the_mean(
    ranks: StartRanks, min_numel: int
) -> None:
    torch.manual_seed(0)
    plain = OnlyThere()
    plain.layer.requires_grad_(False)
    told = ranks(2).run(adapted_where_one_rank_norms, min_numel)
    for step in range(2):
        plain.zero_grad()
        for rank in range(step == 0, 2):
            (plain(torch.arange(8.0).view(2, 4) + rank + step, True).pow(3).sum() / 2).backward()
        for found in told:
            for name, parameter in plain.norm.named_parameters():
                torch.testing.assert_close(found[step][name], parameter.grad)


class Writing(MLP):
    """An MLP that adds its input to what it was called with before."""

    def forward(self, x: Tensor, before: Any = None) -> Tensor:
        if isinstance(before, dict):
            before["x"] = x
        elif isinstance(before, list) and before:
            before.append(x)
        return super().forward(x)


def told_of_containers() -> list[str]:
    model = nn.ModuleDict({"mlp": Writing(4, 8)})
    rotate_all(model, mesh=make_mesh("cpu"), rules={"mlp": MLPRule()})
    found: list[str] = []
    given: list[Any] = [[], (torch.ones(1), 2), {}, [torch.ones(1)]]
    for before in given:
        try:
            model["mlp"](torch.ones(1, 4), before)
        except RotationError as error:
            found.append(str(error))
        else:
            found.append(str(len(before)))
    return found


def test_containers_that_slices_write_to_are_refused(ranks: StartRanks) -> None:
    for empty, fixed, mapping, several in ranks(2).run(told_of_containers):
        assert (empty, fixed) == ("0", "2")
        assert "Writing writes to a dict that it is called with" in mapping
        assert "Writing writes to a list that it is called with" in several
        assert "the writes of a slice would be lost" in several


class Scaled(nn.Module):
    scale: Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) * self.scale
        return output


def told_of_buffers(differ: bool) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(1.0 + differ * dist.get_rank()), nn.LayerNorm(4))
    rotate_all(model, mesh=make_mesh("cpu"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()
    return [str(each.message) for each in told]


@pytest.mark.parametrize("differ", [False, True])
def test_buffers_that_differ_are_warned_of_once(ranks: StartRanks, differ: bool) -> None:
    for told in ranks(2).run(told_of_buffers, differ):
        assert len(told) == differ
        assert all("0.scale of Sequential, a buffer, has other values" in each for each in told)
