"""Mixtures of experts: experts travel, and outputs and gradients equal those without rotation."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.layers.experts import Experts, ExpertsRule, MoE
from gyre_trainer.rotate import RotationPolicy, rotate_all
from gyre_trainer.shards.initialisation import materialize
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.comparing import BATCH, Case, distances
from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

DIM, HIDDEN = 6, 10


class OneLayer(nn.Module):
    """A user's experts: one matrix and one bias each, indexed, with the choice passed by keyword.

    The shared gain is a parameter that no rule cuts.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(num_experts, DIM, DIM))
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, *, expert: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        for number in range(self.matrices.shape[0]):
            output += F.linear(x * self.gain, self.matrices[number]) * (expert == number).unsqueeze(
                -1
            )
        return output


class Counting(OneLayer):
    """The same with the number of experts in an attribute, which counts choices."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self.num_experts = num_experts

    def forward(self, x: Tensor, *, expert: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        hits = F.one_hot(expert, self.num_experts + 1).sum(0).nonzero()
        for number in hits.flatten().tolist():
            if number < self.num_experts:
                rows = expert == number
                output[rows] = F.linear(x[rows] * self.gain, self.matrices[number])
        return output


def moe(num_experts: int, num_chosen: int) -> Case:
    return Case(
        MoE(DIM, HIDDEN, num_experts=num_experts, num_chosen=num_chosen),
        (torch.randn(BATCH, 5, DIM),),
    )


def nobody_chooses_most() -> Case:
    """Tokens that all choose experts of one slice; some of their choices name no expert at all."""
    chosen = torch.randint(0, 2, (BATCH, 3, 2))
    chosen[::2, :, 1] = -1
    inputs = torch.randn(BATCH, 3, DIM), chosen, torch.rand(BATCH, 3, 2)
    return Case(Experts(8, DIM, HIDDEN), inputs, rule=ExpertsRule())


def foreign_experts() -> Case:
    rule = ExpertsRule(weights=("matrices",), chosen="expert")
    return Case(
        OneLayer(5), (torch.randn(BATCH, DIM),), {"expert": torch.randint(0, 5, (BATCH,))}, rule
    )


def counting_experts() -> Case:
    rule = ExpertsRule(weights=("matrices",), chosen="expert", count="num_experts")
    return Case(
        Counting(5), (torch.randn(BATCH, DIM),), {"expert": torch.randint(0, 5, (BATCH,))}, rule
    )


CASES: dict[str, Callable[[], Case]] = {
    "one of eight": partial(moe, 8, 1),
    "two of twelve": partial(moe, 12, 2),
    "three of seven, which no ring divides": partial(moe, 7, 3),
    "two of two, fewer than ranks": partial(moe, 2, 2),
    "all of three": partial(moe, 3, 3),
    "nobody chooses most": nobody_chooses_most,
    "somebody else's": foreign_experts,
    "number in an attribute": counting_experts,
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "policy", [RotationPolicy(), RotationPolicy(recompute="block")], ids=["kept", "recomputed"]
)
def test_output_and_gradients_equal_those_without_rotation(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy
) -> None:
    for found in ranks(num_ranks).run(distances, CASES, policy):
        assert found == pytest.approx(dict.fromkeys(CASES, 0.0), abs=1e-12)


def step_of_experts() -> tuple[str, int, int, Tensor]:
    """The plan, the bytes that this rank sent, and elements and first values of the experts."""
    mesh = make_mesh("cpu")
    with torch.device("meta"):
        moe = MoE(DIM, HIDDEN, num_experts=7, num_chosen=2)
        model = nn.Sequential(nn.LayerNorm(DIM), moe)
    plan = rotate_all(model, mesh=mesh)
    materialize(model, seed=3)
    ring = ring_of(mesh)
    before = ring.bytes_sent
    model(torch.randn(4, DIM)).sum().backward()
    assert all(isinstance(part.grad, DTensor) for part in moe.experts.parameters())
    numel = sum(part.numel() for part in moe.experts.parameters())
    return str(plan), ring.bytes_sent - before, numel, whole(moe.experts.gate.detach())


def test_experts_travel_and_the_plan_says_so(ranks: StartRanks) -> None:
    gates = []
    for num_ranks in (1, 2, 4):
        told = ranks(num_ranks).run(step_of_experts)
        plan, _, numel, gate = told[0]
        gates.append(gate)
        assert "ExpertsRule" in plan
        assert "LinearRule" not in plan  # the router is whole
        assert sum(sent for _, sent, _, _ in told) == 3 * (num_ranks - 1) * numel * 4
    assert 0.9 < gates[0].abs().max() * DIM**0.5 <= 1
    assert all(torch.equal(gate, gates[0]) for gate in gates)
