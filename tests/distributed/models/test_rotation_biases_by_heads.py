"""Attention that is given, or makes, a tensor of all heads, such as a bias of T5, is a block."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.rotate import RotationPolicy, rotate
from torch import Tensor, nn

from tests.distributed.comparing import Case, distances
from tests.distributed.conftest import StartRanks

CHANNELS, TIME = 4, 5
KEPT, RECOMPUTED = RotationPolicy(), RotationPolicy(recompute="block")


class Biased(nn.Module):
    """Attention that adds a bias of all heads, a given one or its own, and returns it."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.table = nn.Embedding(2 * TIME, num_heads)
        self.q, self.k, self.v = (nn.Linear(8, num_heads * CHANNELS) for _ in range(3))
        self.o = nn.Linear(num_heads * CHANNELS, 8)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, CHANNELS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if bias is None:
            places = torch.arange(x.shape[1])
            bias = self.table(places - places[:, None] + TIME).permute(2, 0, 1).unsqueeze(0)
        weights = (q @ k.mT + bias).softmax(-1)
        y = weights @ v if scale is None else weights @ v * scale
        return self.o(y.transpose(1, 2).flatten(2)), bias, weights


def rule_of(num_heads: int) -> AttentionRule:
    return AttentionRule(
        num_heads, counts=("num_heads",), by_heads=("bias", "scale"), tables=("table",)
    )


def given(num_heads: int, *, by_name: bool) -> Case:
    """A bias and a scale of all heads, by which each row of the batch is told apart."""
    x, bias = torch.randn(12, TIME, 8), torch.randn(12, num_heads, TIME, TIME)
    kwargs = {"scale": torch.randn(1, num_heads, 1, 1)} if by_name else {}
    module = Biased(num_heads)
    module.table.requires_grad_(False)  # else no gradient comes to it
    return Case(module, (x, bias), kwargs, rule=rule_of(num_heads), num_examined=2)


def own(num_heads: int) -> Case:
    return Case(Biased(num_heads), (torch.randn(12, TIME, 8),), rule=rule_of(num_heads))


def cases(num_heads: int) -> dict[str, Callable[[], Case]]:
    return {
        "own": partial(own, num_heads),
        "given": partial(given, num_heads, by_name=False),
        "scaled": partial(given, num_heads, by_name=True),
    }


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("policy", [KEPT, RECOMPUTED], ids=["kept", "recomputed"])
def test_each_slice_has_the_bias_of_its_heads(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy
) -> None:
    for found in ranks(num_ranks).run(distances, cases(2 * num_ranks), policy):
        assert max(found.values()) <= 1e-12, found


def passed_and_refused() -> tuple[bool, str]:
    """Whether an argument that is returned is the caller's own, and what is said of a wrong one."""
    module = Biased(4)
    rotate(module, mesh=make_mesh("cpu"), rule=rule_of(4))
    x, bias = torch.randn(2, TIME, 8), torch.randn(1, 4, TIME, TIME)
    _, returned, _ = module(x, bias)
    with pytest.raises(RotationError) as refused:
        module(x, bias[:, :2])
    return returned is bias, str(refused.value)


def test_an_argument_that_is_returned_is_the_callers(ranks: StartRanks) -> None:
    for is_own, told in ranks(2).run(passed_and_refused):
        assert is_own
        assert "an attention of 4 heads is called with bias of shape (1, 2, 5, 5)" in told
