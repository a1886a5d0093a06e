"""Models of one's own as one graph: torch's attention, and parameters that a forward reads."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import ReadRule, compile_whole, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.test_rotation_whole_graph import BACKEND, begin, mine, num_graphs
from tests.distributed.training import default_dtype, whole

WIDTH, NUM_TOKENS = 8, 11


class TiesByHand(nn.Module):
    """Calls a table, and reads it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_TOKENS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.table(tokens).sin(), self.table.weight)


class Attends(nn.Module):
    """Torch's layer, and its attention with keys of another width and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_TOKENS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=6, vdim=4)

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.layer(self.table(tokens)).transpose(0, 1)
        padding = tokens == 0
        output, weights = self.attention(y, y[..., :6], y[..., :4], key_padding_mask=padding)
        return torch.cat([output.flatten(), weights.flatten()])


class ReadsItsOwn(nn.Module):
    """Torch's bilinear layer, with a parameter of its own that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.both = nn.Embedding(NUM_TOKENS, WIDTH), nn.Bilinear(WIDTH, WIDTH, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        output: Tensor = self.both(x, x.flip(0))
        return output


OWN: dict[str, tuple[type[nn.Module], Any]] = {
    "ties by hand": (TiesByHand, None),
    "attends": (Attends, None),
    "reads its own": (ReadsItsOwn, {"both": ReadRule()}),
}


def outcome(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """The loss and all gradients."""
    loss = model(tokens).square().mean()
    loss.backward()
    found = [loss.detach(), *(whole(each.grad) for each in model.parameters())]  # type: ignore[arg-type]
    model.zero_grad()
    return found


def compared(name: str) -> tuple[list[float], list[int]]:
    """How far a model, and then its copy, are from the same ones without a compiler; the graphs."""
    begin()
    kind, rules = OWN[name]
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = kind()
    rotate_all(model, mesh=make_mesh("cpu"), rules=rules)
    plain = deepcopy(model)
    compile_whole(model, backend=BACKEND)
    tokens = torch.randint(NUM_TOKENS, (6, 4), generator=torch.Generator().manual_seed(1))
    tokens[0] = torch.arange(1, 5)
    far, graphs = [], []
    for step in range(4):
        if step == 3:
            with torch.no_grad():
                for each in (model, plain):
                    for parameter in each.parameters():
                        parameter.mul_(0.5)
            model = deepcopy(model)
            outcome(model, mine(tokens))  # of a copy that reads, without a compiler
        pairs = zip(outcome(model, mine(tokens)), outcome(plain, mine(tokens)), strict=True)
        far.append(max(apart(*both) for both in pairs))
        graphs.append(num_graphs())
    return far, graphs


@pytest.mark.parametrize("name", OWN)
def test_own_models_are_one_graph(ranks: StartRanks, name: str) -> None:
    for far, graphs in ranks(3 if name == "attends" else 2).run(compared, name):
        assert max(far) <= 1e-14
        assert graphs == [0, 1, 1, 2]  # the second one is of the copy
