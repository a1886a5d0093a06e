"""Rings over parts of the ranks: an error where they train one model, unless that is meant."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import rotate, rotate_all
from gyre_trainer.shards.local_shards import local_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.conftest import StartRanks

WAIT_S = 60.0
NOTHING = "nothing was refused"


def own_mesh() -> DeviceMesh:
    """A ring of ranks 0 and 1, and one of ranks 2 and 3: each rank has its own."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "rotate"))
    return DeviceMesh.from_group(both["rotate"].get_group(), "cpu")


def layers(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4), nn.LayerNorm(4))


def step(model: nn.Module, width: int) -> None:
    model(torch.ones(2, width)).square().sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


@contextmanager
def refused(words: list[str]) -> Iterator[None]:
    """Collect the words of an error."""
    try:
        yield
    except RotationError as error:
        words.append(str(error))


def steps_until_refused(model: nn.Module, width: int) -> str:
    """The words of the error that a step ends in."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    deadline_s = time.monotonic() + WAIT_S
    words: list[str] = []
    with refused(words):
        while time.monotonic() < deadline_s:
            model(torch.ones(2, width)).square().sum().backward()
            optimizer.step()
            time.sleep(0.01)
    return (*words, NOTHING)[0]


def together() -> str:
    model = layers(5)
    rotate_all(model, mesh=own_mesh())
    return steps_until_refused(model, 5)


def one_after_the_other() -> tuple[str, bool]:
    """The words of the error, and whether the later ring changed a value."""
    mesh, model = own_mesh(), layers(6)
    rotate_all(model, mesh=mesh)
    first = 0 in mesh.mesh.tolist()
    before = [local_of(each).detach().clone() for each in model.parameters()]
    if first:
        step(model, 6)
    dist.barrier()
    words = steps_until_refused(model, 6)
    changed = any(
        not torch.equal(one, local_of(other))
        for one, other in zip(before, model.parameters(), strict=True)
    )
    return words, changed


def by_hand() -> str:
    mesh, model = own_mesh(), nn.Sequential(nn.Linear(7, 4), nn.LayerNorm(4))
    rotate(model[0], mesh=mesh, sync_from=0)
    rotate(model, mesh=mesh, sync_from=0)
    return steps_until_refused(model, 7)


def of_one_rank() -> str:
    of_each = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "rotate"))
    model = layers(8)
    rotate_all(model, mesh=DeviceMesh.from_group(of_each["rotate"].get_group(), "cpu"))
    return steps_until_refused(model, 8)


@pytest.mark.parametrize("program", [together, by_hand, of_one_rank])
def test_rings_that_train_one_model_are_refused(
    ranks: StartRanks, program: Callable[[], str]
) -> None:
    for words in ranks(4).run(program):
        assert "train the same Sequential" in words, words
        assert "make_mesh(device_type, replicate=" in words
        assert "independent=True" in words


def test_the_earlier_ring_hears_of_the_later_one(ranks: StartRanks) -> None:
    outcomes = ranks(4).run(one_after_the_other)
    assert [changed for _, changed in outcomes] == [True, True, False, False]
    for words, _ in outcomes:
        assert "ranks 0, 1" in words, words
        assert "ranks 2, 3" in words


def apart_on_purpose() -> str:
    model = layers(9)
    rotate_all(model, mesh=own_mesh(), independent=True)
    return after_some_steps(model, 9)


def of_other_shapes() -> str:
    mesh = own_mesh()
    width = 11 if 0 in mesh.mesh.tolist() else 12
    model = layers(width)
    rotate_all(model, mesh=mesh)
    return after_some_steps(model, width)


def after_some_steps(model: nn.Module, width: int) -> str:
    words: list[str] = []
    with refused(words):
        for _ in range(10):
            step(model, width)
    dist.barrier()
    return (*words, NOTHING)[0]


@pytest.mark.parametrize("program", [apart_on_purpose, of_other_shapes])
def test_rings_that_are_meant_to_be_apart_train(
    ranks: StartRanks, program: Callable[[], str]
) -> None:
    assert ranks(4).run(program) == [NOTHING] * 4


def evaluated_beside() -> str:
    mesh, model = own_mesh(), layers(10)
    rotate_all(model, mesh=mesh)
    if 0 in mesh.mesh.tolist():
        return after_some_steps(model, 10)
    for _ in range(10):
        model(torch.ones(2, 10))
    dist.barrier()
    return NOTHING


def test_a_ring_that_evaluates_is_no_replica(ranks: StartRanks) -> None:
    assert ranks(4).run(evaluated_beside) == [NOTHING] * 4
