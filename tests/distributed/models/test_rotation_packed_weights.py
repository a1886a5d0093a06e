"""Weights of blocks with packed projections go in and out as those of DTensors, bit by bit."""

from pathlib import Path

import pytest
import torch
from gyre_trainer import pretrained
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import rotate_all
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.fsdp import fully_shard

from tests.distributed.conftest import StartRanks
from tests.distributed.models.packed import RECOMPUTED, SIZES, on_meta, part, rotated, small
from tests.distributed.training import whole, whole_parameters


def trained(
    family: str, load: Path | None, save: Path | None, how: str = "rotated"
) -> dict[str, Tensor]:
    """Parameters, and states of AdamW, after loading, two steps, and saving."""
    model = rotated(family) if how == "rotated" else small(family)
    if how == "fsdp":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if load is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        states = {"model": model_state, "optimizer": optimizer_state}
        load_checkpoint(states, checkpoint_id=load)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )
    else:
        for _ in range(2):
            model(input_ids=part(), labels=part()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        states = {"model": model_state, "optimizer": optimizer_state}
        save_checkpoint(states, checkpoint_id=save)
    found = whole_parameters(model)
    for name, parameter in model.named_parameters():
        for key, state in optimizer.state[parameter].items():
            found[f"{name} {key}"] = whole(state)
    return found


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize(
    "readers",
    [
        [(3, "rotated"), (1, "plain"), (2, "fsdp")],
        pytest.param([(4, "rotated")], marks=pytest.mark.models),
    ],
    ids=["three, plain and FSDP2", "four"],
)
def test_checkpoints_of_packed_blocks_are_read_by_other_ranks_and_by_fsdp(
    ranks: StartRanks, tmp_path: Path, family: str, readers: list[tuple[int, str]]
) -> None:
    expected = ranks(2).run(trained, family, None, tmp_path / "checkpoint")[0]
    assert any("exp_avg" in name for name in expected)
    for num_ranks, how in readers:
        for found in ranks(num_ranks).run(trained, family, tmp_path / "checkpoint", None, how):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), how


def passed_through(family: str, source: Path, target: Path) -> dict[str, Tensor]:
    model = on_meta(family)
    rotate_all(model, mesh=make_mesh("cpu"), policy=RECOMPUTED)
    pretrained.load(model, source)
    pretrained.save_pretrained(model, target)
    return whole_parameters(model)


@pytest.mark.parametrize("family", SIZES)
def test_weights_of_packed_blocks_go_in_and_out(
    ranks: StartRanks, tmp_path: Path, family: str
) -> None:
    plain = small(family).float()
    plain.save_pretrained(tmp_path / "saved")
    expected = whole_parameters(plain)
    for found in ranks(3).run(passed_through, family, tmp_path / "saved", tmp_path / "again"):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = type(plain).from_pretrained(tmp_path / "again")
    assert all(torch.equal(p, expected[name]) for name, p in again.named_parameters())
