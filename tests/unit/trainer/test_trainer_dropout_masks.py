"""Dropout masks in one process: the rate asked for, no pattern, the same mask for the same key."""

from dataclasses import dataclass
from typing import cast

import pytest
import torch
from gyre_trainer.comm.ring import Ring
from gyre_trainer.rotation.recomputation import DropoutMasks
from torch import Tensor


@dataclass
class FakeRing:
    """The attributes of a ring that masks read."""

    part: int = 0
    num_parts: int = 1


def kept(
    shape: tuple[int, ...],
    p: float,
    *,
    key: int = 5,
    ring: FakeRing | None = None,
    first: int = 0,
) -> Tensor:
    draw = DropoutMasks(key, cast("Ring", ring or FakeRing()), first)
    return draw.apply(torch.ones(shape, dtype=torch.float64), p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_are_dropped_at_the_given_rate_and_the_mean_stays(p: float) -> None:
    values = kept((40, 50, 60), p)
    assert set(values.flatten().tolist()) == {0.0, 1 / (1 - p)}
    assert values.mean().item() == pytest.approx(1, abs=5 * (p / (1 - p) / values.numel()) ** 0.5)


def test_entries_are_independent_along_every_dim() -> None:
    signs = kept((64, 64, 64), 0.5) - 1
    for dim in range(3):
        for distance in (1, 2, 3, 8, 16):
            correlation = (signs * signs.roll(distance, dim)).mean().item()
            assert abs(correlation) < 5 / signs.numel() ** 0.5


def test_keys_and_masks_of_one_call_differ_and_the_same_key_repeats() -> None:
    assert torch.equal(kept((8, 64), 0.5), kept((8, 64), 0.5))
    assert not torch.equal(kept((8, 64), 0.5), kept((8, 64), 0.5, key=6))
    draw = DropoutMasks(5, cast("Ring", FakeRing()))
    x = torch.ones(8, 64)
    assert not torch.equal(draw.apply(x, 0.5), draw.apply(x, 0.5))


def test_independent_masks_differ_among_ranks_and_slices() -> None:
    one = kept((8, 64), 0.5)
    assert not torch.equal(one, kept((8, 64), 0.5, ring=FakeRing(1, 2)))
    assert not torch.equal(one, kept((8, 64), 0.5, first=64))


def test_everything_may_be_dropped() -> None:
    assert kept((3, 4), 1.0).eq(0).all()
