"""A rule that computes something else, or by chance, is refused."""

import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.experts import Experts, ExpertsRule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import rotate, rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import DropsInside, told


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


def told_of_dropout() -> list[str]:
    """What the first calls end in, in evaluation and in training."""
    mlp = rotate(DropsInside(4, 8), mesh=make_mesh("cpu"), rule=MLPRule(), sync_from=0)
    x = torch.randn(3, 4)
    return [told(lambda: mlp.train(mode)(x)) for mode in (False, True)]  # noqa: B023


def test_a_rule_for_a_module_that_draws_random_numbers_is_refused(ranks: StartRanks) -> None:
    for in_evaluation, in_training in ranks(2).run(told_of_dropout):
        assert in_evaluation == ""
        assert "RotatedDropsInside draws random numbers, such as dropout's" in in_training
