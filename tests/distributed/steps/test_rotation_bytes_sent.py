"""Rotated training sends the fewest bytes, in the dtypes of the policy."""

from dataclasses import replace
from math import prod

import pytest
import torch
from gyre_trainer.rotation.rotation import RotationPolicy
from gyre_trainer.training.models.gpt import GPTConfig

from tests.distributed.conftest import StartRanks
from tests.distributed.training import (
    EVEN,
    GATED_GROUPED,
    NUM_STEPS,
    UNEVEN,
    Outcome,
    Variant,
    build,
    train_alone,
    train_rotated,
)


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
