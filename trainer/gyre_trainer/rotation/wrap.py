"""Shards a module's parameters and replaces the forward that reads them by a rotation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.guard import Guard, own_class, sets_forward
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in, num_hooks
from gyre_trainer.rotation.rotation import Rotation, RotationPolicy
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.shards.layout import Layout
from gyre_trainer.shards.replaced_parameters import note_replaced
from gyre_trainer.shards.sharded_parameters import (
    ShardedParameters,
    shard_parameters,
    sharded_parameters_of,
)


@dataclass(frozen=True, slots=True)
class RotationTarget:
    """The ring that modules rotate on, and the policy."""

    mesh: DeviceMesh
    policy: RotationPolicy

    @property
    def num_slices(self) -> int:
        """The number of slices of each module: the number of ranks."""
        return ring_of(self.mesh).size


@dataclass(frozen=True, slots=True)
class PartialRotation:
    """The part of a module that rotates, where the module does not rotate as a whole.

    Attributes:
        forward: the function that runs slice by slice.
        reads: names of the parameters, and of the modules inside, that ``forward`` uses.
        behaviour: the class to mix in before the module's class, a subclass of `RotatedModule`.
    """

    forward: Callable[..., Any]
    reads: tuple[str, ...]
    behaviour: type[RotatedModule]


def wrap(
    module: nn.Module, rule: Rule, target: RotationTarget, partial: PartialRotation | None = None
) -> None:
    """Shard the parameters that ``rule`` cuts, and let the module's forward go round the ring.

    Raises:
        RotationError: the module cannot be cut like this; the message names module and parameter.
    """
    reads = None if partial is None else partial.reads
    require_own_forward(module)
    for name, child in module.named_modules():
        if isinstance(child, RotatedModule) and _is_read(name, reads):
            raise RotationError(
                f"{type(module).__name__}.{name} is rotated already; "
                f"rotate either it or {type(module).__name__}"
            )
    layout = Layout(tuple(rule.cuts(module, target.num_slices)), target.num_slices)
    sharded = _sharded_parameters(module, layout, target.mesh)
    for cut, parameter in zip(layout.cuts, sharded.parameters, strict=True):
        path, _, name = cut.name.rpartition(".")
        source = module.get_parameter(cut.name)
        if source is not parameter:
            note_replaced(source, f"{cut.name} of {type(module).__name__}")
        setattr(module.get_submodule(path), name, parameter)
    replicated = tuple(_replicated_names(module, layout, reads))
    forward = module.forward if partial is None else partial.forward
    rotation = Rotation(
        module,
        forward,
        rule,
        layout,
        sharded,
        target.policy,
        replicated,
        sharded.ring.modules.add(module),
    )
    if not rule.divisible or len(layout.cuts) > 1:
        sharded.ring.pool.largest_whole_numel = max(
            sharded.ring.pool.largest_whole_numel, layout.numel(0)
        )
    mix_in(module, RotatedModule if partial is None else partial.behaviour, "Rotated")
    module.rotation = rotation  # type: ignore[assignment]
    module.num_hooks = num_hooks(module, rule)  # type: ignore[assignment]
    core = module.get_submodule(rule.core)
    module.guard = Guard.of(core, rotation.name, drops_out=rule.drops_out)  # type: ignore[assignment]
    module._by_rule = {}  # type: ignore[assignment]


def require_own_forward(module: nn.Module) -> None:
    """Refuse a forward that is set on an instance: the module that rotates would not call it.

    Raises:
        RotationError: names the module.
    """
    for name, each in module.named_modules():
        if sets_forward(each):
            raise RotationError(
                f"{own_class(module).__name__}{'.' if name else ''}{name} has a forward that is "
                "set on the instance, so no rule can be true of it. Remove it before rotating, or "
                "give no rule for the module"
            )


def _is_read(name: str, reads: tuple[str, ...] | None) -> bool:
    return reads is None or any(name == read or name.startswith(f"{read}.") for read in reads)


def _replicated_names(
    module: nn.Module, layout: Layout, reads: tuple[str, ...] | None
) -> Iterator[str]:
    """Names of the parameters that the forward reads and no cut names."""
    cut_names = {cut.name for cut in layout.cuts}
    for name, _ in module.named_parameters():
        if name not in cut_names and _is_read(name, reads):
            yield name


def _sharded_parameters(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> ShardedParameters:
    """The module's sharded parameters: new ones, or those of the module that they are tied with."""
    sources = [module.get_parameter(cut.name) for cut in layout.cuts]
    if len({id(source) for source in sources}) < len(sources):
        names = ", ".join(cut.name for cut in layout.cuts)
        raise RotationError(
            f"{type(module).__name__} uses one parameter in several places among {names}; "
            "it cannot be cut"
        )
    tied = [sharded_parameters_of(source) for source in sources]
    if all(sharded is None for sharded in tied):
        _require_uniform(module, layout, sources, mesh)
        return shard_parameters(sources, layout, mesh)
    sharded = tied[0]
    if (
        sharded is None
        or any(other is not sharded for other in tied)
        or sharded.layout.shapes != layout.shapes
    ):
        names = ", ".join(
            cut.name for cut, other in zip(layout.cuts, tied, strict=True) if other is not None
        )
        raise RotationError(
            f"{type(module).__name__} shares {names} with a module that is rotated already "
            "and cut in another way; "
            "tied modules must have the same parameters, all cut alike"
        )
    return sharded


def _require_uniform(
    module: nn.Module, layout: Layout, sources: list[nn.Parameter], mesh: DeviceMesh
) -> None:
    """Refuse parameters that cannot lie in one buffer on the mesh's device."""
    for cut, source in zip(layout.cuts, sources, strict=True):
        where = f"{type(module).__name__}.{cut.name}"
        if not source.is_floating_point():
            raise RotationError(
                f"{where} is {source.dtype}, but only real floating-point parameters rotate"
            )
        if source.dtype != sources[0].dtype:
            raise RotationError(
                f"{where} is {source.dtype}, "
                f"but {layout.cuts[0].name} beside it is {sources[0].dtype}"
            )
        if source.device.type not in ("meta", mesh.device_type):
            raise RotationError(
                f"{where} is on {source.device}, but the mesh is of {mesh.device_type}"
            )
