"""Rings over a part of the ranks: refused, unless they are to train apart."""

import pytest
import torch
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import rotate, rotate_all
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.conftest import StartRanks


def own_mesh() -> DeviceMesh:
    """A ring of this rank alone."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "rotate"))["rotate"]


def refused_and_trained() -> list[str]:
    """What both functions tell; they train where it is meant."""
    mesh, model, words = own_mesh(), nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)), []
    for call in (rotate, rotate_all):
        with pytest.raises(RotationError) as refusal:
            call(model, mesh=mesh)
        words.append(str(refusal.value))
    rotate_all(model, mesh=mesh, independent=True)
    model(torch.ones(2, 5)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return words


def test_a_mesh_of_a_part_of_the_ranks_is_refused(ranks: StartRanks) -> None:
    for words in ranks(2).run(refused_and_trained):
        for told in words:
            assert told.startswith("the mesh has 1 of 2 ranks")
            assert "make_mesh(device_type, replicate=2)" in told
            assert "independent=True" in told
