"""Modules and rules that rotation refuses, and the words of each refusal."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import Attention, AttentionRule
from gyre_trainer.layers.experts import Experts, ExpertsRule
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import rotate, rotate_all
from torch import Tensor, nn

from tests.distributed.training import EVEN, Variant, build, rotated_gpt


def told(step: Callable[[], Any]) -> str:
    """The text of the refusal that a step ends in; empty where it is not refused."""
    try:
        step()
    except RotationError as error:
        return str(error)
    return ""


Program = Callable[[], None]
REFUSED: list[tuple[Program, type[Exception], tuple[str, ...]]] = []


def refused_with(
    *words: str, error: type[Exception] = RotationError
) -> Callable[[Program], Program]:
    """Note that a program ends in this error, whose text has these words."""

    def note(program: Program) -> Program:
        REFUSED.append((program, error, words))
        return program

    return note


class Residual(nn.Module):
    """An MLP with its residual inside, so the slices' outputs do not add up."""

    def __init__(self, ends_in: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.ends_in = nn.Linear(4, 8), nn.Linear(8, 4), ends_in

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.ends_in(self.down(self.up(x)))
        return output


class AddsItsInput(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class TwoOutputs(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x.clone()


class BestFeature(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


@refused_with("Attention", "1 key/value heads", "2 ranks", "one by one")
def fewer_heads_than_ranks() -> None:
    rotate(Attention(12, 1, 1), mesh=make_mesh("cpu"), rule=AttentionRule(1))


@refused_with("Linear", "rotated already")
def rotate_twice() -> None:
    layer = rotate(nn.Linear(4, 4), mesh=make_mesh("cpu"))
    rotate(layer, mesh=make_mesh("cpu"))


@refused_with("GPT", "rotated already")
def rotate_model_twice() -> None:
    rotate(rotated_gpt(Variant()), mesh=make_mesh("cpu"))


@refused_with("MLP.up", "rotated already")
def rotate_inside_and_around() -> None:
    mlp = MLP(4, 8)
    rotate(mlp.up, mesh=make_mesh("cpu"))
    rotate(mlp, mesh=make_mesh("cpu"))


@refused_with("MLP.gate")
def missing_layer() -> None:
    rotate(MLP(4, 8), mesh=make_mesh("cpu"), rule=MLPRule(ups=("gate",)))


@refused_with("Residual.ends_in", "p=0.1")
def dropout_inside() -> None:
    rotate(Residual(nn.Dropout(0.1)), mesh=make_mesh("cpu"), rule=MLPRule())


def first_call_of(module: nn.Module) -> None:
    rotate(module, mesh=make_mesh("cpu"), rule=MLPRule())
    module(torch.randn(3, 4))


@refused_with("AddsItsInput", "something else", "Keep residuals")
def first_call_with_a_residual() -> None:
    first_call_of(AddsItsInput(nn.Identity()))


REFUSED += [
    (partial(first_call_of, Residual(end)), RotationError, ("Residual", "Keep residuals"))
    for end in (nn.LayerNorm(4), nn.ReLU())
]


@refused_with("MLP", "up.weight", "tied")
def tied_and_cut_in_another_way() -> None:
    embedding, mlp = nn.Embedding(8, 4), MLP(4, 8)
    mlp.up.weight = embedding.weight
    rotate(embedding, mesh=make_mesh("cpu"))
    rotate(mlp, mesh=make_mesh("cpu"))


@refused_with("head.weight", "tied")
def tied_and_not_rotated() -> None:
    model = build(replace(EVEN, tie_embeddings=True))
    rotate(model.embedding, mesh=make_mesh("cpu"))
    rotate(model, mesh=make_mesh("cpu"))


@refused_with("Experts", "no parameter bias")
def experts_of_another_name() -> None:
    rotate(Experts(4, 4, 8), mesh=make_mesh("cpu"), rule=ExpertsRule(weights=("gate", "bias")))


@refused_with("Experts", "different numbers", "'up': (3, 8, 4)")
def experts_of_different_numbers() -> None:
    experts = Experts(4, 4, 8)
    experts.up = nn.Parameter(torch.zeros(3, 8, 4))
    rotate(experts, mesh=make_mesh("cpu"))


@refused_with("ExpertsRule(chosen='who')", "without that argument")
def experts_that_nobody_chooses() -> None:
    experts = rotate(Experts(4, 4, 8), mesh=make_mesh("cpu"), rule=ExpertsRule(chosen="who"))
    experts(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


@refused_with("MLP.down.weight", "float64", "float32")
def mixed_dtypes() -> None:
    mlp = MLP(4, 8)
    mlp.down.to(torch.float64)
    rotate(mlp, mesh=make_mesh("cpu"))


@refused_with("Embedding", "max_norm")
def embedding_with_norms() -> None:
    rotate(nn.Embedding(8, 4, max_norm=1.0), mesh=make_mesh("cpu"))


@refused_with("Sequential.0.weight", "no shape yet")
def no_shape_yet() -> None:
    rotate_all(nn.Sequential(nn.LazyLinear(4)), mesh=make_mesh("cpu"))


@refused_with("MLP", "up.weight, down.weight")
def one_parameter_in_two_places() -> None:
    mlp = MLP(4, 4)
    mlp.down.weight = mlp.up.weight
    rotate(mlp, mesh=make_mesh("cpu"))


@refused_with("'1'", "no module")
def rule_for_nothing() -> None:
    rotate_all(nn.Sequential(MLP(4, 8)), mesh=make_mesh("cpu"), rules={"1": None})


@refused_with("Conv2d", "no module")
def rule_for_no_class() -> None:
    rotate_all(nn.Sequential(MLP(4, 8)), mesh=make_mesh("cpu"), rules={nn.Conv2d: None})


@refused_with("Linear.weight", "int64")
def integers_that_rotate() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int64), requires_grad=False)
    rotate(layer, mesh=make_mesh("cpu"))


@refused_with("(2, 4)", "weight")
def output_of_another_width() -> None:
    rotate(TwoOutputs(4, 4), mesh=make_mesh("cpu"), rule=LinearRule())(torch.randn(2, 4))


@refused_with("BestFeature", "int64", "floating-point")
def output_of_integers() -> None:
    rotate(BestFeature(4, 4), mesh=make_mesh("cpu"), rule=LinearRule())(torch.randn(2, 4))


@refused_with("up.weight", "torch.bfloat16", "before it is rotated")
def converted_later() -> None:
    mlp = rotate(MLP(4, 8), mesh=make_mesh("cpu"), sync_from=0)
    mlp.bfloat16()


@refused_with("shape (4,)", "step after backward")
def step_in_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    rotate_all(model, mesh=make_mesh("cpu"), sync_from=0)
    weight = model.get_parameter("1.weight")
    weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    model(torch.ones(2, 4)).sum().backward()
