"""A rule that computes something else is refused: values and gradients are compared."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.experts import Experts, ExpertsRule
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import rotate, rotate_all
from gyre_trainer.rotation.rule import ModuleSlice
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


class WrongBias(MLPRule):
    """The gradient of one bias is off, which is far smaller than those of the weights."""

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Any:
        bias = current.weights["up.bias"]
        return MLPRule.run(self, current, *args, **kwargs) + 1e-4 * (bias - bias.detach()).sum()


def told_of_a_small_gradient(rule: MLPRule) -> str:
    torch.manual_seed(0)
    mlp = rotate(MLP(4, 8, bias=True).double(), mesh=make_mesh("cpu"), rule=rule)
    x = 1e8 * torch.rand(3, 4).double()
    return told(lambda: mlp(x))


def test_a_gradient_that_is_small_beside_the_others_is_verified_too(ranks: StartRanks) -> None:
    for text in ranks(2).run(told_of_a_small_gradient, WrongBias()):
        assert "computes something else when it rotates: the gradient of up.bias is off" in text
    assert ranks(2).run(told_of_a_small_gradient, MLPRule()) == ["", ""]


class _Doubled(torch.autograd.Function):
    """The same values, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class LosesGradients(MLPRule):
    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Any:
        return super().run(current, args[0].detach())


class DoublesGradients(MLPRule):
    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Any:
        return _Doubled.apply(super().run(current, *args))  # type: ignore[no-untyped-call]


class CountsWidth(DropsInside):
    """Divides by its hidden width, which is another one in a slice; drops out in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.up.weight.shape[0]


class AlwaysDrops(MLP):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.dropout(self.up(x), 0.5))
        return output


def told_of_wrong_gradients() -> list[str]:
    """What the first call in training ends in, and the one that draws random numbers warns of."""
    mesh, texts = make_mesh("cpu"), []
    cases: list[tuple[type[MLP], MLPRule, bool]] = [
        (MLP, MLPRule(), True),
        (MLP, LosesGradients(), True),
        (MLP, DoublesGradients(), False),
        (DropsInside, MLPRule(), True),
        (CountsWidth, MLPRule(), False),
        (AlwaysDrops, MLPRule(), False),
    ]
    for kind, rule, takes_grad in cases:
        torch.manual_seed(0)
        mlp = rotate(kind(4, 8).double(), mesh=mesh, rule=rule)
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=takes_grad)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            texts.append(told(lambda: mlp(x)) or " ".join(str(each.message) for each in seen))  # noqa: B023
        assert all(each.training for each in mlp.modules())
    return texts


def test_a_rule_that_is_wrong_in_its_gradients_alone_is_refused(ranks: StartRanks) -> None:
    for right, loses, doubles, drops, counts, always in ranks(2).run(told_of_wrong_gradients):
        assert right == ""
        assert "computes something else when it rotates: the gradient of input 0 is off" in loses
        assert "the gradient of up.weight is off by" in doubles
        assert drops == ""  # compared in evaluation, because it draws random numbers in training
        assert "CountsWidth computes something else when it rotates: output 0 is off" in counts
        assert "AlwaysDrops draws random numbers in evaluation, too, so it was not" in always
