"""Rotated training equals one process's at every number of ranks, and sends the fewest bytes."""

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from gyre_trainer.rotation.rotation import RotationPolicy
from gyre_trainer.training.models.gpt import GPTConfig

from tests.distributed.conftest import StartRanks
from tests.distributed.training import (
    EVEN,
    NUM_STEPS,
    Outcome,
    Variant,
    build,
    distance,
    train_alone,
    train_rotated,
)

GATED_GROUPED = replace(EVEN, dim=48, num_heads=24, num_kv_heads=12, gated_mlp=True)
UNEVEN = replace(EVEN, vocab_size=37, hidden_dim=50, bias=True, norm="layer")

VARIANTS = {
    "plain": Variant(EVEN),
    "clipped, accumulated": Variant(EVEN, max_norm=0.05, num_parts=2),
    "tied, uneven": Variant(replace(UNEVEN, tie_embeddings=True), max_norm=0.05),
    "grouped heads, gated": Variant(GATED_GROUPED),
    "uneven, with biases and LayerNorm": Variant(UNEVEN),
    "recomputed, partly frozen": Variant(
        UNEVEN,
        RotationPolicy(recompute=True),
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


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "policy", [RotationPolicy(), RotationPolicy(recompute=True)], ids=["kept", "recomputed"]
)
def test_bytes_sent_are_the_minimum(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy
) -> None:
    """A rank sends 3 (N-1)/N of the rotated parameters, and 2 (N-1)/N of the embedding.

    The embedding's backward needs no weights.
    """
    rotated = sum(p.numel() for name, p in build(EVEN).named_parameters() if "norm" not in name)
    embedding = EVEN.vocab_size * EVEN.dim
    expected = 8 * (3 * rotated - embedding) * (num_ranks - 1) // num_ranks
    for outcome in ranks(num_ranks).run(train_rotated, Variant(EVEN, policy), 3):
        assert outcome.bytes_sent == [expected] * 3


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_bytes_sent_of_uneven_slices(ranks: StartRanks, num_ranks: int) -> None:
    """Rank r sends all slices but r+1's forward, and all but r-1's backward.

    It sends all gradients but that of its own slice.
    """
    outcomes: list[Outcome] = ranks(num_ranks).run(train_rotated, Variant(UNEVEN), 2)
    sizes = [_slice_numels(UNEVEN, index, num_ranks) for index in range(num_ranks)]
    for rank, outcome in enumerate(outcomes):
        after, before = sizes[(rank + 1) % num_ranks], sizes[rank - 1]
        forward = sum(sum(each.values()) for each in sizes) - sum(after.values())
        backward = sum(sum(each.values()) - each["embedding"] for each in sizes) - (
            sum(before.values()) - before["embedding"]
        )
        gradients = sum(sum(each.values()) for each in sizes) - sum(sizes[rank].values())
        assert outcome.bytes_sent == [8 * (forward + backward + gradients)] * 2


def _slice_numels(config: GPTConfig, index: int, num_ranks: int) -> dict[str, int]:
    """Elements of one slice of the embedding, and of one slice of all other rotated modules."""
    numels = {"embedding": 0, "rest": 0}
    for name, parameter in build(config).named_parameters():
        if "norm" in name:
            continue
        columns = name.endswith((".o.weight", ".down.weight"))
        parts = parameter.chunk(num_ranks, dim=1 if columns else 0)
        numels["embedding" if name.startswith("embedding") else "rest"] += prod(parts[index].shape)
    return numels


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bfloat16_travels_and_stays_close(ranks: StartRanks, num_ranks: int) -> None:
    exact = Variant(GATED_GROUPED, dtype=torch.float32)
    rounded = replace(exact, policy=RotationPolicy(compute_dtype=torch.bfloat16))
    alone = train_alone(exact)
    plain, half = (ranks(num_ranks).run(train_rotated, variant)[0] for variant in (exact, rounded))
    assert half.losses == pytest.approx(alone.losses, rel=2e-2)
    assert half.losses != plain.losses
    assert all(parameter.dtype == torch.float32 for parameter in half.parameters.values())
    assert len(half.losses) == NUM_STEPS
    weights = plain.bytes_sent[0] - _gradient_bytes(plain, num_ranks)
    assert half.bytes_sent[0] == weights // 2 + _gradient_bytes(plain, num_ranks)


def test_gradients_travel_in_the_dtype_of_the_policy(ranks: StartRanks) -> None:
    exact = Variant(EVEN, dtype=torch.float32)
    rounded = replace(exact, policy=RotationPolicy(torch.bfloat16, torch.bfloat16))
    plain, half = (ranks(2).run(train_rotated, variant)[0] for variant in (exact, rounded))
    assert half.bytes_sent[0] * 2 == plain.bytes_sent[0]
    assert half.losses == pytest.approx(plain.losses, rel=2e-2)


def _gradient_bytes(outcome: Outcome, num_ranks: int) -> int:
    rotated = sum(p.numel() for name, p in outcome.parameters.items() if "norm" not in name)
    return 4 * rotated * (num_ranks - 1) // num_ranks
