"""Replicas of rings: exact, averaged when backward ends, and never of different weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import materialize, rotate, rotate_all
from gyre_trainer.shards.layout import local_of
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import told
from tests.distributed.steps.test_rotation_checkpoint import VARIANTS, train_between
from tests.distributed.training import (
    GATED_GROUPED,
    UNEVEN,
    Variant,
    batch,
    build,
    distance,
    train_alone,
    train_rotated,
    whole,
)

CLIPPED = Variant(UNEVEN, max_norm=0.1)
ACCUMULATED = Variant(GATED_GROUPED, num_parts=2, frozen=("blocks.0.mlp",))


@pytest.mark.parametrize("variant", [CLIPPED, ACCUMULATED])
@pytest.mark.parametrize("num_steps", [10, pytest.param(20, marks=pytest.mark.models)])
def test_two_rings_train_as_one_process(
    ranks: StartRanks, variant: Variant, num_steps: int
) -> None:
    alone = train_alone(variant, num_steps=num_steps)
    for found in ranks(4).run(train_rotated, variant, num_steps, 2):
        assert found.losses == pytest.approx(alone.losses, rel=1e-12)
        assert distance(found.parameters, alone.parameters) <= 1e-12


@pytest.mark.parametrize("name", VARIANTS)
def test_checkpoints_of_two_rings_load_at_any_number_of_ranks(
    ranks: StartRanks, tmp_path: Path, name: str
) -> None:
    variant = VARIANTS[name]
    ranks(4).run(train_between, variant, 0, 3, None, tmp_path / "checkpoint", 2)
    alone = train_alone(variant, num_steps=6).parameters
    for num_ranks, replicate in ((1, 1), (2, 1), (4, 1), (4, 2), (2, 2)):
        for found in ranks(num_ranks).run(
            train_between, variant, 3, 6, tmp_path / "checkpoint", None, replicate
        ):
            assert distance(found, alone) <= 1e-12


def gradients_of_layers_of_their_own() -> list[Tensor]:
    mesh = make_mesh("cpu", replicate=2)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    model = nn.ModuleList(layers)
    rotate_all(model, mesh=mesh)
    layers[mesh.get_local_rank("replicate")](torch.ones(2, 4)).sum().backward()
    return [whole(each.weight.grad) for each in layers if each.weight.grad is not None]


def test_replicas_that_train_different_modules_average_zeros(ranks: StartRanks) -> None:
    """Each layer has a gradient of 2 on one of two rings."""
    for one, other in ranks(4).run(gradients_of_layers_of_their_own):
        assert torch.equal(one, torch.ones(4, 4))
        assert torch.equal(other, torch.ones(4, 4))


def shards_of_their_own() -> None:
    mesh = make_mesh("cpu", replicate=2)
    with torch.device("meta"):
        model = build(UNEVEN)
    rotate_all(model, mesh=mesh)
    materialize(model, seed=0)
    with torch.no_grad():
        local_of(model.embedding.weight).add_(mesh.get_local_rank("replicate"))
    model.loss(*batch(0, UNEVEN.vocab_size)).backward()  # type: ignore[no-untyped-call]


def norms_of_their_own() -> None:
    mesh = make_mesh("cpu", replicate=2)
    norm = nn.LayerNorm(4)
    model = nn.Sequential(norm)
    rotate_all(model, mesh=mesh)
    with torch.no_grad():
        local_of(norm.weight).fill_(mesh.get_local_rank("replicate"))
    model(torch.ones(2, 4))


def values_of_their_own() -> None:
    mesh = make_mesh("cpu", replicate=2)
    torch.manual_seed(mesh.get_local_rank("replicate"))
    rotate_all(nn.Sequential(nn.Linear(4, 4)), mesh=mesh)


def shards_that_nothing_averages() -> None:
    torch.manual_seed(0)
    layer = rotate(nn.Linear(4, 4), mesh=make_mesh("cpu", replicate=2))
    layer(torch.ones(2, 4))


def layer_of_a_model_that_is_gone() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    rotate_all(nn.ModuleList([layer]), mesh=make_mesh("cpu", replicate=2))
    layer(torch.ones(2, 4))


def frozen_on_one_replica() -> None:
    mesh = make_mesh("cpu", replicate=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rotate_all(model, mesh=mesh)
    model[0].requires_grad_(mesh.get_local_rank("replicate") == 0)
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (shards_of_their_own, ["embedding", "one replica", "seed"]),
        (norms_of_their_own, ["0.weight of Sequential", "one rank"]),
        (values_of_their_own, ["0.weight has values of digest", "rank 2", "sync_from=0"]),
        (shards_that_nothing_averages, ["replicas", "rotate the model around it"]),
        (layer_of_a_model_that_is_gone, ["model is gone", "averages"]),
        (frozen_on_one_replica, ["trains on 2 of 4 ranks", "requires_grad_"]),
    ],
)
def test_replicas_never_differ_in_silence(
    ranks: StartRanks, program: Any, words: list[str]
) -> None:
    for found in ranks(4).run(told, program):
        assert all(word in found for word in words), found
