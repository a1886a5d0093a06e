"""Models whose forwards read parameters, for tests of that."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from gyre_trainer.rotate import ReadRule
from gyre_trainer.rotation.rule import Rule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM, BATCH, TIME = 6, 12, 5


class ReadsLayer(nn.Module):
    """Reads weight and bias of one layer, and calls another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.called = nn.Linear(DIM, 7), nn.Linear(7, DIM)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.called(F.linear(x, self.layer.weight, self.layer.bias).sin())
        return output + x


class Mixes(nn.Module):
    """Mixes the matrices of a list, with those of a dict, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.rand(DIM, DIM)) for _ in range(3)])
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.rand(DIM))})
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        mixed = sum(part * (index + 1) for index, part in enumerate(self.parts))
        output: Tensor = self.norm(x @ mixed * self.named["gain"] + x @ self.parts[0].t())
        return output


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
        rules: for `rotate_all`, by path: the parameters of layers inside that a module reads.
        num_whole: how many parameters stay whole.
    """

    build: Callable[[], nn.Module]
    rules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    num_whole: int = 0

    def read_rules(self) -> dict[type[nn.Module] | str, Rule | None]:
        """The rules, as `rotate_all` takes them."""
        return {path: ReadRule(names=names) for path, names in self.rules.items()}


LAYER = ("layer.weight", "layer.bias")
CASES = {
    "layer": Case(lambda: nn.Sequential(ReadsLayer()), {"0": LAYER}),
    "list": Case(lambda: nn.Sequential(Mixes()), {"0": ()}, 2),
    "raw": Case(lambda: nn.Sequential(nn.Linear(DIM, DIM), Routes()), {"1": ()}),
    "root": Case(Routes, {"": ()}),
    "loop": Case(lambda: nn.Sequential(nn.Linear(DIM, DIM), Repeats()), {"1": ()}),
    "tied": Case(TiesByHand, {"": ("embedding.weight",)}),
    "checkpoint": Case(
        lambda: Checkpointed(ReadsLayer(), Mixes(), Routes()),
        {"blocks.0": LAYER, "blocks.[12]": ()},
        2,
    ),
}
