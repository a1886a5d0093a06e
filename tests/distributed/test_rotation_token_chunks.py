"""Recomputation takes some tokens of an MLP at a time: nothing changes but how much is alive at once."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.accounting.live_bytes import LiveBytes
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLP, GatedMLP, MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import BATCH, Case, distances
from tests.distributed.conftest import StartRanks
from tests.distributed.test_rotation_modules import FeedForward
from tests.distributed.training import whole

AT_ONCE = 4
SPLIT = RotationPolicy(recompute=True, recompute_tokens=AT_ONCE)


class Shifted(nn.Module):
    """An MLP that sees the token before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.up(x + x.roll(1, -2)).tanh())
        return output


class Flat(MLP):
    """Its output has other leading dims than its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2))


class Watched(MLP):
    """Remembers how many tokens it computed at once while gradients were asked for."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__(6, 12, bias=bias)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.append(tuple(x.shape))
        return super().forward(x)


def x(*shape: int) -> tuple[Tensor]:
    return (torch.randn(*shape),)


def plain() -> Case:
    return Case(MLP(6, 12), x(BATCH, 5, 6))


def tokens_in_one_dim() -> Case:
    return Case(MLP(6, 12, bias=True), x(BATCH, 6))


def gated() -> Case:
    return Case(GatedMLP(6, 12, bias=True), x(BATCH, 1, 3, 6))


def foreign() -> Case:
    return Case(FeedForward(), x(BATCH, 3, 6), rule=MLPRule(ups=("fc1",), down="fc2"))


def not_contiguous() -> Case:
    return Case(MLP(6, 12), (torch.randn(BATCH, 6, 5).transpose(1, 2),))


def mixing_tokens() -> Case:
    return Case(Shifted(), x(BATCH, 5, 6), rule=MLPRule(mixes_tokens=True))


def other_leading_dims() -> Case:
    return Case(Flat(6, 12), x(BATCH, 1, 6), rule=MLPRule())


def half_frozen_after_a_norm() -> Case:
    module = nn.Sequential(nn.LayerNorm(6), MLP(6, 12))
    module[1].up.requires_grad_(False)
    return Case(module, x(BATCH, 5, 6))


CASES = {
    case.__name__: case
    for case in (
        plain,
        tokens_in_one_dim,
        gated,
        foreign,
        not_contiguous,
        mixing_tokens,
        other_leading_dims,
        half_frozen_after_a_norm,
    )
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_one_call_equals_one_process(ranks: StartRanks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(distances, CASES, SPLIT):
        assert found.keys() == CASES.keys()
        assert {name: value for name, value in found.items() if not value <= 1e-12} == {}


def test_bfloat16_travels(ranks: StartRanks) -> None:
    policy = RotationPolicy(recompute=True, recompute_tokens=AT_ONCE, compute_dtype=torch.bfloat16)
    for found in ranks(2).run(distances, CASES, policy):
        assert {name: value for name, value in found.items() if not 1e-5 < value <= 0.1} == {}


Trained = tuple[dict[str, Tensor], list[tuple[int, ...]], int, int]


def trained(policy: RotationPolicy) -> Trained:
    """Gradients; shapes that backward computed with; bytes that were sent; the most that were alive in backward."""
    mesh = make_mesh("cpu")
    torch.manual_seed(1)
    watched = Watched()
    model = nn.Sequential(nn.LayerNorm(6), watched)
    rotate(watched, mesh=mesh, policy=policy, rule=MLPRule())
    rotate(model, mesh=mesh, policy=policy)
    torch.manual_seed(2 + dist.get_rank())
    x = torch.randn(2, 5, 6, requires_grad=True)
    before = ring_of(mesh).bytes_sent
    loss = model(x).square().sum()
    watched.seen.clear()
    with LiveBytes() as live:
        loss.backward()
    sent = ring_of(mesh).bytes_sent - before
    assert x.grad is not None
    grads = {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}
    return grads | {"x": x.grad}, watched.seen, sent, live.peak


def test_a_slice_is_computed_for_few_tokens_at_a_time(ranks: StartRanks) -> None:
    """As evenly as can be, with the same bytes on the wire, the same bits in every run, and less in memory."""
    policies = RotationPolicy(recompute=True), SPLIT, SPLIT
    for together, split, again in zip(*(ranks(2).run(trained, policy) for policy in policies), strict=True):
        assert together[1] == [(2, 5, 6)] * 2
        assert split[1] == [(1, 3, 6), (1, 3, 6), (1, 4, 6)] * 2
        assert split[2] == together[2]
        assert split[3] < together[3]
        for name, grad in split[0].items():
            torch.testing.assert_close(grad, together[0][name], rtol=1e-5, atol=1e-6)
            assert torch.equal(grad, again[0][name]), name


def shapes_of(model: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    watched = next(module for module in model.modules() if isinstance(module, Watched))
    rotate_all(model, mesh=make_mesh("cpu"), policy=SPLIT, rules={Watched: MLPRule()})
    loss = model(x).sum()
    watched.seen.clear()
    loss.backward()
    return watched.seen


def test_few_tokens_are_computed_together(ranks: StartRanks) -> None:
    assert ranks(2).run(shapes_of, Watched(), torch.randn(2, 2, 6)) == [[(2, 2, 6)] * 2] * 2


def error_of_first_call(tokens: int, *, recompute: bool = True) -> str | None:
    module = rotate(
        Shifted(), mesh=make_mesh("cpu"), policy=RotationPolicy(recompute=recompute, recompute_tokens=AT_ONCE), rule=MLPRule()
    )
    module(torch.randn(2, 6))  # too few to tell
    try:
        module(torch.randn(1, tokens, 6))
    except RotationError as error:
        return str(error)
    return None


def test_a_module_that_mixes_tokens_is_refused_by_name_where_it_would_matter(ranks: StartRanks) -> None:
    for found in ranks(2).run(error_of_first_call, AT_ONCE + 1):
        assert found is not None
        assert "Shifted mixes tokens" in found
        assert "mixes_tokens=True" in found
    assert ranks(2).run(error_of_first_call, AT_ONCE) == [None] * 2
    assert ranks(2).run(partial(error_of_first_call, recompute=False), AT_ONCE + 1) == [None] * 2


def test_no_token_at_a_time_is_refused() -> None:
    with pytest.raises(RotationError, match=r"recompute_tokens=0"):
        RotationPolicy(recompute_tokens=0)
