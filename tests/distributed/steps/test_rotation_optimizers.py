"""Torch's optimizers and clipping on rotated models take the steps of one process."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import Adafactor, AdamW8bit, rotate_all
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
)

from tests.distributed.conftest import StartRanks
from tests.distributed.training import default_dtype, distance, whole, whole_parameters

LOOP_OR_LISTS: dict[str, partial[Any]] = {
    "AdamW": partial(AdamW, lr=1e-2, amsgrad=True),
    "Adam": partial(Adam, lr=1e-2, weight_decay=0.1, maximize=True),
    "SGD": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "ASGD": partial(ASGD, lr=1e-2),
    "Adadelta": partial(Adadelta, lr=10.0),
    "Adagrad": partial(Adagrad, lr=1e-2),
    "Adamax": partial(Adamax, lr=1e-2),
    "RMSprop": partial(RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": partial(NAdam, lr=1e-2),
    "RAdam": partial(RAdam, lr=1e-2),
}
OPTIMIZERS: dict[str, partial[Any]] = {
    **{f"{name}, one by one": partial(of, foreach=False) for name, of in LOOP_OR_LISTS.items()},
    **{f"{name}, foreach": partial(of, foreach=True) for name, of in LOOP_OR_LISTS.items()},
    "AdamW, fused": partial(AdamW, lr=1e-2, fused=True),
    "Adam, fused": partial(Adam, lr=1e-2, weight_decay=0.1, fused=True),
    "Adafactor": partial(Adafactor, lr=1e-2, weight_decay=0.1),
    "AdamW of 8 bits, on small parameters": partial(AdamW8bit, lr=1e-2, weight_decay=0.1),
    "Adafactor, maximizing": partial(Adafactor, lr=0.1, maximize=True, d=2.0),
}
OF_TORCH: dict[Any, Any] = {Adafactor: torch.optim.Adafactor, AdamW8bit: AdamW}
BATCH = 12


def model_of(num_channels: int) -> nn.Module:
    """A model whose parameters are cut along either dim, unevenly, or whole on every rank."""
    torch.manual_seed(5)
    with default_dtype(torch.float64):
        return nn.Sequential(
            nn.Conv1d(2, num_channels, 3),
            nn.Flatten(),
            nn.Linear(num_channels * 3, 7),
            nn.LayerNorm(7),
            MLP(7, 11, bias=True),
        )


def both_models(num_channels: int = 5) -> tuple[nn.Module, nn.Module]:
    """A rotated model, and the same one in one process."""
    model = model_of(num_channels)
    rotate_all(model, mesh=make_mesh("cpu"))
    return model, model_of(num_channels)


def compute_gradients(model: nn.Module, step: int) -> Any:
    """The loss of a step on this process's part of the batch. Its gradients replace the last."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(BATCH, 2, 5, generator=generator, dtype=torch.float64)
    if hasattr(model, "grad_averaging"):
        batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
    model.zero_grad()
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def under_optimizers(names: Iterable[str]) -> dict[str, tuple[float, float]]:
    """The distance of trained parameters from one process's, and how far training moved those."""
    found = {}
    for name in names:
        optimizer_of = OPTIMIZERS[name]
        model, alone = both_models(num_channels=4)  # at three ranks the last one has none of them
        start = whole_parameters(model)
        of_torch = partial(
            OF_TORCH.get(optimizer_of.func, optimizer_of.func), **optimizer_of.keywords
        )
        for each, of in ((model, optimizer_of), (alone, of_torch)):
            optimizer = of(each.parameters())
            for step in range(2):
                optimizer.step(partial(compute_gradients, each, step))
        after = whole_parameters(alone)
        found[name] = distance(whole_parameters(model), after), distance(after, start)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "way"),
    [
        pytest.param(2, "one by one", marks=pytest.mark.models),
        pytest.param(2, "foreach", marks=pytest.mark.models),
        (2, "fused"),
        (2, "Adafactor"),
        (2, "AdamW"),
        (3, ""),
    ],
)
def test_any_of_torchs_optimizers_takes_the_steps_of_one_process(
    ranks: StartRanks, num_ranks: int, way: str
) -> None:
    names = [name for name in OPTIMIZERS if way in name]
    for found in ranks(num_ranks).run(under_optimizers, names):
        assert len(found) == len(names) > 1
        assert {name: apart for name, (apart, _) in found.items() if not apart <= 1e-12} == {}
        assert min(went for _, went in found.values()) > 1e-3


def under_every_clipping() -> list[tuple[str, float, float]]:
    """How to clip, and the distance of the gradients and of their norm from one process's."""
    model, alone = both_models()
    found = []
    for foreach in (False, True):
        for norm_type in (1.0, 2.0, 3.0, torch.inf):
            norms: list[Tensor] = []
            for each in (model, alone):
                compute_gradients(each, 0)
                norms.append(
                    nn.utils.clip_grad_norm_(each.parameters(), 1e-2, norm_type, foreach=foreach)
                )
            apart = float((whole(norms[0]) - norms[1]).abs() / norms[1])
            found.append(
                (f"{norm_type}, {foreach}", distance(gradients(model), gradients(alone)), apart)
            )
        for each in (model, alone):
            compute_gradients(each, 0)
            nn.utils.clip_grad_value_(each.parameters(), 1e-2, foreach=foreach)
        found.append((f"value, {foreach}", distance(gradients(model), gradients(alone)), 0.0))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_are_clipped_by_their_norm_over_all_ranks(
    ranks: StartRanks, num_ranks: int
) -> None:
    for found in ranks(num_ranks).run(under_every_clipping):
        assert len(found) == 10
        assert [each for each in found if not max(each[1:]) <= 1e-12] == []


def under_8_bits() -> tuple[dict[str, Tensor], float, set[torch.dtype]]:
    """Parameters after three steps, their distance from AdamW's, and the dtypes of states."""
    found = []
    for of in (AdamW8bit, AdamW):
        torch.manual_seed(0)
        with default_dtype(torch.float64):
            model = nn.Sequential(nn.Linear(64, 192), MLP(192, 384), nn.Linear(192, 300))
        rotate_all(model, mesh=make_mesh("cpu"), min_numel=0)
        batch = torch.randn(BATCH, 64, dtype=torch.float64)
        part = batch.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer: Any = of(model.parameters(), lr=1e-2)
        for step in range(3):
            if step == 2:  # codes must stay bytes
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            (model(part) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((whole_parameters(model), optimizer, list(model.parameters())))
    (after, optimizer, parameters), (goal, _, _) = found
    kinds = {whole(optimizer.state[p]["exp_avg"]).dtype for p in parameters if p.numel() >= 4096}
    return after, distance(after, goal), kinds


def test_adamw_of_8_bits_takes_the_same_steps_on_any_number_of_ranks(ranks: StartRanks) -> None:
    [(alone, rounding, _)] = ranks(1).run(under_8_bits)
    for after, error, dtypes in ranks(3).run(under_8_bits):
        assert dtypes == {torch.uint8}
        assert 0 < error == pytest.approx(rounding, rel=1e-6)
        assert distance(after, alone) <= 1e-12
    assert rounding < 0.02  # of three steps, the first of which are the roughest
