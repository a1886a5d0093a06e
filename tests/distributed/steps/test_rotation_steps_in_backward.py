"""Hooks on accumulated gradients, such as those that take the optimizer's step in backward."""

from typing import Any

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.rotate import no_sync, rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.training import distance, whole_parameters


class Model(nn.Module):
    """Its second norm is called by some ranks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
        self.norm, self.other = nn.LayerNorm(5), nn.LayerNorm(7)

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)).tanh()
        if normed.any():
            hidden = torch.where(normed[:, None], self.other(hidden), hidden)
        output: Tensor = self.down(hidden)
        return output


def made() -> Model:
    torch.manual_seed(0)
    return Model().double()


def step_in_backward(model: nn.Module) -> dict[str, int]:
    """Let each parameter take its step when its gradient is there; returns counts of steps."""
    counts = {}

    def watch(name: str, parameter: nn.Parameter) -> None:
        optimizer = torch.optim.AdamW([parameter], lr=1e-2)
        counts[name] = 0

        def hook(_parameter: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()
            counts[name] += 1

        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    for name, parameter in model.named_parameters():
        watch(name, parameter)
    return counts


def trained(model: nn.Module, part: int, num_parts: int) -> dict[str, int]:
    counts = step_in_backward(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
        normed = torch.arange(12) < 3  # of the first part alone
        x, normed = x.chunk(num_parts)[part], normed.chunk(num_parts)[part]
        loss: Any = model(x, normed).square().mean()
        loss.backward()
    return dict(counts)


def outcome(replicate: int) -> tuple[float, dict[str, int], list[int]]:
    mesh = make_mesh("cpu", replicate=replicate)
    model, alone = made(), made()
    rotate_all(model, mesh=mesh)
    ring = ring_of(mesh)
    counts = trained(model, ring.part, ring.num_parts)
    trained(alone, 0, 1)
    apart = distance(whole_parameters(model), whole_parameters(alone))
    seen: list[int] = []
    weight: Any = model.norm.weight
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    x, normed = torch.ones(2, 5, dtype=torch.float64), torch.zeros(2, dtype=torch.bool)
    with no_sync(model):
        model(x, normed).sum().backward()
    num_postponed = len(seen)
    model(x, normed).sum().backward()
    return apart, counts, [num_postponed, len(seen)]


@pytest.mark.parametrize(("num_ranks", "replicate"), [(1, 1), (3, 1), (4, 2)])
def test_steps_in_backward_are_those_of_one_process(
    ranks: StartRanks, num_ranks: int, replicate: int
) -> None:
    for apart, counts, seen in ranks(num_ranks).run(outcome, replicate):
        assert apart <= 1e-12
        assert set(counts.values()) == {3}
        assert seen == ([1, 2] if num_ranks == 1 else [0, 1])
