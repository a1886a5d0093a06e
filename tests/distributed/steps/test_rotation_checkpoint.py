"""Initial weights and checkpoints do not depend on the number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.training.gpt import GPT
from torch import Tensor

from tests.distributed.conftest import StartRanks
from tests.distributed.training import (
    GATED_GROUPED,
    UNEVEN,
    Variant,
    batch,
    distance,
    rotated_gpt,
    train_alone,
    train_step,
    whole_parameters,
)

VARIANTS = {"uneven": Variant(UNEVEN), "grouped heads, gated": Variant(GATED_GROUPED)}


def train_between(
    variant: Variant,
    first: int,
    last: int,
    load: Path | None,
    save: Path | None,
    replicate: int = 1,
) -> dict[str, Tensor]:
    """Train the steps [first, last), from one checkpoint to another."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
    from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

    model = rotated_gpt(variant, replicate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if load is not None:
        _spoil(model)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        load_checkpoint({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=load)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )
    size, rank = make_mesh("cpu").size(), dist.get_rank()
    for step in range(first, last):
        tokens, targets = (
            part.chunk(size)[rank] for part in batch(step, variant.config.vocab_size)
        )
        train_step(model, optimizer, tokens, targets, variant)
    if save is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        save_checkpoint({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=save)
    return whole_parameters(model)


def _spoil(model: GPT) -> None:
    """Change all weights, so that a tensor that the checkpoint does not restore is noticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_checkpoint_continues_with_another_number_of_ranks(
    ranks: StartRanks, tmp_path: Path, name: str, before: int, after: int
) -> None:
    ranks(before).run(train_between, VARIANTS[name], 0, 3, None, tmp_path / "checkpoint")
    alone = train_alone(VARIANTS[name], num_steps=6).parameters
    for found in ranks(after).run(
        train_between, VARIANTS[name], 3, 6, tmp_path / "checkpoint", None
    ):
        assert distance(found, alone) <= 1e-12
