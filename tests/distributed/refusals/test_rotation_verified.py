"""What is verified: each mode by itself, modules of any size, values that are no numbers."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.experts import Experts, ExpertsRule
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from gyre_trainer.rotation.rule import Recompute
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import told


class CountsWidth(MLP):
    """Divides by its hidden width, which is another one in a slice, in the given modes."""

    modes: tuple[bool, ...] = (True, False)

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output / self.up.weight.shape[0] if self.training in self.modes else output


def rotated(mlp: nn.Module, *, verify: bool | None = None) -> tuple[Any, str]:
    """The module inside a model that is rotated by its rule, and the printed plan."""
    model = nn.ModuleDict({"mlp": mlp})
    rules: Any = {"mlp": MLPRule()}
    plan = rotate_all(model, mesh=make_mesh("cpu"), rules=rules, verify=verify)
    return model["mlp"], str(plan)


def told_in_each_mode(verify: bool | None, wrong: bool) -> list[str]:
    """What calls end in: in the mode in which the rule is right, in the other one, in the first."""
    torch.manual_seed(0)
    mlp = CountsWidth(4, 8).double()
    mlp.modes = (wrong,)
    mlp, _ = rotated(mlp, verify=verify)
    x = torch.ones(2, 4).double()
    return [told(lambda: mlp.train(mode)(x)) for mode in (not wrong, wrong, not wrong)]  # noqa: B023


@pytest.mark.parametrize("verify", [None, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_rule_that_is_wrong_in_one_mode_alone_is_refused_there(
    ranks: StartRanks, wrong: bool, verify: bool | None
) -> None:
    for right, refused, again in ranks(2).run(told_in_each_mode, verify, wrong):
        assert (right, again) == ("", "")
        assert "CountsWidth computes something else when it rotates: output 0 is off by" in refused


def told_where_the_last_layer_begins_as_zero(recompute: Recompute) -> list[str]:
    """What calls end in until the last layer has values, and once it has."""
    torch.manual_seed(0)
    mlp = CountsWidth(4, 8).double()
    nn.init.zeros_(mlp.down.weight)
    if mlp.down.bias is not None:
        nn.init.zeros_(mlp.down.bias)
    model = nn.ModuleList([nn.Sequential(mlp)])
    rules: Any = {"0.0": MLPRule()}
    policy = RotationPolicy(recompute=recompute)
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy, rules=rules)
    x = torch.ones(2, 4).double().requires_grad_()
    texts = [told(lambda: model[0](x).sum().backward()) for _ in range(2)]
    with torch.no_grad():
        mlp.down.weight.add_(1)
    return [*texts, told(lambda: model[0](x))]


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_outputs_of_zero_tell_nothing_of_a_rule(ranks: StartRanks, recompute: Recompute) -> None:
    for first, second, refused in ranks(2).run(told_where_the_last_layer_begins_as_zero, recompute):
        assert (first, second) == ("", "")
        assert "CountsWidth computes something else when it rotates: output 0 is off by" in refused


class ReturnsZeros(MLP):
    """Returns zeros next to its output, as T5's attention does."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x.new_zeros(x.shape)


def modes_left(*, begins_as_zero: bool) -> list[int]:
    """In how many modes the module is still to be checked after each call in training."""
    torch.manual_seed(0)
    mlp = ReturnsZeros(4, 8)
    if begins_as_zero:
        nn.init.zeros_(mlp.down.weight)
    mlp, _ = rotated(mlp)
    left = []
    for _ in range(2):
        mlp(torch.ones(2, 4))
        left.append(len(mlp.unchecked_modes))
        with torch.no_grad():
            mlp.down.weight.add_(1)
    return left


def test_zeros_next_to_an_output_are_compared_once(ranks: StartRanks) -> None:
    """Each comparison gathers a whole layer at a time, so it must come to an end."""
    assert ranks(2).run(partial(modes_left, begins_as_zero=False)) == [[1, 1]] * 2
    assert ranks(2).run(partial(modes_left, begins_as_zero=True)) == [[2, 1]] * 2


LARGE = 2100  # with 1,024 outside, 4,300,800 parameters


def told_of_a_large_module(verify: bool | None) -> tuple[str, str, float]:
    """What the plan says, what the call ends in, and how far its output is off."""
    torch.manual_seed(0)
    mlp = CountsWidth(1024, LARGE)
    x = torch.ones(1, 1024)
    expected = mlp(x).detach()
    mlp, plan = rotated(mlp, verify=verify)
    outputs: list[Tensor] = []
    refused = told(lambda: outputs.append(mlp(x).detach()))
    return plan, refused, max((float((x - expected).abs().max()) for x in outputs), default=0.0)


@pytest.mark.parametrize("verify", [None, True])
def test_blocks_are_verified_at_every_size(ranks: StartRanks, verify: bool | None) -> None:
    for plan, refused, off in ranks(2).run(told_of_a_large_module, verify):
        assert "verif" not in plan
        assert "CountsWidth computes something else when it rotates: output 0 is off" in refused
        assert off == 0  # there is no output


def plan_with_a_large_layer() -> str:
    rules: Any = {"0": LinearRule()}
    return str(
        rotate_all(
            nn.Sequential(nn.Linear(1024, 4100)), mesh=make_mesh("cpu"), rules=rules, sync_from=0
        )
    )


def test_the_plan_names_a_layer_that_is_too_large_to_be_verified(ranks: StartRanks) -> None:
    line = "Linear: too large to be verified at its first calls, which verify=True does: 0"
    for plan in ranks(2).run(plan_with_a_large_layer):
        assert plan.endswith(line)


class Overflows(MLP):
    """Returns an infinity in each row where it has not all of its width."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.up.weight.shape[0] == 8 else y * torch.tensor([1.0, 1.0, torch.inf, 1.0])


def told_of_no_numbers() -> list[str]:
    """What calls end in whose outputs are no numbers in places, and whether they are there."""
    torch.manual_seed(0)
    texts = []
    for kind, value, changed in (
        (MLP, torch.nan, "x"),
        (MLP, torch.inf, "x"),
        (MLP, torch.nan, "up.weight"),
        (MLP, torch.nan, "down.weight"),
        (Overflows, 1.0, "x"),
    ):
        mlp, x = kind(4, 8), torch.ones(3, 4)
        with torch.no_grad():
            (x if changed == "x" else mlp.get_parameter(changed))[1, 2] = value
        expected = mlp(x).detach()
        mlp, _ = rotated(mlp)
        outputs: list[Tensor] = []
        refused = told(lambda: outputs.append(mlp(x).detach()))  # noqa: B023
        for output in outputs:
            torch.testing.assert_close(output, expected, equal_nan=True)
        texts.append(refused)
    return texts


def test_values_that_are_no_numbers_are_compared_like_others(ranks: StartRanks) -> None:
    for *equal, differs in ranks(2).run(told_of_no_numbers):
        assert equal == [""] * 4
        assert "computes something else when it rotates: output 0 is finite in other" in differs


class DiffersOnOneRank(MLP):
    """On rank 1 alone, it divides by a width that is another one in a slice, if it is told to."""

    is_wrong = True

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        is_wrong = self.is_wrong and dist.get_rank() == 1
        return output / self.up.weight.shape[0] if is_wrong else output


class AddsAnInputOnOneRank(MLP):
    """On rank 1 alone, its output is not linear in its last weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x if dist.get_rank() == 1 else 0)


@torch.no_grad()
def told_where_one_rank_refuses() -> list[str]:
    """What two calls end in of which rank 1 alone refuses one, and one that all make after them."""
    torch.manual_seed(0)
    wrong, _ = rotated(DiffersOnOneRank(4, 8).eval(), verify=True)
    other, _ = rotated(AddsAnInputOnOneRank(4, 8).eval(), verify=False)
    right, _ = rotated(MLP(4, 8).eval(), verify=True)
    return [told(lambda: each(torch.ones(2, 4))) for each in (wrong, other, right)]  # noqa: B023


def test_all_ranks_learn_at_once_that_one_refuses(ranks: StartRanks) -> None:
    """The ranks live on, and their ring works afterwards."""
    results = ranks(3).run(told_where_one_rank_refuses)
    for rank, (compared, proven, right) in enumerate(results):
        assert compared.startswith("rank 1 refuses ") == (rank != 1)
        assert "DiffersOnOneRank computes something else when it rotates: output 0 is" in compared
        assert proven.startswith("rank 1 refuses ") == (rank != 1)
        assert "AddsAnInputOnOneRank computes something else when it rotates" in proven
        assert right == ""


class CountsExperts(Experts):
    """Divides by the number of its experts, which is another one in a slice."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights) / self.down.shape[0]


def told_by_the_proof(wrong: bool, verify: bool | None) -> list[str]:
    """What the first call ends in, and the second one."""
    torch.manual_seed(0)
    experts = nn.ModuleDict({"experts": (CountsExperts if wrong else Experts)(4, 4, 8)}).double()
    kind = CountsExperts if wrong else Experts
    rotate_all(experts, mesh=make_mesh("cpu"), rules={kind: ExpertsRule()}, verify=verify)
    x = torch.randn(3, 4).double().requires_grad_()
    chosen, weights = torch.tensor([[0, 2], [1, 3], [3, 0]]), torch.rand(3, 2).double()
    return [told(lambda: experts["experts"](x, chosen, weights).sum().backward()) for _ in range(2)]


def test_a_rule_that_does_not_fit_is_refused_at_each_call(ranks: StartRanks) -> None:
    for verify in (True, None):
        for texts in ranks(2).run(told_by_the_proof, True, verify):
            for text in texts:
                assert (
                    "CountsExperts computes something else when it rotates: output 0 is off" in text
                )
        assert ranks(2).run(told_by_the_proof, False, verify) == [["", ""], ["", ""]]


class DropsInside(MLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(x)), 0.5, self.training)
        output: Tensor = self.down(hidden)
        return output


def told_of_dropout() -> list[str]:
    """What the first calls end in, in evaluation and in training."""
    mlp = rotate(DropsInside(4, 8), mesh=make_mesh("cpu"), rule=MLPRule(), sync_from=0)
    x = torch.randn(3, 4)
    return [told(lambda: mlp.train(mode)(x)) for mode in (False, True)]  # noqa: B023


def test_a_rule_for_a_module_that_draws_random_numbers_is_refused(ranks: StartRanks) -> None:
    for in_evaluation, in_training in ranks(2).run(told_of_dropout):
        assert in_evaluation == ""
        assert "RotatedDropsInside draws random numbers, such as dropout's" in in_training
