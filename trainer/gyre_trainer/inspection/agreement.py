"""Checks before training that all ranks have the same model."""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gyre_trainer.comm.mesh import groups_of
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.shards.local_shards import digest_of
from gyre_trainer.shards.sharded_parameters import sharded_parameters_of

_Here = TypeVar("_Here")


def require_equal_models(model: nn.Module, mesh: DeviceMesh) -> None:
    """Return if every rank on the mesh has the same parameters, cut alike, under the same policies.

    Compared are names, shapes, dtypes, kinds of device, `requires_grad`, cuts, a digest of the
    values, and the policies of rotated modules. Collective.

    Raises:
        RotationError: on every rank, with the first difference between two ranks.
    """
    here = _parameters(model), _policies(model), _values(model)
    digest = int.from_bytes(
        blake2b("\n".join(chain(*here)).encode(), digest_size=7).digest(), "little"
    )
    extremes = torch.tensor([digest, -digest], device=mesh.device_type)
    for group in groups_of(mesh):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    # A dry run has no other ranks.
    if isinstance(extremes, FakeTensor) or extremes.sum().item() == 0:
        return
    everyone = _gathered((dist.get_rank(), here), mesh)
    _count_alike(mesh)
    ranks = [rank for rank, _ in everyone]
    parts = zip(*(each for _, each in everyone), strict=True)
    difference = next(filter(None, (_difference(ranks, descriptions) for descriptions in parts)))
    advice = (
        "; give every rank the same values, or take those of one with sync_from=0"
        if "has values of digest" in difference
        else ""
    )
    raise RotationError(f"ranks have different models: {difference}{advice}")


def _count_alike(mesh: DeviceMesh) -> None:
    """Let all ranks go on with one number, so that another model can rotate after a refusal."""
    modules = ring_of(mesh).modules
    modules.skip_to(max(_gathered(modules.count, mesh)))


def _gathered(here: _Here, mesh: DeviceMesh) -> list[_Here]:
    """Every rank's value, in the order of the mesh."""
    gathered = [here]
    for group in groups_of(mesh):
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, gathered, group=group)
        gathered = list(chain.from_iterable(parts))
    return gathered


def _parameters(model: nn.Module) -> list[str]:
    """A line that describes each parameter."""
    lines = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            cut = f", cut {parameter.placements[-1]}" if isinstance(parameter, DTensor) else ""
            state = "trains" if parameter.requires_grad else "is frozen"
            where = f"{path}.{name}".removeprefix(".")
            kind = f"{parameter.dtype} on {parameter.device.type}, {state}{cut}"
            lines.append(
                f"{where} of {own_class(module).__name__} is {tuple(parameter.shape)} {kind}"
            )
    return lines


def _values(model: nn.Module) -> list[str]:
    """A line for each parameter that tells its values apart; those of shards are of the whole."""
    lines = []
    for name, parameter in model.named_parameters():
        sharded = sharded_parameters_of(parameter)
        if sharded is not None:
            pairs = zip(sharded.parameters, sharded.digests, strict=True)
            digest = next((digest for other, digest in pairs if other is parameter), 0)
        else:
            digest = 0 if isinstance(parameter, DTensor) else digest_of(parameter)
        lines.append(f"{name} has values of digest {digest:012x}")
    return lines


def _policies(model: nn.Module) -> list[str]:
    """A line that describes the policy of each rotated module."""
    rotated = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, RotatedModule)
    ]
    return [
        f"{path or type(module).__name__} rotates with {module.rotation.policy}"
        for path, module in rotated
    ]


def _difference(ranks: Sequence[int], descriptions: Sequence[list[str]]) -> str:
    """The first difference between the first rank and another one; "" where there is none."""
    first = descriptions[0]
    for rank, other in zip(ranks, descriptions, strict=True):
        longest = max(len(first), len(other))
        pairs = zip(
            *(
                each + ["there is no more parameter"] * (longest - len(each))
                for each in (first, other)
            ),
            strict=True,
        )
        for one, another in pairs:
            if one != another:
                return f"on rank {ranks[0]} {one}, but on rank {rank} {another}"
    return ""
