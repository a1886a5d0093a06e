"""Parameters that every rank has whole: norms and other small ones.

Their gradients are averaged in one all-reduce per backward.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.split.block import rotates_whole
from gyre_trainer.layers.whole.adapters import plain_adapters, require_whole
from gyre_trainer.layers.whole.averaged_gradients import (
    ReplicatedGradients,
    take_first_ranks_values,
)
from gyre_trainer.layers.whole.read_parameters import (
    CutPlace,
    ReadableParameters,
    keeps_dtype,
    own_parameters,
)
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in, uncompiled
from gyre_trainer.rotation.rule import swapped
from gyre_trainer.rotation.sharded_module import ShardedModule
from gyre_trainer.shards.gathered import release_after
from gyre_trainer.shards.local_shards import as_parameter, local_of
from gyre_trainer.shards.replaced_parameters import note_replaced
from gyre_trainer.shards.sharded_parameters import sharded_parameters_of
from gyre_trainer.shards.stand_ins import StandIn


class ReplicatedModule(ShardedModule):
    """Mixed in before a module's class: its forward reads plain local tensors instead of DTensors.

    Attributes:
        outer_dtype: the dtype that these, and the floating-point arguments, are cast to; None for
            no cast. Parameters of a BatchNorm stay in the dtype of its statistics.
        read_parameters: by their names, the places of those parameters of its own that are cut.
        reads_inside: whether the forward reads the parameters of modules inside instead of calling
            these.
    """

    reads_inside: ClassVar[bool] = False
    outer_dtype: torch.dtype | None = None
    read_parameters: Mapping[str, CutPlace] = MappingProxyType({})

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without rotation."""
        return self.run_plain(super().forward, args, kwargs)  # type: ignore[misc]

    def run_plain(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module with plain tensors in the place of parameters."""
        assert isinstance(self, nn.Module)
        own = self._readable()
        if self.outer_dtype is not None:
            args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        try:
            with swapped(self, own) if own else nullcontext():
                return method(*args, **kwargs)
        finally:
            if self.read_parameters:
                release_after(self)

    def _readable(self) -> dict[str, Tensor]:
        """What its forward is to read in the place of its parameters, where they are not that."""
        assert isinstance(self, nn.Module)
        if self.reads_inside:
            parameters = dict(self.named_parameters())
        else:
            parameters = {
                name: parameter
                for name, owner, last in own_parameters(self)
                if (parameter := owner._parameters[last]) is not None
            }
        if self.outer_dtype is None:
            parameters = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
        return {name: self._plain(name, parameter) for name, parameter in parameters.items()}

    def _plain(self, name: str, parameter: Tensor) -> Tensor:
        place = self.read_parameters.get(name)
        if place is not None and isinstance(parameter, DTensor):
            return place.instead(parameter)
        assert isinstance(self, nn.Module)
        dtype = None if keeps_dtype(self, parameter) else self.outer_dtype
        return cast(local_of(parameter), dtype)

    def _cast(self, tensor: Tensor) -> Tensor:
        return cast(tensor, self.outer_dtype)


class ReplicatedAttention(ReplicatedModule):
    """Mixed in before `nn.MultiheadAttention`, which reads the weight of its last layer."""

    reads_inside: ClassVar[bool] = True


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """A context whose backwards do not average gradients; the next one outside averages their sum.

    For gradient accumulation, as DDP's `no_sync`: put all backwards but the last into it, and step
    after the last. It saves one all-reduce per backward, and those over replicas of the ring.
    Gradients of rotated parameters travel round the ring in every backward all the same: a rank has
    no memory for those of other slices. All ranks must do the same.

    Raises:
        RotationError: the model was not rotated, or holds no module that was.

    Example:
        with no_sync(model):
            for part in parts[:-1]:
                (model(part).mean() / len(parts)).backward()
        (model(parts[-1]).mean() / len(parts)).backward()
        optimizer.step()
    """
    modules = [module for module in model.modules() if hasattr(module, "grad_averaging")]
    averaging: list[Any] = [module.grad_averaging for module in modules]
    sharded = [
        module.rotation.sharded.replica_gradients
        for module in model.modules()
        if isinstance(module, RotatedModule)
    ]
    sharded += [
        place.sharded.replica_gradients
        for module in model.modules()
        if isinstance(module, ReplicatedModule)
        for place in module.read_parameters.values()
    ]
    averaging += filter(None, sharded)
    if not modules and not sharded:
        raise RotationError(
            f"{type(model).__name__} is not rotated; "
            "first call rotate_all, or rotate, on the whole model"
        )
    before = [each.postponed for each in averaging]
    for each in averaging:
        each.postponed = True
    try:
        yield
    finally:
        for each, postponed in zip(averaging, before, strict=True):
            each.postponed = postponed


def replicate(module: nn.Module, mesh: DeviceMesh, outer_dtype: torch.dtype | None = None) -> None:
    """Keep all parameters of the module that do not rotate whole on every rank.

    Modules use them, and take their arguments, in ``outer_dtype``.

    Raises:
        RotationError: one is tied to a parameter that rotates, or is on another device; the message
            names it.
    """
    before = [p for p in module.parameters() if isinstance(p, DTensor)]
    copies: dict[nn.Parameter, nn.Parameter] = {}
    plain = dict.fromkeys(plain_adapters(module))
    for parameter in plain:
        take_first_ranks_values(parameter, mesh)
    for path, child in list(module.named_modules()):
        loose = {
            name: p
            for name, p in child._parameters.items()
            if p is not None and not isinstance(p, DTensor)
        }
        if outer_dtype is None:
            loose = {name: p for name, p in loose.items() if p not in plain}
        for name, parameter in loose.items():
            if parameter in plain:
                continue
            if parameter not in copies:
                where = f"{path}.{name}".removeprefix(".")
                copies[parameter] = _replicated(parameter, where, mesh)
                note_replaced(parameter, where)
            setattr(child, name, copies[parameter])
        if loose and not rotates_whole(child):
            attends = isinstance(child, nn.MultiheadAttention)
            if not isinstance(child, ReplicatedModule):
                mix_in(child, ReplicatedAttention if attends else ReplicatedModule, "Replicated")
            child.outer_dtype = outer_dtype
    averaging = ReplicatedGradients([*copies.values(), *plain], mesh)
    averaging.note_others(p for p in before if sharded_parameters_of(p) is None)
    module.grad_averaging = averaging  # type: ignore[assignment]  # kept alive, and a mark
    module.register_forward_pre_hook(_watch)
    module.register_forward_hook(_watch_outputs)
    ReadableParameters(module, outer_dtype)


@uncompiled
def _watch(module: nn.Module, _args: Any) -> None:
    """Before a forward: see to parameters that changed since the last one."""
    if not torch.is_grad_enabled():
        return
    averaging: Any = module.grad_averaging
    added = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
        and not isinstance(parameter, (DTensor, StandIn))
        and parameter not in averaging
    }
    if added:
        adapters = set(plain_adapters(module))
        for name, parameter in added.items():
            if parameter not in adapters:
                raise RotationError(
                    f"{name} was added to {type(module).__name__} after it was rotated, so its "
                    "gradient would never be averaged. Add layers first, then rotate the model."
                )
        require_whole(module)
        averaging.add(list(added.values()))
    sharded = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    averaging.require_known({name: p for name, p in sharded.items() if p.requires_grad})
    averaging.watch(sharded.values())
    averaging.compare(module)


@uncompiled
def _watch_outputs(module: nn.Module, _args: Any, output: Any) -> Any:
    """After a forward: see [Note: Ranks that reach nothing]."""
    averaging: Any = module.grad_averaging
    if not (averaging.alone and torch.is_grad_enabled()):
        return output
    return tree_map_only(Tensor, averaging.reached, output, is_leaf=_is_no_container)


def _is_no_container(output: Any) -> bool:
    return not isinstance(output, tuple | list | dict)  # a cache stays the object that it is


def _replicated(source: nn.Parameter, name: str, mesh: DeviceMesh) -> nn.Parameter:
    """A DTensor parameter with the values of rank 0; NaN where ``source`` is on `meta`."""
    if sharded_parameters_of(source) is not None:
        raise RotationError(
            f"{name} is tied to a parameter that rotates; first rotate the module that it is in"
        )
    if source.is_meta:
        local = torch.full(source.shape, torch.nan, dtype=source.dtype, device=mesh.device_type)
    elif source.device.type != mesh.device_type:
        raise RotationError(
            f"{name} is on {source.device}, but the mesh is of {mesh.device_type}; "
            "move the model first"
        )
    else:
        local = source.detach().clone()
        take_first_ranks_values(local, mesh)
    return as_parameter(local, mesh, Replicate(), source)
