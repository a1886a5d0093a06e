"""What trainers do to a whole model: move it to where it is, copy it, average it."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import materialize, rotate_all
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.test_rotation_regressions import backward, gradients
from tests.distributed.training import (
    UNEVEN,
    Variant,
    batch,
    build,
    default_dtype,
    distance,
    rotated_gpt,
    train_step,
    whole_parameters,
)

TIED = Variant(replace(UNEVEN, tie_embeddings=True))
DECAY = 0.75
CALLS: list[Any] = [
    lambda model: model.to("cpu"),
    lambda model: model.to(torch.float64),
    lambda model: model.cpu().double(),
]


def part(step: int) -> tuple[Tensor, Tensor]:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    tokens, targets = batch(step, UNEVEN.vocab_size)
    return tokens.chunk(num_ranks)[rank], targets.chunk(num_ranks)[rank]


def used(replicate: int) -> tuple[float, float, float, str]:
    """The distance of a moved and copied model, trained beside the first one, from one process's;
    of an average of weights from one formed by hand; and the refusal of another device."""
    model = rotated_gpt(TIED, replicate=replicate)
    first = {name: each.clone() for name, each in whole_parameters(model).items()}
    with default_dtype(TIED.dtype):
        alone = build(TIED.config)
    materialize(alone, seed=7)
    for call in CALLS:
        assert call(model) is model
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
    average.update_parameters(model)
    copied = deepcopy(model)
    optimizer = torch.optim.AdamW(copied.parameters(), lr=3e-3)
    train_step(copied, optimizer, *part(0), TIED)
    kept = distance(whole_parameters(model), first)
    backward(model.loss(*part(1)))
    backward(alone.loss(*batch(1, UNEVEN.vocab_size)))
    kept = max(kept, distance(gradients(model), gradients(alone)))

    optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3)
    alone.zero_grad()
    train_step(alone, optimizer, *batch(0, UNEVEN.vocab_size), TIED)
    after = whole_parameters(alone)
    trained = distance(whole_parameters(copied), after)

    average.update_parameters(copied)
    averaged = whole_parameters(average.module)
    expected = {name: first[name] * DECAY + after[name] * (1 - DECAY) for name in first}
    with torch.no_grad():
        loss = average.module.loss(*part(2))
        alone.load_state_dict(expected, strict=False)
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        losses = abs(float(loss - alone.loss(*batch(2, UNEVEN.vocab_size))))
    with pytest.raises(RotationError) as refused:
        model.to("meta")
    return kept, trained, max(losses, distance(averaged, expected)), str(refused.value)


@pytest.mark.parametrize(("num_ranks", "replicate"), [(2, 1), (4, 2)])
def test_models_are_moved_copied_and_averaged(
    ranks: StartRanks, num_ranks: int, replicate: int
) -> None:
    for kept, trained, averaged, refusal in ranks(num_ranks).run(used, replicate):
        assert max(kept, trained, averaged) <= 1e-12
        assert "cannot become torch.float64 on meta" in refusal


class Experts(nn.Module):
    """A list of experts, of which each rank needs others."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, index: int) -> Tensor:
        y: Tensor = self.experts[index](x)
        return y


def copied_experts() -> float:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"norm": nn.LayerNorm(4), "list": Experts()})
    plain: Any = deepcopy(model)
    rotate_all(model, mesh=make_mesh("cpu"))
    copied = deepcopy(model)
    del model
    index, x = dist.get_rank(), torch.ones(2, 4)
    found = copied["list"](copied["norm"](x), index)
    found.sum().backward()
    if index == 0:
        deepcopy(copied)  # which is never called
    other = nn.Sequential(nn.Linear(4, 4))
    rotate_all(other, mesh=make_mesh("cpu"), sync_from=0)
    other(x)
    return float((found - plain["list"](plain["norm"](x), index)).detach().norm())


def test_the_copy_of_a_list_of_experts_calls_its_own(ranks: StartRanks) -> None:
    assert max(ranks(2).run(copied_experts)) <= 1e-6


class Attending(nn.Module):
    """Attention of torch reads the weight of its last layer, which is gathered on use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.attention(x, x, x)[0]
        return y


def copied_attention() -> float:
    """The largest distance: of the model, of its doubled copy, or of that one's gradient."""
    torch.manual_seed(0)
    plain: Any = Attending().double()
    model, doubled = deepcopy(plain), deepcopy(plain)
    rotate_all(model, mesh=make_mesh("cpu"), min_numel=0)
    copied = deepcopy(model)
    with torch.no_grad():
        for each in (*copied.parameters(), *doubled.parameters()):
            each.mul_(2)
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    doubled(x).square().sum().backward()
    found = copied(x)
    found.square().sum().backward()
    assert all(each.grad is None for each in model.parameters())
    last = copied.attention.out_proj.weight.grad.full_tensor()
    pairs = (
        (model(x), plain(x)),
        (found, doubled(x)),
        (last, doubled.attention.out_proj.weight.grad),
    )
    return max(float((one - other).detach().norm()) for one, other in pairs)


def test_a_copy_gathers_its_own_parameters(ranks: StartRanks) -> None:
    assert max(ranks(2).run(copied_attention)) <= 1e-9
