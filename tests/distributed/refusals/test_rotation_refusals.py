"""Refused modules: every rank raises an error that names module, parameter or rank."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import MeshError, RotationError
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import RotationPolicy, register_forward_method, rotate, rotate_all
from gyre_trainer.shards.initialisation import materialize
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import REFUSED_MODULES


def one_axis_of_two() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "rotate"))
    rotate(nn.Linear(4, 4), mesh=mesh["rotate"])


def axes_in_another_order() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rotate", "replicate"))
    rotate(nn.Linear(4, 4), mesh=mesh)


def three_replicas_on_two_ranks() -> None:
    make_mesh("cpu", replicate=3)


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


def loaded_whole() -> None:
    mlp = rotate(MLP(4, 8), mesh=make_mesh("cpu"))
    mlp.load_state_dict(MLP(4, 8).state_dict())


def torchs_adafactor() -> None:
    mlp = rotate(MLP(4, 8), mesh=make_mesh("cpu"))
    mlp(torch.randn(2, 4)).sum().backward()
    torch.optim.Adafactor(mlp.parameters()).step()  # type: ignore[no-untyped-call]


def method_of_a_block() -> None:
    register_forward_method(rotate(MLP(4, 8), mesh=make_mesh("cpu")), "extra_repr")


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
    rotate(
        nn.Linear(4, 4), mesh=DeviceMesh("cpu", [0], mesh_dim_names=("rotate",)), independent=True
    )


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


def buffer_on_meta() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(4)
    materialize(model, seed=0)


def unknown_parameter() -> None:
    model = nn.Module()
    model.gain = nn.Parameter(torch.empty(3, device="meta"))
    materialize(model, seed=0)


REFUSED: list[tuple[Callable[[], None], type[Exception], list[str]]] = [
    (loaded_whole, RotationError, ["plain tensor", "pretrained.load", "set_model_state_dict"]),
    (torchs_adafactor, RotationError, ["Take gyre_trainer.rotate.Adafactor"]),
    (method_of_a_block, RotationError, ["rotates as one block", "find_blocks=False"]),
    (one_axis_of_two, RotationError, ["has 1 of 2 ranks", "independent=True"]),
    (axes_in_another_order, MeshError, ["'replicate' and then 'rotate'"]),
    (three_replicas_on_two_ranks, MeshError, ["2 ranks", "replicate=3"]),
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


@pytest.mark.parametrize(("program", "error", "words"), REFUSED_MODULES + REFUSED)
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
