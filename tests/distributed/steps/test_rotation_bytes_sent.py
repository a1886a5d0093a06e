"""Rotated training sends the fewest bytes, in the dtypes of the policy."""

from dataclasses import replace
from math import prod

import pytest
import torch
from gyre_trainer.rotation.rule import RotationPolicy
from gyre_trainer.training.gpt import GPTConfig

from tests.distributed.conftest import StartRanks
from tests.distributed.training import (
    EVEN,
    GATED_GROUPED,
    NUM_STEPS,
    UNEVEN,
    Outcome,
    Variant,
    batch,
    build,
    bytes_of_rows,
    train_alone,
    train_rotated,
)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "policy", [RotationPolicy(), RotationPolicy(recompute="block")], ids=["kept", "recomputed"]
)
def test_bytes_sent_are_the_minimum(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy
) -> None:
    """A rank sends 3 (N-1)/N of the rotated parameters, and of the embedding the tokens' rows."""
    rotated = sum(p.numel() for name, p in build(EVEN).named_parameters() if "norm" not in name)
    rotated -= EVEN.vocab_size * EVEN.dim
    expected = 8 * 3 * rotated * (num_ranks - 1) // num_ranks
    outcomes = ranks(num_ranks).run(train_rotated, Variant(EVEN, policy), 3)
    for rank, outcome in enumerate(outcomes):
        of_rows = [_bytes_of_embedding(EVEN, step, rank, num_ranks) for step in range(3)]
        assert outcome.bytes_sent == [expected + each for each in of_rows]
        ring = 8 * 2 * EVEN.vocab_size * EVEN.dim * (num_ranks - 1) // num_ranks
        assert all(each < ring for each in of_rows)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_bytes_sent_of_uneven_slices(ranks: StartRanks, num_ranks: int) -> None:
    """Rank r sends all slices but r+1's forward, and all but r-1's backward.

    It sends all gradients but that of its own slice.
    """
    outcomes: list[Outcome] = ranks(num_ranks).run(train_rotated, Variant(UNEVEN), 2)
    sizes = [_slice_numels(UNEVEN, index, num_ranks) for index in range(num_ranks)]
    for rank, outcome in enumerate(outcomes):
        others = sizes[(rank + 1) % num_ranks], sizes[rank - 1], sizes[rank]
        rotating = 3 * sum(sizes) - sum(others)
        of_rows = [_bytes_of_embedding(UNEVEN, step, rank, num_ranks) for step in range(2)]
        assert outcome.bytes_sent == [8 * rotating + each for each in of_rows]


def _bytes_of_embedding(
    config: GPTConfig, step: int, rank: int, num_ranks: int, *, weight: int = 8, grad: int = 8
) -> int:
    """Of its rows, and of the number by which ranks meet before gradients travel."""
    tokens = batch(step, config.vocab_size)[0].chunk(num_ranks)
    shape = config.vocab_size, config.dim
    return bytes_of_rows(tokens, rank, shape, weight=weight, grad=grad) + grad


def _slice_numels(config: GPTConfig, index: int, num_ranks: int) -> int:
    """Elements of one slice of all modules whose slices rotate: not of the embedding."""
    numel = 0
    for name, parameter in build(config).named_parameters():
        if "norm" in name or name.startswith("embedding"):
            continue
        columns = name.endswith((".o.weight", ".down.weight"))
        numel += prod(parameter.chunk(num_ranks, dim=1 if columns else 0)[index].shape)
    return numel


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
    config = GATED_GROUPED
    of_rows, of_half = (
        _bytes_of_embedding(config, 0, 0, num_ranks, weight=weight, grad=grad) + 4 - grad
        for weight, grad in ((4, 4), (2, 2))  # gradients travel in the dtype that they have
    )
    gradients = _gradient_bytes(plain, num_ranks)
    weights = plain.bytes_sent[0] - gradients - of_rows
    assert half.bytes_sent[0] == weights // 2 + gradients + of_half


def test_gradients_travel_in_the_dtype_of_the_policy(ranks: StartRanks) -> None:
    exact = Variant(EVEN, dtype=torch.float32)
    rounded = replace(exact, policy=RotationPolicy(torch.bfloat16, torch.bfloat16))
    plain, half = (ranks(2).run(train_rotated, variant)[0] for variant in (exact, rounded))
    # flags of the vocabulary's rows, and the number by which ranks meet in backward
    fixed = 36 + 4
    assert (half.bytes_sent[0] - fixed) * 2 == plain.bytes_sent[0] - fixed
    assert half.losses == pytest.approx(plain.losses, rel=2e-2)


def _gradient_bytes(outcome: Outcome, num_ranks: int) -> int:
    rotated = sum(
        p.numel()
        for name, p in outcome.parameters.items()
        if "norm" not in name and not name.startswith("embedding")
    )
    return 4 * rotated * (num_ranks - 1) // num_ranks
