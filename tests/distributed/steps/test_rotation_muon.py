"""Muon on rotated models: the bits of one process, each matrix orthogonalised on one rank."""

import operator
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.accounting.counters import Category, Counters
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.optimizers import muon
from gyre_trainer.rotate import Muon, rotate_all
from gyre_trainer.shards.layout import local_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole_parameters


def model_of() -> nn.Module:
    """Matrices that are cut along either dim, evenly or not, and of which the last rank has none.

    At three ranks, that is the one with 4 rows.
    """
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 9), MLP(9, 14), nn.Linear(9, 4), MLP(4, 7), nn.Linear(4, 40))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take a step with gradients that are the same bits for every number of ranks."""
    generator = torch.Generator().manual_seed(number)
    for name, parameter in model.named_parameters():
        grad: Tensor = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            continue
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        parameter.grad = grad
    before = [parameter._version for parameter in matrices(model)]
    optimizer.step()
    after = [parameter._version for parameter in matrices(model)]
    assert all(map(operator.lt, before, after)), "a backward over old values would go unnoticed"


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {"lr": 0.02},
    "as AdamW's rate": {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    "without Nesterov": {"lr": torch.tensor(0.02), "nesterov": False, "ns_steps": 3},
}


def alone(options: dict[str, Any], num_steps: int) -> dict[str, Tensor]:
    """The parameters after some steps of torch's Muon in one process."""
    model = model_of()
    optimizer = torch.optim.Muon(matrices(model), **options)
    for number in range(num_steps):
        step(model, optimizer, number)
    return whole_parameters(model)


def rotated(
    options: dict[str, Any],
    first: int,
    last: int,
    load: Path | None = None,
    save: Path | None = None,
    replicate: int = 1,
) -> tuple[dict[str, Tensor], Counter[tuple[int, ...]]]:
    """Parameters after the steps [first, last), and the shapes that this rank orthogonalised."""
    model = model_of()
    rotate_all(model, mesh=make_mesh("cpu", replicate=replicate))
    optimizer = Muon(matrices(model), **options)
    if load is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                local_of(parameter).fill_(0.5)
        weights, means = get_state_dict(model, optimizer)
        load_checkpoint({"model": weights, "optimizer": means}, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=means)
    shapes: Counter[tuple[int, ...]] = Counter()

    def counted(matrix: Tensor, *args: Any) -> Tensor:
        shapes[tuple(matrix.shape)] += 1
        return _zeropower_via_newtonschulz(matrix, *args)

    with patch.object(muon, "_zeropower_via_newtonschulz", counted):
        for number in range(first, last):
            step(model, optimizer, number)
    if save is not None:
        weights, means = get_state_dict(model, optimizer)
        save_checkpoint({"model": weights, "optimizer": means}, checkpoint_id=save)
    return whole_parameters(model), shapes


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_matrix_is_orthogonalised_once_with_the_bits_of_one_process(
    ranks: StartRanks, name: str, num_ranks: int
) -> None:
    expected = alone(OPTIONS[name], 3)
    on_all_ranks: Counter[tuple[int, ...]] = Counter()
    for found, shapes in ranks(num_ranks).run(rotated, OPTIONS[name], 0, 3):
        assert all(torch.equal(found[each], expected[each]) for each in expected)
        assert shapes.total() < 3 * len(matrices(model_of()))
        on_all_ranks += shapes
    assert on_all_ranks == {tuple(each.shape): 3 for each in matrices(model_of())}


WIDTH = 48


def costs(num_matrices: int) -> tuple[int, int]:
    """Bytes that this rank sends in a step, and those alive at its peak that were not before it."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_matrices)))
    rotate_all(model, mesh=make_mesh("cpu"))
    optimizer = Muon(matrices(model), lr=0.02)
    step(model, optimizer, 0)  # makes the running means
    sent, exchange = 0, dist.all_to_all_single

    def counted(into: Tensor, of: Tensor, to: list[int], sizes: list[int], **kwargs: Any) -> Any:
        nonlocal sent
        sent += (sum(sizes) - sizes[dist.get_rank()]) * of.element_size()
        return exchange(into, of, to, sizes, **kwargs)

    with patch.object(dist, "all_to_all_single", counted), Counters() as live:
        means = [local_of(each["momentum_buffer"]) for each in optimizer.state.values()]
        grads = [local_of(each.grad) for each in matrices(model) if each.grad is not None]
        live.label(Category.OPTIMIZER, [*map(local_of, matrices(model)), *means, *grads])
        before = live.live_bytes
        optimizer.step()
    assert live.sent_bytes == sent
    return sent, live.peak_bytes - before


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_step_sends_each_entry_twice_and_holds_one_matrix_whole(
    ranks: StartRanks, num_ranks: int
) -> None:
    entries = WIDTH * WIDTH
    for num_matrices in (num_ranks, 3 * num_ranks):
        of_ranks = ranks(num_ranks).run(costs, num_matrices)
        everything = 4 * (num_ranks - 1) * num_matrices * entries // num_ranks
        assert [sent for sent, _ in of_ranks] == [everything // num_ranks] * num_ranks
        # a matrix of bfloat16, and what torch's iteration makes of it: two products and two results
        assert [peak for _, peak in of_ranks] == [5 * 2 * entries] * num_ranks
