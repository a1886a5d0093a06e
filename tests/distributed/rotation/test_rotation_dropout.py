"""Dropout masks differ among ranks and slices, and repeat in backward."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import RotationPolicy, Rules, rotate_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tests.distributed.comparing import BATCH, Case, apart, mine, outcome
from tests.distributed.conftest import StartRanks
from tests.distributed.training import default_dtype


class FeedForward(nn.Module):
    """An MLP with dropout on its hidden width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(12, 26), nn.Dropout(0.4), nn.Linear(26, 12)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.drop(torch.tanh(self.up(x))))
        return output


class Dropping(nn.Module):
    """Dropout in attention, in hidden layers and on the residual stream."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.3, batch_first=True)
        self.feed_forward = FeedForward()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)
        output: Tensor = x + self.drop(self.feed_forward(x))
        return output


@dataclass(frozen=True)
class Way:
    """How a model with dropout is built and run."""

    policy: RotationPolicy
    checkpointed: bool = False


def run(way: Way, mesh: DeviceMesh, seed: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(3)
    with default_dtype(torch.float64):
        one = Case(Dropping(checkpointed=way.checkpointed), (torch.randn(BATCH, 5, 12),))
    rules: Rules = {FeedForward: MLPRule(drops_out=True)}
    rotate_all(one.module, mesh=mesh, policy=way.policy, rules=rules)
    torch.manual_seed(seed)
    return outcome(one.module, one, partial(mine, batch_dim=0))


def independent() -> dict[str, dict[str, Tensor]]:
    """Outcomes with masks that each rank draws by itself."""
    mesh = make_mesh("cpu")
    policy = RotationPolicy()
    return {
        "kept": run(Way(policy), mesh),
        "again": run(Way(policy), mesh),
        "recomputed": run(Way(replace(policy, recompute="block")), mesh),
        "checkpointed": run(Way(policy, checkpointed=True), mesh),
        "with another seed": run(Way(policy), mesh, seed=9),
    }


def test_independent_masks_repeat_in_backward(ranks: StartRanks) -> None:
    """A recomputed slice that drew other masks would have other gradients."""
    for found in ranks(2).run(independent):
        for name in ("again", "recomputed", "checkpointed"):
            assert (
                max(apart(found[name][each], found["kept"][each]) for each in found["kept"])
                <= 1e-12
            )
        assert apart(found["with another seed"]["output 0"], found["kept"]["output 0"]) > 0.1


def hidden_zeros() -> Tensor:
    """Which hidden entries this rank drops, over all slices; every rank has the same input."""
    with default_dtype(torch.float64):
        module = FeedForward()
    with torch.no_grad():
        module.up.weight.zero_()
        module.up.bias.fill_(1.0)
        module.down.weight.copy_(torch.eye(26)[:12])
        module.down.bias.zero_()
    rotate_all(module, mesh=make_mesh("cpu"), rules={FeedForward: MLPRule(drops_out=True)})
    torch.manual_seed(0)
    hidden: Tensor = module(torch.zeros(200, 12, dtype=torch.float64))
    return hidden.detach().eq(0)


def test_ranks_and_slices_draw_their_own_masks_at_the_given_rate(ranks: StartRanks) -> None:
    zeros = ranks(3).run(hidden_zeros)
    for one, other in pairwise(zeros):
        assert not torch.equal(one, other)
    for each in zeros:
        assert each.double().mean().item() == pytest.approx(0.4, abs=0.05)
        assert not torch.equal(each[:, :1], each[:, 9:10])  # of the first and the second slice
