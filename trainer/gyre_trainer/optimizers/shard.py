"""Optimizers' states on shards: their shapes and dtypes, and sums over the ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from gyre_trainer.comm.ring import collective
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.layout import as_dtensor


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The result of a step's closure, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@dataclass(frozen=True, slots=True)
class OwnShard:
    """How a parameter is cut.

    Attributes:
        dim: the cut dim; None where this rank has the parameter whole.
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
            "this optimizer takes parameters cut along one axis of their mesh"
        )
    return OwnShard(placement.dim, parameter.device_mesh.get_group(axis))


def shaped_like(parameter: Tensor, dim: int, length: int, dtype: torch.dtype) -> Tensor:
    """Zeros in the shape of ``parameter`` but for ``length`` entries along ``dim``.

    They are cut as ``parameter`` is, and whole on every rank where ``dim`` is cut.
    """
    dim %= parameter.ndim
    shape = list(parameter.shape)
    shape[dim] = length
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(shape, dtype=dtype)
    local_shape = list(parameter.to_local().shape)
    local_shape[dim] = length
    placements: list[Placement] = [
        Replicate() if placement.is_shard(dim) else placement for placement in parameter.placements
    ]
    zeros = parameter.to_local().new_zeros(local_shape, dtype=dtype)
    return as_dtensor(zeros, parameter.device_mesh, placements, shape)


class KeepsSavedDtypes(Optimizer):
    """Mixed in before an optimizer whose states have other dtypes than their parameters."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in the dtypes that they were saved in, where torch casts them."""
        super().load_state_dict(state_dict)
        numbers = [each for group in state_dict["param_groups"] for each in group["params"]]
        parameters = [each for group in self.param_groups for each in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dtype != self.state[parameter][name].dtype:
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def keep_saved_states(
    model: nn.Module, optimizers: Sequence[Optimizer], saved: Iterable[str]
) -> None:
    """Forget the states of parameters that a checkpoint has none of.

    Torch makes states of all parameters before it loads, and would miss those of a parameter that
    never had a gradient, such as one of a tower of images in a run on texts.

    Args:
        model: of the parameters.
        optimizers: of the model.
        saved: names in the checkpoint, which has these states under "optimizer".
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: PLC0415

    groups: Any = get_optimizer_state_dict(model, optimizers)["param_groups"]
    own = [group for each in optimizers for group in each.param_groups]
    parents = {key[:end] for key in saved for end, char in enumerate(key) if char == "."}
    for named, group in zip(groups, own, strict=True):
        for name, parameter in zip(named["params"], group["params"], strict=True):
            if f"optimizer.state.{name}" not in parents:
                for each in optimizers:
                    each.state.pop(parameter, None)


class SumsOverRanks:
    """Sums formed together: one all-reduce for all that belong to one group of ranks."""

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
