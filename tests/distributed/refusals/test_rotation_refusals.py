"""Refused modules: every rank raises an error that names module, parameter or rank."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import MeshError
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import RotationPolicy, register_forward_method, rotate, rotate_all
from gyre_trainer.shards.initialisation import materialize
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import REFUSED, refused_with


def ring_of_this_rank_alone() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "rotate"))["rotate"]


_OF_A_PART = "the mesh has 1 of 2 ranks", "make_mesh(device_type, replicate=2)", "independent=True"


@refused_with(*_OF_A_PART)
def one_axis_of_two() -> None:
    rotate(nn.Linear(4, 4), mesh=ring_of_this_rank_alone())


@refused_with(*_OF_A_PART)
def model_on_one_axis_of_two() -> None:
    rotate_all(nn.Sequential(nn.Linear(4, 4)), mesh=ring_of_this_rank_alone())


@refused_with("'replicate' and then 'rotate'", error=MeshError)
def axes_in_another_order() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rotate", "replicate"))
    rotate(nn.Linear(4, 4), mesh=mesh)


@refused_with("2 ranks", "replicate=3", error=MeshError)
def three_replicas_on_two_ranks() -> None:
    make_mesh("cpu", replicate=3)


@refused_with("1.up.weight of Linear", "(8, 4)", "on rank 1", "(9, 4)")
def other_shapes_on_other_ranks() -> None:
    rotate_all(nn.Sequential(nn.LayerNorm(4), MLP(4, 8 + dist.get_rank())), mesh=make_mesh("cpu"))


@refused_with("0.weight of Linear", "float32", "on rank 1", "float64")
def other_dtypes_on_other_ranks() -> None:
    rotate_all(
        nn.Sequential(nn.Linear(4, 4).to(torch.float64 if dist.get_rank() else torch.float32)),
        mesh=make_mesh("cpu"),
    )


@refused_with("0.weight of LayerNorm", "trains", "on rank 1", "is frozen")
def frozen_on_one_rank() -> None:
    rotate_all(
        nn.Sequential(nn.LayerNorm(4).requires_grad_(dist.get_rank() == 0)), mesh=make_mesh("cpu")
    )


@refused_with("1.weight of Linear", "on rank 1 there is no more parameter")
def fewer_modules_on_one_rank() -> None:
    rotate_all(
        nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 - dist.get_rank())]), mesh=make_mesh("cpu")
    )


@refused_with("up.weight", "before it is rotated")
def loaded_by_assignment() -> None:
    mlp = rotate(MLP(4, 8), mesh=make_mesh("cpu"))
    mlp.load_state_dict(
        {name: value.clone() for name, value in mlp.state_dict().items()}, assign=True
    )
    mlp(torch.randn(2, 4))


@refused_with("plain tensor", "pretrained.load", "set_model_state_dict")
def loaded_whole() -> None:
    mlp = rotate(MLP(4, 8), mesh=make_mesh("cpu"))
    mlp.load_state_dict(MLP(4, 8).state_dict())


@refused_with("Take gyre_trainer.rotate.Adafactor")
def torchs_adafactor() -> None:
    mlp = rotate(MLP(4, 8), mesh=make_mesh("cpu"))
    mlp(torch.randn(2, 4)).sum().backward()
    torch.optim.Adafactor(mlp.parameters()).step()  # type: ignore[no-untyped-call]


@refused_with("rotates as one block", "find_blocks=False")
def method_of_a_block() -> None:
    register_forward_method(rotate(MLP(4, 8), mesh=make_mesh("cpu")), "extra_repr")


@refused_with("MLP", "ran before")
def backward_twice() -> None:
    loss = rotate(MLP(4, 8), mesh=make_mesh("cpu"))(torch.randn(2, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@refused_with("MLP", "changed between forward and backward")
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


@refused_with("Linear.weight is on cpu", "the mesh is of cuda")
def mesh_of_another_device() -> None:
    assert dist.group.WORLD is not None
    rotate(
        nn.Linear(4, 4),
        mesh=DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("rotate",)),
    )


@refused_with("0.weight of LayerNorm", "on cpu", "on rank 1", "on meta")
def on_meta_on_one_rank() -> None:
    rotate_all(
        nn.Sequential(nn.LayerNorm(4, device="meta" if dist.get_rank() else "cpu")),
        mesh=make_mesh("cpu"),
    )


@refused_with("0 rotates with", "compute_dtype=None", "on rank 1", "torch.bfloat16")
def other_policies_on_other_ranks() -> None:
    policy = RotationPolicy(compute_dtype=torch.bfloat16 if dist.get_rank() else None)
    rotate_all(nn.Sequential(nn.Linear(4, 4)), mesh=make_mesh("cpu"), policy=policy)


@refused_with("grad_dtype=torch.int8", "floating-point")
def integers_that_travel() -> None:
    RotationPolicy(grad_dtype=torch.int8)


@refused_with("running_mean", "meta")
def buffer_on_meta() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(4)
    materialize(model, seed=0)


@refused_with("gain")
def unknown_parameter() -> None:
    model = nn.Module()
    model.gain = nn.Parameter(torch.empty(3, device="meta"))
    materialize(model, seed=0)


def refusal(program: Callable[[], None]) -> tuple[type[Exception], str] | None:
    try:
        program()
    except Exception as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize(("program", "error", "words"), REFUSED)
def test_refused(
    ranks: StartRanks, program: Callable[[], None], error: type[Exception], words: tuple[str, ...]
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


def trained_apart() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
    rotate_all(model, mesh=ring_of_this_rank_alone(), independent=True)
    model(torch.ones(2, 5)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_ranks_that_are_meant_to_train_apart(ranks: StartRanks) -> None:
    assert ranks(2).run(refusal, trained_apart) == [None, None]


def test_no_process_group() -> None:
    with pytest.raises(MeshError, match="init_process_group"):
        make_mesh("cpu")
