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
    build,
    train_rotated,
)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "policy", [RotationPolicy(), RotationPolicy(recompute="block")], ids=["kept", "recomputed"]
)
def test_bytes_sent_are_the_minimum(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy
) -> None:
    """A rank sends 3 (N-1)/N of the rotated parameters; the embedding has more tokens than rows."""
    rotated = sum(p.numel() for name, p in build(EVEN).named_parameters() if "norm" not in name)
    expected = 8 * 3 * rotated * (num_ranks - 1) // num_ranks
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
        others = sizes[(rank + 1) % num_ranks], sizes[rank - 1], sizes[rank]
        rotating = 3 * sum(sizes) - sum(others)
        assert outcome.bytes_sent == [8 * rotating] * 2


def _slice_numels(config: GPTConfig, index: int, num_ranks: int) -> int:
    """Elements of one slice of all modules whose slices rotate."""
    numel = 0
    for name, parameter in build(config).named_parameters():
        if "norm" in name:
            continue
        columns = name.endswith((".o.weight", ".down.weight"))
        numel += prod(parameter.chunk(num_ranks, dim=1 if columns else 0)[index].shape)
    return numel
