"""Code that people write: activations in place, weights of hooks, odd outputs and arguments."""

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import BATCH, Case, distances
from tests.distributed.conftest import StartRanks

DIM = 6


def x() -> Tensor:
    return torch.randn(BATCH, 3, DIM)


def in_place() -> Case:
    """A linear layer with a bias, whose output for several dims is a view, and then a write."""
    layers = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(inplace=True), nn.Linear(8, DIM))
    return Case(layers, (x(),))


class Normed(nn.Module):
    """Two layers whose weights hooks compute before each call."""

    def __init__(self) -> None:
        super().__init__()
        normed: Any = nn.utils.weight_norm
        with warnings.catch_warnings(action="ignore"):  # it is old, and in use
            self.first, self.second = normed(nn.Linear(DIM, 8)), normed(nn.Linear(8, DIM))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x).tanh())
        return output


def normed() -> Case:
    return Case(nn.Sequential(Normed(), nn.Linear(DIM, DIM)), (x(),))


@dataclass
class Output:
    hidden: Tensor


class Pair(NamedTuple):
    one: Tensor
    other: Output


class Returns(nn.Module):
    """An MLP that returns what torch does not look into."""

    def __init__(self, form: type = Output) -> None:
        super().__init__()
        self.form, self.up, self.down = form, nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def forward(self, x: Tensor) -> Any:
        output = Output(self.down(self.up(x).relu()))
        return output if self.form is Output else Pair(output.hidden, output)


class ReadsOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Returns(Output), Returns(Pair)

    def forward(self, x: Tensor) -> Tensor:
        pair = self.two(self.one(x).hidden)
        output: Tensor = pair.one + 2 * pair.other.hidden
        return output


def returns() -> Case:
    return Case(ReadsOutputs(), (x(),))


class Biased(nn.Module):
    """Attention that may get a bias for all of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 3
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=position_bias)
        output: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return output


class GivesBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.attention = nn.Parameter(torch.randn(2, 9)), Biased()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, self.bias.view(1, 2, 3, 3))
        return output


def biased() -> Case:
    return Case(GivesBias(), (x(),))


CASES = {"in place": in_place, "normed": normed, "returns": returns, "biased": biased}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_own_code_trains_exactly(ranks: StartRanks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(distances, CASES, RotationPolicy()):
        assert max(found.values()) <= 1e-12, found


def told() -> list[str]:
    mesh, messages = make_mesh("cpu"), []
    hooked = nn.Sequential(nn.Linear(DIM, DIM))
    weight: Any = hooked.get_parameter("0.weight")
    weight.register_hook(torch.zeros_like)
    with pytest.raises(RotationError) as refusal:
        rotate_all(hooked, mesh=mesh)
    messages.append(str(refusal.value))
    for form in (Output, Pair):
        block = rotate(Returns(form), mesh=mesh, rule=MLPRule(ups=("up",)))
        with pytest.raises(RotationError) as refusal:
            block(torch.randn(2, DIM))
        messages.append(str(refusal.value))
    attention = AttentionRule(2, inputs=("q", "k", "v"), output="o")
    block = rotate(Biased(), mesh=mesh, rule=attention)
    with pytest.raises(RuntimeError, match="shape") as failed:
        block(torch.randn(2, 3, DIM), torch.zeros(1, 2, 3, 3))
    return [*messages, *failed.value.__notes__]


def test_what_slices_cannot_compute_is_told_by_name(ranks: StartRanks) -> None:
    for hook, output, pair, bias in ranks(2).run(told):
        assert hook.startswith("Sequential.0.weight has a hook on its gradient")
        assert "Register hooks after rotating" in hook
        assert "returns Output; a rotated module must return floating-point tensors" in output
        assert "returns Output" in pair
        assert "find_blocks=False" in pair
        assert "rotates as a whole, by AttentionRule" in bias
        assert "let the layers inside rotate one by one" in bias
