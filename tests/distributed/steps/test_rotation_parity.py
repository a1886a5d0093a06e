"""Rotated training equals one process's at every number of ranks."""

from dataclasses import replace
from functools import cache

import pytest
from gyre_trainer.rotation.rule import RotationPolicy

from tests.distributed.conftest import StartRanks
from tests.distributed.training import (
    EVEN,
    GATED_GROUPED,
    UNEVEN,
    Outcome,
    Variant,
    distance,
    train_alone,
    train_rotated,
)

VARIANTS = {
    "plain": Variant(EVEN),
    "clipped, accumulated": Variant(EVEN, max_norm=0.05, num_parts=2),
    "tied, uneven": Variant(replace(UNEVEN, tie_embeddings=True), max_norm=0.05),
    "grouped heads, gated": Variant(GATED_GROUPED),
    "uneven, with biases and LayerNorm": Variant(UNEVEN),
    "recomputed, partly frozen": Variant(
        UNEVEN,
        RotationPolicy(recompute="block"),
        frozen=("embedding", "blocks.0.mlp", "blocks.1.attention.q", "blocks.1.mlp_norm"),
    ),
}


# On four ranks, one variant stands for all in `make test`: the one whose slices are the least even.
DEEP = pytest.mark.models
AT_FOUR = "tied, uneven"
CASES = [
    pytest.param(name, num_ranks, marks=() if num_ranks < 4 or name == AT_FOUR else DEEP)
    for name in VARIANTS
    for num_ranks in (1, 2, 3, 4)
]


@cache
def alone_under(name: str) -> Outcome:
    return train_alone(VARIANTS[name])


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_losses_and_parameters_equal_one_process(
    ranks: StartRanks, name: str, num_ranks: int
) -> None:
    alone = alone_under(name)
    for outcome in ranks(num_ranks).run(train_rotated, VARIANTS[name]):
        assert outcome.losses == pytest.approx(alone.losses, rel=1e-12, abs=0)
        assert distance(outcome.parameters, alone.parameters) <= 1e-12
    assert distance(alone.parameters, train_alone(VARIANTS[name], num_steps=0).parameters) > 1e-3
