"""Parameters of a module itself, which its forward reads: cut, and whole while it reads them."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.whole.read_parameters import CutPlace, has_forward, own_parameters
from gyre_trainer.layers.whole.replicated import ReplicatedModule
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.rotation.wrap import RotationTarget
from gyre_trainer.shards.layout import Cut, Layout
from gyre_trainer.shards.replaced_parameters import note_replaced
from gyre_trainer.shards.sharded_parameters import (
    shard_parameters,
    sharded_parameters_of,
    successor_of,
)

# A parameter of 2^18 elements is 1 MiB in float32. A smaller one would take longer for its hops, in
# forward and in backward, than its memory is worth; of one that is twice as large, every rank would
# have twice as much that it need not have.
MIN_READ_NUMEL = 2**18


@dataclass(frozen=True)
class ReadRule(Rule):
    """For a module whose forward reads parameters of its own, as in `x @ self.weight`.

    These, and those of a `ParameterList` or another container inside, are cut. Each is gathered
    when the forward reads it, and again in backward. See [Note: Parameters that are read] in
    `gyre_trainer.shards.gathered`. Modules inside are treated as without the rule.

    Attributes:
        min_numel: parameters with fewer elements stay whole.
    """

    min_numel: int = 0

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The module's own parameters, each along the first dim that all slices have a part of.

        Raises:
            RotationError: it has none that can be cut.
        """
        found = [
            Cut(name, shape, _dim(shape, num_slices))
            for name, owner, last in own_parameters(module)
            if (shape := tuple(owner._parameters[last].shape))  # type: ignore[union-attr]
            and self._fits(owner._parameters[last])
        ]
        if not found or not has_forward(module):
            raise RotationError(
                f"{own_class(module).__name__} has no parameter of its own that its forward could "
                "read and that can be cut. Give the rule to the module whose forward reads it."
            )
        return found

    def _fits(self, parameter: Any) -> bool:
        return bool(
            parameter.is_floating_point()
            and not isinstance(parameter, DTensor)
            and parameter.numel() >= max(1, self.min_numel)
        )


def _dim(shape: tuple[int, ...], num_slices: int) -> int:
    """The dim to cut: the first one, or the next where only ones come between and it is larger."""
    for dim, size in enumerate(shape):
        if size >= num_slices:
            return dim
        if dim and size > 1:
            break
    return 0


def reads_much(module: nn.Module, min_numel: int) -> bool:
    """Whether a module has a parameter of its own that is worth its hops.

    One that is tied to a module inside, as a head's bias may be, is that module's.
    """
    rule = ReadRule(min_numel)
    owned = [owner._parameters[last] for _, owner, last in own_parameters(module)]
    if not has_forward(module) or not any(map(rule._fits, owned)):
        return False
    inside = {
        id(parameter)
        for child in module.modules()
        if child is not module and has_forward(child)
        for parameter in child._parameters.values()
    }
    return not any(id(parameter) in inside for parameter in owned if rule._fits(parameter))


def shard_own(module: nn.Module, rule: ReadRule, target: RotationTarget) -> None:
    """Cut a module's own parameters, and let its forward read them.

    Raises:
        RotationError: there is none, or one is on another device than the mesh.
    """
    for cut in rule.cuts(module, target.num_slices):
        path, _, last = cut.name.rpartition(".")
        owner = module.get_submodule(path)
        source = owner.get_parameter(last)
        if source.device.type not in ("meta", target.mesh.device_type):
            raise RotationError(
                f"{own_class(module).__name__}.{cut.name} is on {source.device}, but the mesh is "
                f"of {target.mesh.device_type}"
            )
        sharded = sharded_parameters_of(source)
        if sharded is None:
            sharded = shard_parameters([source], Layout((cut,), target.num_slices), target.mesh)
        _read(module, cut.name, CutPlace(owner, last, module, target.policy, sharded))


def share_cut(model: nn.Module, target: RotationTarget) -> None:
    """Let modules read those of their own parameters that are tied to one that is cut."""
    for module in model.modules():
        if isinstance(module, RotatedModule) or not has_forward(module):
            continue
        for name, owner, last in list(own_parameters(module)):
            sharded = sharded_parameters_of(owner.get_parameter(last))
            if sharded is not None and not isinstance(owner._parameters[last], DTensor):
                _read(module, name, CutPlace(owner, last, module, target.policy, sharded))


def _read(module: Any, name: str, place: CutPlace) -> None:
    """Put the sharded parameter into its place, and let the module read it."""
    source = place.owner.get_parameter(place.last)
    parameter = successor_of(source)
    assert parameter is not None
    note_replaced(source, f"{name} of {own_class(module).__name__}")
    setattr(place.owner, place.last, parameter)
    if not isinstance(module, ReplicatedModule):
        mix_in(module, ReplicatedModule, "Replicated")
    module.outer_dtype = place.policy.outer_dtype
    module.read_parameters = {**module.read_parameters, name: place}
