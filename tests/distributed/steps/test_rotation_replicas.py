"""Replicas of rings: exact, averaged while backward goes on, and never of different weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import materialize, rotate, rotate_all
from gyre_trainer.shards.layout import local_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.conftest import StartRanks
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


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes all-reduces, and gradients that leave for the next rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func.name())
        if name in ("c10d::allreduce_", "gyre::send"):
            self.seen.append(name)
        return func(*args, **kwargs or {})


def order_in_backward() -> list[str]:
    mesh = make_mesh("cpu", replicate=2)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    rotate_all(model, mesh=mesh)
    for _ in range(2):
        loss = model(torch.ones(2, 4)).sum()
        operators = _Operators()
        with operators:
            loss.backward()
    return operators.seen


def test_a_modules_average_starts_before_the_next_modules_backward(ranks: StartRanks) -> None:
    hop, average = "gyre::send", "c10d::allreduce_"
    for seen in ranks(4).run(order_in_backward):
        first = seen.index(average)
        assert hop in seen[first:]
        # one for each module, and one at the end that compares the order of the others
        assert seen.count(average) == 3 + 1


def refusal(program: Any) -> str:
    try:
        program()
    except RotationError as error:
        return str(error)
    return "nothing was refused"


def shards_of_their_own() -> None:
    mesh = make_mesh("cpu", replicate=2)
    with torch.device("meta"):
        model = build(UNEVEN)
    rotate_all(model, mesh=mesh)
    materialize(model, seed=0)
    with torch.no_grad():
        local_of(model.embedding.weight).add_(mesh.get_local_rank("replicate"))
    model.loss(*batch(0, UNEVEN.vocab_size))


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


def modules_of_their_own() -> None:
    mesh = make_mesh("cpu", replicate=2)
    torch.manual_seed(0)
    layers = [rotate(nn.Linear(4, 4), mesh=mesh) for _ in range(2)]
    for layer in layers:
        layer(torch.ones(2, 4))
    layers[mesh.get_local_rank("replicate")](torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (shards_of_their_own, ["embedding", "one replica", "seed"]),
        (norms_of_their_own, ["0.weight of Sequential", "one rank"]),
        (values_of_their_own, ["0.weight has values of digest", "rank 2", "sync_from=0"]),
        (modules_of_their_own, ["replicas", "did not train the same modules"]),
    ],
)
def test_replicas_never_differ_in_silence(
    ranks: StartRanks, program: Any, words: list[str]
) -> None:
    for found in ranks(4).run(refusal, program):
        assert all(word in found for word in words), found
