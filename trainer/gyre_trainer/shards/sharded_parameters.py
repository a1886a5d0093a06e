"""A rank's part of a rotated module: its own slice of every parameter, in one flat buffer.

The buffer holds the slice's shard of each parameter, contiguous, one after the other. The rank's
DTensor parameters are views of it, so the optimizer writes what the next hop sends, and nothing is
packed.

Also here:

* Parameters that rotation, or `materialize` on `meta`, has replaced. Nothing else fails where an
  optimizer was made before: old parameters get no gradients, and a step skips them.
* Operators of torch on DTensors. Random numbers written by `nn.init` would be the same on each
  rank. A `torch.amp.GradScaler` skips a step whose gradients are infinite; torch lets the ranks
  agree on that by the placement of the first gradient, so where that is of a replicated parameter,
  each rank would decide by its own shards of all others. The gradient of a sharded parameter's
  `full_tensor()` is averaged over the ranks, as others are.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cache, partial, wraps
from typing import Any

import torch
from gyre_protos.text import counted
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from gyre_trainer.comm.identity import copy_with_room, with_room
from gyre_trainer.comm.ring import Ring, ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.layout import Layout, as_parameter, digest_of, place_of, with_local
from gyre_trainer.torch_internals import (
    dtensor_handlers,
    gradient_hooks_of,
    shard_of,
    storage_number,
    version_of,
)

# Replaced parameters that something still holds, with their names.
_REPLACED = WeakIdKeyDictionary()


def note_replaced(parameter: nn.Parameter, name: str) -> None:
    """Refuse the step of every optimizer that holds this parameter from now on.

    Args:
        parameter: no module has it any more. It is referred to weakly.
        name: its name, for the message.
    """
    _REPLACED[parameter] = name
    _watch_optimizers()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Refuse parameters that were replaced, and torch's Adafactor on shards, where it fails."""
    held = [each for group in optimizer.param_groups for each in group["params"]]
    names = [_REPLACED[each] for each in held if each in _REPLACED] if len(_REPLACED) else []
    if names:
        raise RotationError(
            f"{type(optimizer).__name__} holds {counted(len(names), 'parameter')}, first "
            f"{names[0]}, that the model has no more: rotate_all, rotate, materialize "
            "or a conversion, such as bfloat16(), has replaced them, so a step would not "
            "train it. Make the optimizer after these."
        )
    if type(optimizer) is torch.optim.Adafactor and any(
        isinstance(each, DTensor) and place_of(each) is not None for each in held
    ):
        raise RotationError(
            "torch.optim.Adafactor takes no shards. Take gyre_trainer.rotate.Adafactor, with the "
            "same arguments"
        )


def refuse_hooks(parameter: Tensor) -> None:
    """Refuse hooks of other code on the accumulated gradient; those of this package are partials.

    Torch calls them with the gradient of this rank, before the mean is there.

    Raises:
        RotationError: there is such a hook.
    """
    hooks = gradient_hooks_of(parameter, accumulated=True)
    if not all(
        isinstance(each, partial) and each.func.__module__.startswith("gyre_trainer.")
        for each in hooks
    ):
        raise RotationError(
            f"a parameter of shape {tuple(parameter.shape)} has a hook on its accumulated gradient "
            "(register_post_accumulate_grad_hook), which torch calls before that is averaged. Take "
            "the optimizer's step after backward"
        )


Watch = Callable[[Sequence[nn.Parameter]], None]
"""Lets a backward that reaches one of these parameters average the gradients of all."""

# Torch counts the writes to a tensor from 0.
_MORE_THAN_ANY_COUNT = 2**40


class ShardedParameters:
    """The slice that this rank owns. A rotation reads it and never writes to it.

    Attributes:
        layout: how all ranks keep their slices.
        ring: the ring that the slices travel on.
        flat: the own slice.
        parameters: DTensors in the order of the cuts; the local tensor of each is a view of
            ``flat``.
        digests: of the values of the whole parameters, in the same order; 0 where they had none.
        watch: lets gradients be averaged over the replicas of the ring; None where nothing does.
    """

    _first_version = 0

    def __init__(self, sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh) -> None:
        """Copy this rank's slice of ``sources``; fill it with NaN where they are on `meta`."""
        self.layout = layout
        self.ring: Ring = ring_of(mesh)
        rank = self.ring.rank
        self.digests = [digest_of(source) for source in sources]
        self.watch: Watch | None = None
        device = torch.device(mesh.device_type) if sources[0].is_meta else sources[0].device
        self.flat = with_room(layout.numel(rank), sources[0].dtype, device)
        self.flat.fill_(torch.nan)
        self.parameters: list[nn.Parameter] = []
        for source, cut, shard in zip(sources, layout.cuts, self.views(self.flat), strict=True):
            start, stop = layout.bounds(cut, rank)
            if not source.is_meta:
                shard.copy_(source.detach().narrow(cut.dim, start, stop - start))
            self.parameters.append(as_parameter(shard, mesh, Shard(cut.dim), source))

    def views(self, flat: Tensor) -> list[Tensor]:
        """The own shards in a buffer like ``flat``, in the order of the cuts."""
        return self.layout.views(flat, self.ring.rank)

    @property
    def version(self) -> int:
        """A number that grows with every write to a parameter."""
        return self._first_version + sum(version_of(parameter) for parameter in self.parameters)

    def note_rewritten(self) -> None:
        """Raise the version after a write that torch does not count, or with other parameters."""
        self._first_version += _MORE_THAN_ANY_COUNT

    def before_training(self, name: str) -> None:
        """Prepare for a backward.

        Raises:
            RotationError: nothing averages the gradients over the replicas of the ring; the message
                has ``name``.
        """
        if self.ring.replicas is None:
            return
        if self.watch is None:
            raise RotationError(
                f"{name}: nothing averages its gradients over the replicas of the ring. At last "
                "rotate the model around it, too: rotate(model, mesh=mesh), or rotate_all"
            )
        self.watch(self.parameters)

    def require_here(self, parameter: Tensor, name: str) -> None:
        """Require that it is one of the parameters, whose local shard lies in ``flat``.

        Raises:
            RotationError: it is not, or no longer does.
        """
        is_own = any(parameter is each for each in self.parameters)
        local = shard_of(parameter) if isinstance(parameter, DTensor) else parameter
        if not (is_own and same_storage(local, self.flat)):
            raise RotationError(
                f"parameter {name} is no longer in its rotated slice. "
                "Move or convert a model before it is rotated, add adapters that repeat layers "
                "(layer_replication) before, and load states by copying (load_state_dict without "
                "assign)."
            )


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors are views of one storage."""
    return bool(storage_number(one) == storage_number(other))


# From a parameter to a weak reference, whose object lives as long as a module rotates it, and the
# place of the parameter there.
_SHARDED = WeakIdKeyDictionary()


def sharded_parameters_of(parameter: nn.Parameter) -> ShardedParameters | None:
    """Where the shards of a parameter lie; None if it was not cut.

    The parameter that was cut and the DTensor that replaced it are both found.
    """
    found = _SHARDED.get(parameter)  # type: ignore[no-untyped-call]
    sharded = found[0]() if found is not None else None
    assert sharded is None or isinstance(sharded, ShardedParameters)
    return sharded


def shard_parameters(
    sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh
) -> ShardedParameters:
    """Cut ``sources``; `sharded_parameters_of` finds the result from now on."""
    sharded = ShardedParameters(sources, layout, mesh)
    find_from(sharded, sources)
    find_from(sharded, sharded.parameters)
    return sharded


def successor_of(source: nn.Parameter, sharded: ShardedParameters) -> nn.Parameter:
    """The one of the parameters that has replaced this one when it was cut."""
    place: int = _SHARDED[source][1]
    return sharded.parameters[place]


def copy_sharded(sharded: ShardedParameters) -> ShardedParameters:
    """Other parameters with the same values, which travel on the same ring."""
    copied = copy(sharded)
    copied.flat, copied.watch = copy_with_room(sharded.flat), None
    copied.parameters = [
        with_local(parameter, view)
        for parameter, view in zip(sharded.parameters, copied.views(copied.flat), strict=True)
        if isinstance(parameter, DTensor)
    ]
    find_from(copied, copied.parameters)
    return copied


def _lies_in_shards(tensor: Tensor) -> bool:
    found = {reference() for reference, _ in _SHARDED.values()}  # type: ignore[no-untyped-call]
    return any(each is not None and same_storage(tensor, each.flat) for each in found)


def note_rewritten(parameters: Iterable[nn.Parameter]) -> None:
    """Raise the versions of those that are sharded: all of their values are others."""
    for sharded in dict.fromkeys(map(sharded_parameters_of, parameters)):
        if sharded is not None:
            sharded.note_rewritten()


def find_from(sharded: ShardedParameters, parameters: Sequence[nn.Parameter]) -> None:
    """Let `sharded_parameters_of` find it from parameters in the order of its cuts."""
    for place, parameter in enumerate(parameters):
        _SHARDED[parameter] = weakref.ref(sharded), place


_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@cache
def support_dtensors() -> None:
    """From now on these operators accept DTensors, or name a remedy, in this process.

    Random numbers written to a shard are refused: each rank draws for its own rows, and all ranks
    have one seed. An operator that already has a handler keeps it.
    """
    handlers = dtensor_handlers()
    for operator in _DRAWS:
        handlers.setdefault(operator, _drawn)
    handlers.setdefault(_aten._is_any_true.default, _any_here)
    handlers[_UNSCALE] = partial(_shards_first, handlers[_UNSCALE])
    DTensor.full_tensor = _full_tensor  # type: ignore[method-assign]


_of_torch = DTensor.full_tensor


@wraps(_of_torch)
def _full_tensor(
    self: DTensor, *, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    # Torch takes the gradient of one rank for that of all. Where ranks compute with other parts of
    # a batch, the parameter would train wrongly, and nothing would tell.
    trains = self.requires_grad and torch.is_grad_enabled() and grad_placements is None
    if trains and sharded_parameters_of(self) is not None:  # type: ignore[arg-type]
        grad_placements = [Partial("avg")] * self.device_mesh.ndim
    return _of_torch(self, grad_placements=grad_placements)


def _shards_first(
    of_torch: Callable[..., object], op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]
) -> object:
    """Torch's handler, called with the shards before the replicated gradients."""
    grads, *others = args
    ordered = sorted(grads, key=lambda grad: not any(map(Placement.is_shard, grad.placements)))
    return of_torch(op_call, (ordered, *others), kwargs)


def _any_here(op_call: Any, args: tuple[Any, ...], _kwargs: dict[str, object]) -> object:
    """Whether this rank's shard has a true entry: anomaly detection asks for NaN in gradients."""
    return op_call(shard_of(args[0]))


_aten = torch.ops.aten
_DRAWS = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    getattr(_aten.random_, "from"),
    _aten.random_.to,
)


def _drawn(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    target = args[0]
    if isinstance(target, DTensor) and _lies_in_shards(shard_of(target)):
        raise RotationError(
            "a sharded parameter cannot be initialised by random numbers: each rank would draw the "
            f"same ones for other rows (got {op_call!s} of shape "
            f"{tuple(target.shape)}). Call materialize(model, seed=...), or initialise the model "
            "before it is rotated"
        )
    handlers = dtensor_handlers()
    handlers.pop(op_call, None)  # another thread may have done so
    try:
        return op_call(*args, **kwargs)
    finally:
        handlers[op_call] = _drawn
