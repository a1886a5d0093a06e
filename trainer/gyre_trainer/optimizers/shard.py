"""Which part of a parameter this rank has, and sums over the ranks that have the other parts."""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gyre_trainer.comm.ring_registry import collective
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.local_shards import as_dtensor


@dataclass(frozen=True, slots=True)
class OwnShard:
    """How a parameter is cut.

    Attributes:
        dim: the dim that is cut; None where this rank has the parameter whole.
        group: the ranks that have its shards, in their order; None where it is whole.
    """

    dim: int | None
    group: dist.ProcessGroup | None

    def along(self, dim: int) -> dist.ProcessGroup | None:
        """The ranks over which a sum along ``dim`` continues; None where it is complete here."""
        return self.group if dim == self.dim else None


def own_shard_of(parameter: Tensor) -> OwnShard:
    """How a parameter is cut: one of a rotated model, or a plain one.

    Raises:
        RotationError: it is cut along more than one axis of its mesh.
    """
    if not isinstance(parameter, DTensor):
        return OwnShard(None, None)
    cuts = [
        (axis, placement)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
    if not cuts:
        return OwnShard(None, None)
    (axis, placement), *others = cuts
    if others or type(placement) is not Shard:
        raise RotationError(
            f"a parameter of shape {tuple(parameter.shape)} is placed as {parameter.placements}; "
            "this optimizer takes parameters that are cut along one axis of their mesh"
        )
    return OwnShard(placement.dim, parameter.device_mesh.get_group(axis))


def reduced_like(parameter: Tensor, dim: int) -> Tensor:
    """Zeros in the shape of ``parameter`` with 1 entry along ``dim``, cut as ``parameter`` is."""
    shape = list(parameter.shape)
    shape[dim] = 1
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(shape)
    dim %= parameter.ndim
    local_shape = list(parameter.to_local().shape)
    local_shape[dim] = 1
    placements: list[Placement] = [
        Replicate() if placement.is_shard(dim) else placement for placement in parameter.placements
    ]
    zeros = parameter.to_local().new_zeros(local_shape)
    return as_dtensor(zeros, parameter.device_mesh, placements, shape)


class SumsOverRanks:
    """Sums that are formed together: one all-reduce for all that belong to one group of ranks."""

    def __init__(self) -> None:
        self._parts: defaultdict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)

    def add(self, part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """``part``, which `reduce` replaces by its sum over ``group``; None leaves it."""
        if group is not None:
            self._parts[group].append(part)
        return part

    def reduce(self) -> None:
        """Form all sums. Every rank of a group has added parts of the same shapes."""
        for group, parts in self._parts.items():
            flat = torch.cat([part.flatten() for part in parts])
            with collective("adding up sums of an optimizer"):
                dist.all_reduce(flat, group=group)
            sums = torch.split(flat, [part.numel() for part in parts])
            for part, total in zip(parts, sums, strict=True):
                part.copy_(total.view_as(part))
        self._parts.clear()
