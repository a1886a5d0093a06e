"""Rotated training sends the fewest bytes, in the dtypes of the policy."""

from math import prod

import pytest
from gyre_trainer.rotation.rule import RotationPolicy
from gyre_trainer.training.gpt import GPTConfig

from tests.distributed.conftest import StartRanks
from tests.distributed.training import (
    EVEN,
    UNEVEN,
    Outcome,
    Variant,
    batch,
    build,
    bytes_of_rows,
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
