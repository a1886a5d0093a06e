"""A slice larger than the largest indivisible one travels in pieces, in smaller buffers."""

import gc
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rule import RotationPolicy
from gyre_trainer.shards import layout
from gyre_trainer.shards.initialisation import materialize
from torch import Tensor

from tests.distributed.conftest import StartRanks
from tests.distributed.training import (
    EVEN,
    Outcome,
    Variant,
    batch,
    build,
    default_dtype,
    distance,
    rotated_gpt,
    train_alone,
    train_rotated,
)

LARGE = replace(EVEN, num_layers=1, vocab_size=301)  # a slice is more than three times an MLP's
MLP_NUMEL = 2 * EVEN.dim * EVEN.hidden_dim
NUM_STEPS = 4

VARIANTS = {
    "kept": Variant(LARGE),
    "tied, recomputed, accumulated": Variant(
        replace(LARGE, tie_embeddings=True), RotationPolicy(recompute="block"), num_parts=2
    ),
    "frozen embedding": Variant(LARGE, frozen=("embedding",)),
}


@dataclass(frozen=True)
class Seen:
    """What a rank observed: the outcome, rounds of embedding and head, and the largest buffer.

    The logits are those from before the training.
    """

    outcome: Outcome
    num_rounds: list[int]
    buffer_numel: int
    logits: Tensor


def trained_in_pieces(variant: Variant) -> Seen:
    gc.collect()  # a ring of other models would know of larger slices
    with patch.object(layout, "_MIN_PIECE_NUMEL", 1):
        model = rotated_gpt(variant)
        tokens, _ = batch(0, variant.config.vocab_size)
        with torch.no_grad():
            logits = model(tokens)
        outcome = train_rotated(variant, NUM_STEPS)
        modules = [
            module for module in (model.embedding, model.head) if isinstance(module, RotatedModule)
        ]
        pool = ring_of(make_mesh("cpu")).pool
        largest = max(
            (buffer.numel() for free in pool._free.values() for buffer in free), default=0
        )
        return Seen(
            outcome, [module.rotation.pieces.num_rounds for module in modules], largest, logits
        )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_pieces_change_nothing_but_the_size_of_the_buffers(
    ranks: StartRanks, num_ranks: int
) -> None:
    for variant in VARIANTS.values():
        alone = train_alone(variant, NUM_STEPS)
        for seen in ranks(num_ranks).run(trained_in_pieces, variant):
            assert seen.num_rounds == [4, 4]
            assert seen.buffer_numel == (MLP_NUMEL // num_ranks if num_ranks > 1 else 0)
            assert torch.allclose(seen.logits, logits_alone(variant), rtol=1e-12, atol=1e-13)
            assert seen.outcome.losses == pytest.approx(alone.losses, rel=1e-12, abs=0)
            assert distance(seen.outcome.parameters, alone.parameters) <= 1e-12


def logits_alone(variant: Variant) -> Tensor:
    with default_dtype(variant.dtype):
        model = build(variant.config)
    materialize(model, seed=7)
    with torch.no_grad():
        logits: Tensor = model(batch(0, variant.config.vocab_size)[0])
    return logits
