"""Parameters that a forward reads: sharded, gathered for the read, and exact."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.whole.read_rule import ReadRule
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.distributed.conftest import StartRanks
from tests.distributed.training import distance, whole_parameters

DIM, BATCH, TIME = 6, 12, 5


class ReadsLayer(nn.Module):
    """Reads weight and bias of one layer, and calls another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.called = nn.Linear(DIM, 7), nn.Linear(7, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(F.linear(x, self.layer.weight, self.layer.bias).sin()) + x


class Mixes(nn.Module):
    """Mixes the matrices of a list, with those of a dict, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.rand(DIM, DIM)) for _ in range(3)])
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.rand(DIM))})
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        mixed = sum(part * (index + 1) for index, part in enumerate(self.parts))
        return self.norm(x @ mixed * self.named["gain"] + x @ self.parts[0].t())


class Routes(nn.Module):
    """A router by einsum, positions that are added, and experts whose weights are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.rand(1, 2 * TIME, DIM))
        self.router = nn.Parameter(torch.rand(DIM, 4))
        self.ups, self.downs = (nn.Parameter(torch.rand(4, DIM, DIM)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[:, : x.shape[1]]
        scores = torch.einsum("btd,de->bte", x, self.router).softmax(-1)
        hidden = torch.einsum("btd,edh->bteh", x, self.ups).relu()
        outputs = [hidden[..., e, :] @ self.downs[e] * scores[..., e, None] for e in range(4)]
        return x + sum(outputs)


class Repeats(nn.Module):
    """Reads the same matrices in each step of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = (nn.Parameter(torch.rand(DIM, DIM)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        states = []
        for step in x.unbind(1):
            state = (step @ self.of_input + state @ self.of_state).tanh()
            states.append(state)
        return torch.stack(states, 1)


class TiesByHand(nn.Module):
    """Calls its embedding and reads the weight of that as its head, which has the table's name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, DIM)
        self.table = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x * 100).long() % 9
        return F.linear(self.embedding(tokens[..., 0]), self.embedding.weight) @ self.table


class Checkpointed(nn.Module):
    """Calls modules inside of torch's checkpoint."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(inside)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@dataclass
class Case:
    """A model, and what of it is cut by hand.

    Attributes:
        rules: for `rotate_all`.
        num_whole: how many parameters stay whole.
    """

    build: Callable[[], nn.Module]
    rules: tuple[str, ...] = ()
    num_whole: int = 0


CASES = {
    "layer": Case(lambda: nn.Sequential(ReadsLayer())),
    "list": Case(lambda: nn.Sequential(Mixes()), ("0",), 2),
    "raw": Case(lambda: nn.Sequential(Routes(), nn.Linear(DIM, DIM)), ("0",)),
    "root": Case(Routes, ("",)),
    "loop": Case(lambda: nn.Sequential(nn.Linear(DIM, DIM), Repeats()), ("1",)),
    "tied": Case(TiesByHand),
    "checkpoint": Case(lambda: Checkpointed(ReadsLayer(), Mixes(), Routes()), ("blocks.[12]",), 2),
}


@dataclass(frozen=True)
class Run:
    """What a model did.

    Attributes:
        outputs: in training, and at the end in evaluation.
        parameters: at the end.
        num_whole: of its parameters, those that every rank has whole.
    """

    outputs: list[Tensor]
    parameters: dict[str, Tensor]
    num_whole: int = 0


def trained(
    name: str,
    part: int = 0,
    num_parts: int = 1,
    *,
    frozen: str = "",
    policy: RotationPolicy | None = None,
    replicate: int = 1,
) -> Run:
    """Train a model on this process's part of each batch; without parts as it is."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().double()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in path)
    if num_parts > 1 or policy is not None:
        mesh = make_mesh("cpu", replicate=replicate)
        rules: dict[Any, Any] = dict.fromkeys(case.rules, ReadRule())
        rotate_all(model, mesh=mesh, rules=rules, policy=policy or RotationPolicy(), verify=True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    outputs = []
    for step in range(3):
        for half in range(2):
            torch.manual_seed(10 * step + half)
            x = torch.rand(BATCH, TIME, DIM, dtype=torch.float64)
            output = model(x.chunk(num_parts)[part])
            (output.sin().mean() / 2).backward()
            outputs.append(output.detach())
        torch.nn.utils.clip_grad_norm_(trainable, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outputs.append(model(x.chunk(num_parts)[part]))
    with torch.inference_mode():
        outputs.append(model(x.chunk(num_parts)[part]))
    num_whole = sum(
        isinstance(p, DTensor) and p.placements[-1].is_replicate() for p in model.parameters()
    )
    return Run(outputs, whole_parameters(model), num_whole)


def trained_here(name: str, **options: Any) -> Run:
    return trained(name, dist.get_rank(), dist.get_world_size(), **options)


def require_equal(found: list[Run], expected: Run, limit: float = 1e-11) -> None:
    for rank, run in enumerate(found):
        assert distance(run.parameters, expected.parameters) <= limit
        for one, other in zip(run.outputs, expected.outputs, strict=True):
            torch.testing.assert_close(one, other.chunk(len(found))[rank], rtol=limit, atol=limit)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_what_is_read_trains_exactly(ranks: StartRanks, name: str, num_ranks: int) -> None:
    found = ranks(num_ranks).run(trained_here, name)
    require_equal(found, trained(name))
    assert {run.num_whole for run in found} == {CASES[name].num_whole}
