"""Refused modules: every rank raises an error that names module, parameter or rank."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import MeshError, RotationError
from gyre_trainer.layers.attention import Attention, AttentionRule, Heads
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.layers.moe import Experts, ExpertsRule
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from gyre_trainer.shards.sharded_init import materialize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.conftest import StartRanks
from tests.distributed.training import EVEN, Variant, build, rotated_gpt


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
        return super().forward(x), x


class BestFeature(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


def one_axis_of_two() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "rotate"))
    rotate(nn.Linear(4, 4), mesh=mesh["rotate"])


def axes_in_another_order() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rotate", "replicate"))
    rotate(nn.Linear(4, 4), mesh=mesh)


def three_replicas_on_two_ranks() -> None:
    make_mesh("cpu", replicate=3)


def heads_that_do_not_divide() -> None:
    rotate(Attention(12, Heads(6, 3)), mesh=make_mesh("cpu"), rule=AttentionRule(3))


def more_ranks_than_kv_heads() -> None:
    rotate(Attention(12, Heads(6, 1)), mesh=make_mesh("cpu"), rule=AttentionRule(1))


def rotate_twice() -> None:
    layer = rotate(nn.Linear(4, 4), mesh=make_mesh("cpu"))
    rotate(layer, mesh=make_mesh("cpu"))


def rotate_model_twice() -> None:
    rotate(rotated_gpt(Variant()), mesh=make_mesh("cpu"))


def rotate_inside_and_around() -> None:
    mlp = MLP(4, 8)
    rotate(mlp.up, mesh=make_mesh("cpu"))
    rotate(mlp, mesh=make_mesh("cpu"))


def missing_layer() -> None:
    rotate(MLP(4, 8), mesh=make_mesh("cpu"), rule=MLPRule(ups=("gate",)))


def dropout_inside() -> None:
    rotate(Residual(nn.Dropout(0.1)), mesh=make_mesh("cpu"), rule=MLPRule())


def first_call_of(module: nn.Module) -> None:
    rotate(module, mesh=make_mesh("cpu"), rule=MLPRule())
    module(torch.randn(3, 4))


def tied_and_cut_in_another_way() -> None:
    embedding, mlp = nn.Embedding(8, 4), MLP(4, 8)
    mlp.up.weight = embedding.weight
    rotate(embedding, mesh=make_mesh("cpu"))
    rotate(mlp, mesh=make_mesh("cpu"))


def tied_and_not_rotated() -> None:
    model = build(replace(EVEN, tie_embeddings=True))
    rotate(model.embedding, mesh=make_mesh("cpu"))
    rotate(model, mesh=make_mesh("cpu"))


def experts_of_another_name() -> None:
    rotate(Experts(4, 4, 8), mesh=make_mesh("cpu"), rule=ExpertsRule(weights=("gate", "bias")))


def experts_of_different_numbers() -> None:
    experts = Experts(4, 4, 8)
    experts.up = nn.Parameter(torch.zeros(3, 8, 4))
    rotate(experts, mesh=make_mesh("cpu"))


def experts_that_nobody_chooses() -> None:
    experts = rotate(Experts(4, 4, 8), mesh=make_mesh("cpu"), rule=ExpertsRule(chosen="who"))
    experts(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


def mixed_dtypes() -> None:
    mlp = MLP(4, 8)
    mlp.down.to(torch.float64)
    rotate(mlp, mesh=make_mesh("cpu"))


def embedding_with_norms() -> None:
    rotate(nn.Embedding(8, 4, max_norm=1.0), mesh=make_mesh("cpu"))


def attention_with_another_key() -> None:
    layer = nn.TransformerEncoderLayer(8, 2)
    layer.self_attn = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    rotate_all(nn.Sequential(layer), mesh=make_mesh("cpu"))


def no_shape_yet() -> None:
    rotate_all(nn.Sequential(nn.LazyLinear(4)), mesh=make_mesh("cpu"))


def one_parameter_in_two_places() -> None:
    mlp = MLP(4, 4)
    mlp.down.weight = mlp.up.weight
    rotate(mlp, mesh=make_mesh("cpu"))


def rule_for_nothing() -> None:
    rotate_all(nn.Sequential(MLP(4, 8)), mesh=make_mesh("cpu"), rules={"1": None})


def rule_for_no_class() -> None:
    rotate_all(nn.Sequential(MLP(4, 8)), mesh=make_mesh("cpu"), rules={nn.Conv2d: None})


def masks_of_their_own() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 4, num_layers=2, dropout=0.1)})
    rotate_all(model, mesh=make_mesh("cpu"), policy=RotationPolicy(dropout="equal"))


def masks_of_channels() -> None:
    model = nn.ModuleDict({"drop": nn.Dropout2d(0.1)})
    rotate_all(model, mesh=make_mesh("cpu"), policy=RotationPolicy(dropout="equal"))


def no_such_dropout() -> None:
    rotate(Residual(nn.Identity()), mesh=make_mesh("cpu"), rule=MLPRule(dropouts=("ends_in",)))


def integers_that_rotate() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int64), requires_grad=False)
    rotate(layer, mesh=make_mesh("cpu"))


def token_outside_of_the_vocabulary() -> None:
    embedding = rotate(nn.Embedding(8, 4), mesh=make_mesh("cpu"))
    embedding(torch.tensor([8]))


def output_of_another_width() -> None:
    rotate(TwoOutputs(4, 4), mesh=make_mesh("cpu"), rule=LinearRule())(torch.randn(2, 4))


def output_of_integers() -> None:
    rotate(BestFeature(4, 4), mesh=make_mesh("cpu"), rule=LinearRule())(torch.randn(2, 4))


def other_shapes_on_other_ranks() -> None:
    rotate_all(nn.Sequential(nn.LayerNorm(4), MLP(4, 8 + dist.get_rank())), mesh=make_mesh("cpu"))


def other_dtypes_on_other_ranks() -> None:
    rotate_all(
        nn.Sequential(nn.Linear(4, 4).to(torch.float64 if dist.get_rank() else torch.float32)),
        mesh=make_mesh("cpu"),
    )


def frozen_on_one_rank() -> None:
    rotate_all(
        nn.Sequential(nn.LayerNorm(4).requires_grad_(dist.get_rank() == 0)), mesh=make_mesh("cpu")
    )


def fewer_modules_on_one_rank() -> None:
    rotate_all(
        nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 - dist.get_rank())]), mesh=make_mesh("cpu")
    )


def loaded_by_assignment() -> None:
    mlp = rotate(MLP(4, 8), mesh=make_mesh("cpu"))
    mlp.load_state_dict(
        {name: value.clone() for name, value in mlp.state_dict().items()}, assign=True
    )
    mlp(torch.randn(2, 4))


def backward_twice() -> None:
    loss = rotate(MLP(4, 8), mesh=make_mesh("cpu"))(torch.randn(2, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def step_before_backward() -> None:
    mlp = rotate(MLP(4, 8), mesh=make_mesh("cpu"))
    loss = mlp(torch.randn(2, 4)).sum()
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.mul_(2)
    loss.backward()


def mesh_of_the_first_rank() -> None:
    rotate(nn.Linear(4, 4), mesh=DeviceMesh("cpu", [0], mesh_dim_names=("rotate",)))


def mesh_of_another_device() -> None:
    assert dist.group.WORLD is not None
    rotate(
        nn.Linear(4, 4),
        mesh=DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("rotate",)),
    )


def on_meta_on_one_rank() -> None:
    rotate_all(
        nn.Sequential(nn.LayerNorm(4, device="meta" if dist.get_rank() else "cpu")),
        mesh=make_mesh("cpu"),
    )


def other_policies_on_other_ranks() -> None:
    policy = RotationPolicy(compute_dtype=torch.bfloat16 if dist.get_rank() else None)
    rotate_all(nn.Sequential(nn.Linear(4, 4)), mesh=make_mesh("cpu"), policy=policy)


def integers_that_travel() -> None:
    RotationPolicy(grad_dtype=torch.int8)


def unknown_dropout() -> None:
    RotationPolicy(dropout="none")  # type: ignore[arg-type]


def buffer_on_meta() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(4)
    materialize(model, seed=0)


def unknown_parameter() -> None:
    model = nn.Module()
    model.gain = nn.Parameter(torch.empty(3, device="meta"))
    materialize(model, seed=0)


REFUSED: list[tuple[Callable[[], None], type[Exception], list[str]]] = [
    (one_axis_of_two, MeshError, ["is a part of", "not be averaged", "from_group"]),
    (axes_in_another_order, MeshError, ["'replicate' and then 'rotate'"]),
    (three_replicas_on_two_ranks, MeshError, ["2 ranks", "replicate=3"]),
    (
        heads_that_do_not_divide,
        RotationError,
        ["Attention", "3 key/value heads", "2 ranks", "q, k, v, o"],
    ),
    (more_ranks_than_kv_heads, RotationError, ["Attention", "1 key/value heads", "2 ranks"]),
    (rotate_twice, RotationError, ["Linear", "rotated already"]),
    (rotate_model_twice, RotationError, ["GPT", "rotated already"]),
    (rotate_inside_and_around, RotationError, ["MLP.up", "rotated already"]),
    (missing_layer, RotationError, ["MLP.gate"]),
    (dropout_inside, RotationError, ["Residual.ends_in", "p=0.1"]),
    (
        partial(first_call_of, AddsItsInput(nn.Identity())),
        RotationError,
        ["AddsItsInput", "down.weight", "not linear"],
    ),
    (partial(first_call_of, Residual(nn.LayerNorm(4))), RotationError, ["Residual", "not linear"]),
    (partial(first_call_of, Residual(nn.ReLU())), RotationError, ["Residual", "not linear"]),
    (tied_and_cut_in_another_way, RotationError, ["MLP", "up.weight", "tied"]),
    (tied_and_not_rotated, RotationError, ["head.weight", "tied"]),
    (experts_of_another_name, RotationError, ["Experts", "no parameter bias"]),
    (
        experts_of_different_numbers,
        RotationError,
        ["Experts", "different numbers", "'up': (3, 8, 4)"],
    ),
    (
        experts_that_nobody_chooses,
        RotationError,
        ["ExpertsRule(chosen='who')", "without that argument"],
    ),
    (mixed_dtypes, RotationError, ["MLP.down.weight", "float64", "float32"]),
    (embedding_with_norms, RotationError, ["Embedding", "max_norm"]),
    (attention_with_another_key, RotationError, ["MultiheadAttention", "bias_k"]),
    (no_shape_yet, RotationError, ["Sequential.0.weight", "no shape yet"]),
    (one_parameter_in_two_places, RotationError, ["MLP", "up.weight, down.weight"]),
    (rule_for_nothing, RotationError, ["'1'", "no module"]),
    (rule_for_no_class, RotationError, ["Conv2d", "no module"]),
    (masks_of_their_own, RotationError, ["rnn", "LSTM", "independent"]),
    (masks_of_channels, RotationError, ["drop", "Dropout2d", "independent"]),
    (no_such_dropout, RotationError, ["Residual.ends_in", "Identity", "Dropout"]),
    (integers_that_rotate, RotationError, ["Linear.weight", "int64"]),
    (token_outside_of_the_vocabulary, IndexError, ["index out of range"]),
    (output_of_another_width, RotationError, ["(2, 4)", "beside", "weight"]),
    (output_of_integers, RotationError, ["BestFeature", "int64", "floating-point"]),
    (
        other_shapes_on_other_ranks,
        RotationError,
        ["1.up.weight of Linear", "(8, 4)", "on rank 1", "(9, 4)"],
    ),
    (
        other_dtypes_on_other_ranks,
        RotationError,
        ["0.weight of Linear", "float32", "on rank 1", "float64"],
    ),
    (
        frozen_on_one_rank,
        RotationError,
        ["0.weight of LayerNorm", "trains", "on rank 1", "is frozen"],
    ),
    (
        fewer_modules_on_one_rank,
        RotationError,
        ["1.weight of Linear", "on rank 1 there is no more parameter"],
    ),
    (mesh_of_another_device, RotationError, ["Linear.weight is on cpu", "the mesh is of cuda"]),
    (
        on_meta_on_one_rank,
        RotationError,
        ["0.weight of LayerNorm", "on cpu", "on rank 1", "on meta"],
    ),
    (
        other_policies_on_other_ranks,
        RotationError,
        ["0 rotates with", "compute_dtype=None", "on rank 1", "torch.bfloat16"],
    ),
    (integers_that_travel, RotationError, ["grad_dtype=torch.int8", "floating-point"]),
    (unknown_dropout, RotationError, ["'none'", "independent, equal"]),
    (loaded_by_assignment, RotationError, ["up.weight", "before it is rotated"]),
    (backward_twice, RotationError, ["MLP", "ran before"]),
    (step_before_backward, RotationError, ["MLP", "changed between forward and backward"]),
    (buffer_on_meta, RotationError, ["running_mean", "meta"]),
    (unknown_parameter, RotationError, ["gain"]),
]


def refusal(program: Callable[[], None]) -> tuple[type[Exception], str] | None:
    try:
        program()
    except Exception as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize(("program", "error", "words"), REFUSED)
def test_refused(
    ranks: StartRanks, program: Callable[[], None], error: type[Exception], words: list[str]
) -> None:
    for found in ranks(2).run(refusal, program):
        assert found is not None, "nothing was refused"
        assert found[0] is error, found
        assert all(word in found[1] for word in words), found[1]


def test_a_rank_that_is_not_on_the_mesh_is_refused(ranks: StartRanks) -> None:
    on_it, outside = ranks(2).run(refusal, mesh_of_the_first_rank)
    assert on_it is None
    assert outside is not None
    assert outside[0] is MeshError
    assert outside[1].startswith("rank 1 is not on DeviceMesh")


def test_no_process_group() -> None:
    with pytest.raises(MeshError, match="init_process_group"):
        make_mesh("cpu")
