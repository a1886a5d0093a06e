"""A rank's part of a rotated module: its own slice of every parameter, in one flat buffer.

The buffer holds the slice's shard of each parameter, contiguous, one after the other. The rank's
DTensor parameters are views of it, so the optimizer writes what the next hop sends, and nothing is
packed.

Also here:

* Random numbers written to shards by `nn.init`, which would be the same on each rank.

* Torch's gradient scaling on DTensors, where torch does not support it.

A `torch.amp.GradScaler` skips a step whose gradients are infinite. Torch lets the ranks agree on
that by the placement of the first gradient: where that is of a replicated parameter, such as a
norm's, each rank would decide by its own shards of all others.

The gradient of a sharded parameter's `full_tensor()` is averaged over the ranks, as others are.
* Parameters that others have replaced: an optimizer that holds one of them would not train it.

Rotation replaces the parameters of a model, and `materialize` those that are on `meta`. Nothing
else fails where an optimizer was made before: old parameters get no gradients, and a step skips
them.
* Gradients of one module's shards, averaged over the replicas of the ring.

When a module's gradients are complete on its ring, an all-reduce starts for them, and backward goes
on with the modules before it. The end of backward waits for all of these.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial, wraps
from hashlib import blake2b
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from gyre_protos.text import counted
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from gyre_trainer.comm.identity import copy_with_room, on_device, with_room
from gyre_trainer.comm.ring import Ring, ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.layout import (
    Layout,
    as_parameter,
    digest_of,
    local_of,
    place_of,
    with_local,
)
from gyre_trainer.torch_internals import (
    at_end_of_backward,
    is_fake,
    number_of_backward,
    storage_number,
    version_of,
)


def ids_held_by(optimizer: Optimizer) -> list[int]:
    """The `id` of each parameter that an optimizer has now.

    Their number alone does not show that others were put into the places of some.
    """
    return [id(each) for group in optimizer.param_groups for each in group["params"]]


class _Replaced:
    """The parameters that were replaced and that something still holds, with their names."""

    def __init__(self) -> None:
        self._names = WeakIdKeyDictionary()
        self._num_noted = 0
        self._seen: WeakKeyDictionary[Optimizer, tuple[int, list[int]]] = WeakKeyDictionary()
        self._is_watching = False

    def note(self, parameter: nn.Parameter, name: str) -> None:
        self._names[parameter] = name
        self._num_noted += 1
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Look at an optimizer's parameters once, and again after either side has changed."""
        seen = self._num_noted, ids_held_by(optimizer)
        if self._seen.get(optimizer) != seen:
            self._require_none(optimizer)
            _refuse_torchs_adafactor(optimizer)
            self._seen[optimizer] = seen

    def _require_none(self, optimizer: Optimizer) -> None:
        held = (each for group in optimizer.param_groups for each in group["params"])
        names = [self._names[each] for each in held if each in self._names]
        if names:
            raise RotationError(
                f"{type(optimizer).__name__} holds {counted(len(names), 'parameter')}, first "
                f"{names[0]}, that the model has no more: rotate_all, rotate, materialize "
                "or a conversion, such as bfloat16(), has replaced them, so a step would not "
                "train it. Make the optimizer after these."
            )


def _refuse_torchs_adafactor(optimizer: Optimizer) -> None:
    """Refuse torch's own on shards, where it fails in the midst of its step.

    Raises:
        RotationError: a parameter is cut.
    """
    held = (each for group in optimizer.param_groups for each in group["params"])
    if type(optimizer) is torch.optim.Adafactor and any(
        isinstance(each, DTensor) and place_of(each) is not None for each in held
    ):
        raise RotationError(
            "torch.optim.Adafactor takes no shards. Take gyre_trainer.rotate.Adafactor, with the "
            "same arguments"
        )


_REPLACED = _Replaced()


def note_replaced(parameter: nn.Parameter, name: str) -> None:
    """Refuse the step of every optimizer that holds this parameter from now on.

    Args:
        parameter: no module has it any more. It is referred to weakly.
        name: its name, for the message.
    """
    _REPLACED.note(parameter, name)


def refuse_hooks(parameter: Tensor) -> None:
    """Refuse hooks of other code on the accumulated gradient; those of this package are partials.

    Torch calls them with the gradient of this rank, before the mean is there.

    Raises:
        RotationError: there is such a hook.
    """
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    if not all(isinstance(each, partial) and _is_own(each.func) for each in hooks.values()):
        raise RotationError(
            f"a parameter of shape {tuple(parameter.shape)} has a hook on its accumulated gradient "
            "(register_post_accumulate_grad_hook), which torch calls before that is averaged. Take "
            "the optimizer's step after backward"
        )


def _is_own(function: Callable[..., Any]) -> bool:
    return function.__module__.startswith("gyre_trainer.")


class ReplicaGradients:
    """Averages the accumulated gradients of one module's shards over the replicas.

    As with replicated parameters, the older part of an accumulated gradient is equal on all
    replicas, or was postponed and is averaged now.

    Attributes:
        postponed: whether backward leaves each replica its own gradients for now; `no_sync` sets
            it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flat: Tensor, ring: Ring) -> None:
        """``parameters`` are DTensors whose local tensors lie in ``flat``."""
        self.postponed = False
        self._parameters = parameters
        self._flat = flat
        self._ring = ring
        self._is_compared = False
        self._watched = WeakIdKeyDictionary()
        self._touched = 0
        self.is_due = False
        self._backwards = _backwards_of(ring)
        self._number = self._backwards.add(self)

    def before_training(self, name: str) -> None:
        """Prepare for a backward; the first time, compare the shards with the other replicas'.

        Raises:
            RotationError: the replicas have other values; the message has ``name``.
        """
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = True
                # a hook with a strong reference would keep both alive
                parameter.register_post_accumulate_grad_hook(partial(_touch, ref(self)))  # type: ignore[no-untyped-call]
            refuse_hooks(parameter)
        if not self._is_compared and not is_fake(self._flat):
            self._is_compared = True
            _require_equal_replicas(self._flat, self._ring, name)

    def touch(self) -> None:
        """Note a parameter's gradient; the module's last one starts the all-reduce."""
        self.is_due = True
        if self.postponed:
            return
        self._backwards.begin()
        self._touched += 1
        # on CUDA all-reduces start when no hop is in flight: at the end
        is_last = self._touched >= sum(each.requires_grad for each in self._parameters)
        if is_last and not self._flat.is_cuda:
            self.start()

    def start(self) -> None:
        """Start the all-reduce of the accumulated gradients."""
        self.is_due, self._touched = False, 0
        grads = [local_of(p.grad) for p in self._parameters if p.grad is not None]
        for grad in _joined(grads):
            self._backwards.start(grad, self._number)

    def settle(self) -> None:
        """Wait for the all-reduces in flight, before anything else is added to a gradient."""
        self._backwards.settle()


def _touch(gradients: "ref[ReplicaGradients]", _parameter: Tensor) -> None:
    there = gradients()
    if there is not None:
        there.touch()


def _joined(grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients as one tensor where they lie side by side, as after a module's first backward.

    Empty ones are left out.
    """
    filled = [grad for grad in grads if grad.numel()]
    for one, next_one in pairwise(filled):
        if (
            one.data_ptr() + one.numel() * one.element_size() != next_one.data_ptr()
            or not one.is_contiguous()
        ):
            return filled
    if len(filled) < 2:
        return filled
    return [filled[0].as_strided((sum(grad.numel() for grad in filled),), (1,))]


class _Backwards:
    """The all-reduces of one backward after another, for all modules of a ring."""

    def __init__(self, ring: Ring) -> None:
        assert ring.replicas is not None
        self._members: WeakValueDictionary[int, ReplicaGradients] = WeakValueDictionary()
        self._num_members = 0
        self._group = ring.replicas
        self._ring = ref(ring)
        self._diagnosis = ring.hang_diagnosis
        self._in_flight: list[tuple[dist.Work, Tensor]] = []
        self._order = b""
        self._backward: int | None = None

    def add(self, member: ReplicaGradients) -> int:
        """The number of a new module's gradients, the same on every rank."""
        number, self._num_members = self._num_members, self._num_members + 1
        self._members[number] = member
        return number

    def begin(self) -> None:
        """Let the end of the present backward wait for the all-reduces started in it."""
        backward = number_of_backward()
        if backward != self._backward:
            self._backward = backward
            self._order = b""
            at_end_of_backward(self._finish)

    def start(self, grad: Tensor, number: int) -> None:
        """Start to add up ``grad`` over the replicas, in place."""
        what = f"{number} {grad.numel()} ".encode()
        self._order = blake2b(self._order + what, digest_size=7).digest()
        work = dist.all_reduce(grad, group=self._group, async_op=True)
        self._in_flight.append((work, grad))

    def finish(self, backward: int | None) -> None:
        """End the averages of a backward, if that is still to be done."""
        if backward == self._backward is not None:
            self._finish()

    def _finish(self) -> None:
        if self._backward is None:
            return  # the gradients of replicated parameters came first
        if (ring := self._ring()) is not None:
            ring.settle()
        for _, member in sorted(self._members.items()):
            if member.is_due and not member.postponed:
                member.start()
        some = self._in_flight[0][1] if self._in_flight else None
        self.settle()
        if some is not None:
            self._require_one_order(some)
        self._backward = None

    def settle(self) -> None:
        """Wait for all that was started."""
        with self._diagnosis.collective("averaging gradients over the replicas"):
            for work, grad in self._in_flight:
                work.wait()
                grad.div_(self._group.size())
        self._in_flight.clear()

    def _require_one_order(self, grad: Tensor) -> None:
        """Refuse replicas that trained other modules."""
        ring = self._ring()
        if is_fake(grad) or ring is None:
            return
        number = int.from_bytes(self._order, "little")
        like = torch.empty(0, dtype=torch.int64, device=grad.device)
        extremes = on_device([number, -number], like)
        with self._diagnosis.collective("comparing the modules that the replicas trained"):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        ring.checks.require(extremes.sum(), 0, _refuse_order)


def _refuse_order(_: int) -> None:
    raise RotationError(
        "the replicas of the ring did not train the same modules in the same order, so "
        "gradients of different modules were averaged; all ranks must call the same "
        "modules in the same order"
    )


_BACKWARDS: WeakKeyDictionary[Ring, _Backwards] = WeakKeyDictionary()


def _backwards_of(ring: Ring) -> _Backwards:
    if ring not in _BACKWARDS:
        _BACKWARDS[ring] = _Backwards(ring)
    return _BACKWARDS[ring]


def finish_backward(ring: Ring, backward: int | None) -> None:
    """Average what is left of a backward's shards over the replicas.

    For a collective that comes after it on all ranks. Torch calls what ends a backward in the order
    in which the backward asked for it, which a module that some ranks leave out changes.
    """
    if ring in _BACKWARDS:
        _BACKWARDS[ring].finish(backward)


def _require_equal_replicas(flat: Tensor, ring: Ring, name: str) -> None:
    """Refuse shards that differ among the replicas of the ring. Collective.

    Raises:
        RotationError: on every rank of all replicas.
    """
    assert ring.replicas is not None
    device = flat.device
    differs = torch.tensor(int(_differs(digest_of(flat), [ring.replicas], device)), device=device)
    dist.all_reduce(differs, dist.ReduceOp.MAX, group=ring.group)
    if differs.item():
        raise RotationError(
            f"{name} has other values in one replica of the ring than in another, so they would "
            "train different models. Give all ranks the same values, with one seed, one checkpoint "
            "or sync_from=0."
        )


def _differs(number: int, groups: Sequence[dist.ProcessGroup], device: torch.device) -> bool:
    """Whether a rank of the groups has another number, in [0, 2^62)."""
    extremes = torch.tensor([number, -number], device=device)
    for group in groups:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return bool(extremes.sum().item())


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
        replica_gradients: averages the gradients over the replicas of the ring; None for one ring.
    """

    _first_version = 0

    def __init__(self, sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh) -> None:
        """Copy this rank's slice of ``sources``; fill it with NaN where they are on `meta`."""
        self.layout = layout
        self.ring: Ring = ring_of(mesh)
        rank = self.ring.rank
        self.digests = [digest_of(source) for source in sources]
        self.replica_gradients: ReplicaGradients | None = None
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

    def require_here(self, parameter: Tensor, name: str) -> None:
        """Require that it is one of the parameters, whose local shard lies in ``flat``.

        Raises:
            RotationError: it is not, or no longer does.
        """
        is_own = any(parameter is each for each in self.parameters)
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
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


def has_sole_storage(tensor: Tensor) -> bool:
    """Whether no other tensor uses this one's storage, not even one that a graph saved."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)  # the tensor's use, and `storage`


# From a parameter to a weak reference; what it refers to lives as long as a module rotates it.
_SHARDED = WeakIdKeyDictionary()
_SUCCESSORS = WeakIdKeyDictionary()  # from a parameter that was cut to a weak reference, likewise


def sharded_parameters_of(parameter: nn.Parameter) -> ShardedParameters | None:
    """Where the shards of a parameter lie; None if it was not cut.

    The parameter that was cut and the DTensor that replaced it are both found.
    """
    reference = _SHARDED.get(parameter)  # type: ignore[no-untyped-call]
    sharded = reference() if reference is not None else None
    assert sharded is None or isinstance(sharded, ShardedParameters)
    return sharded


def lies_in_shards(tensor: Tensor) -> bool:
    """Whether a tensor's memory is that of a rank's shards; it takes a look at all modules."""
    found = {reference() for reference in _SHARDED.values()}  # type: ignore[no-untyped-call]
    addresses = {each.flat.untyped_storage().data_ptr() for each in found if each is not None}
    return bool(tensor.numel()) and tensor.untyped_storage().data_ptr() in addresses


def shard_parameters(
    sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh
) -> ShardedParameters:
    """Cut ``sources``; `sharded_parameters_of` finds the result from now on."""
    sharded = ShardedParameters(sources, layout, mesh)
    find_from(sharded, (*sources, *sharded.parameters))
    for source, parameter in zip(sources, sharded.parameters, strict=True):
        _SUCCESSORS[source] = weakref.ref(parameter)
    return sharded


def successor_of(source: nn.Parameter) -> nn.Parameter | None:
    """The parameter that has replaced this one when it was cut; None if none has."""
    reference = _SUCCESSORS.get(source)  # type: ignore[no-untyped-call]
    parameter: nn.Parameter | None = reference() if reference is not None else None
    return parameter


def copy_sharded(sharded: ShardedParameters) -> ShardedParameters:
    """Other parameters with the same values, which travel on the same ring."""
    copied = copy(sharded)
    copied.flat = copy_with_room(sharded.flat)
    copied.parameters = [
        with_local(parameter, view)
        for parameter, view in zip(sharded.parameters, copied.views(copied.flat), strict=True)
        if isinstance(parameter, DTensor)
    ]
    find_from(copied, copied.parameters)
    return copied


def note_rewritten(parameters: Iterable[nn.Parameter]) -> None:
    """Raise the versions of those that are sharded: all of their values are others."""
    for sharded in dict.fromkeys(map(sharded_parameters_of, parameters)):
        if sharded is not None:
            sharded.note_rewritten()


def find_from(sharded: ShardedParameters, parameters: Sequence[nn.Parameter]) -> None:
    """Let `sharded_parameters_of` find it, and average its gradients over the replicas."""
    if sharded.ring.replicas is not None:
        sharded.replica_gradients = ReplicaGradients(sharded.parameters, sharded.flat, sharded.ring)
    for parameter in parameters:
        _SHARDED[parameter] = weakref.ref(sharded)


_VIEW = torch.ops.aten.view.default
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def support_dtensors() -> None:
    """From now on these operators accept DTensors in this process.

    An operator that already has a handler keeps it.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(_VIEW, _View())
    of_torch = handlers[_UNSCALE]
    if not isinstance(of_torch, _ShardsFirst):
        handlers[_UNSCALE] = _ShardsFirst(of_torch)
    if DTensor.full_tensor is not _full_tensor:
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


class _View:
    """Torch's own view, whose refusal of uneven shards names functions that take them."""

    def __call__(
        self, op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> object:
        """View a DTensor.

        Raises:
            RotationError: uneven shards have no view of that shape.
        """
        handlers = DTensor._op_dispatcher._custom_op_handlers
        handlers.pop(op_call, None)  # so that torch's own way is taken
        try:
            return op_call(*args, **kwargs)
        except RuntimeError as error:
            if "unevenly sharded" not in str(error):
                raise
            shape, ranks = tuple(args[0].shape), args[0].device_mesh.size()
            raise RotationError(
                f"a parameter or gradient of shape {shape} is cut unevenly over {ranks} ranks and "
                "cannot be flattened. Take an optimizer of gyre_trainer.rotate (Adafactor, "
                "AdamW8bit, Muon) or torch's AdamW; in trainers, "
                "gyre_trainer.frameworks.huggingface.ShardedTrainer or "
                "gyre_trainer.frameworks.accelerate.prepare"
            ) from error
        finally:
            handlers[op_call] = self


class _ShardsFirst:
    """Torch's handler, called with the shards before the replicated gradients."""

    def __init__(self, of_torch: Callable[..., object]) -> None:
        self._of_torch = of_torch

    def __call__(
        self, op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> object:
        """Unscale the gradients in place, and note whether one of any rank is infinite."""
        grads, *others = args
        ordered = sorted(grads, key=lambda grad: not any(map(Placement.is_shard, grad.placements)))
        return self._of_torch(op_call, (ordered, *others), kwargs)


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


def refuse_random_writes() -> None:
    """From now on an error names `materialize` if random numbers are written to a shard.

    Each rank draws for its own rows, and all ranks have one seed. An operator that already has a
    handler keeps it.
    """
    # private: torch has no public way to register an operator of DTensors
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operator in _DRAWS:
        handlers.setdefault(operator, _drawn)


def _drawn(
    op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]
) -> object:
    target = args[0]
    if isinstance(target, DTensor) and lies_in_shards(target._local_tensor):
        raise RotationError(
            "a sharded parameter cannot be initialised by random numbers: each rank would draw the "
            f"same ones for other rows (got {op_call!s} of shape "
            f"{tuple(target.shape)}). Call materialize(model, seed=...), or initialise the model "
            "before it is rotated"
        )
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op_call)
    try:
        return op_call(*args, **kwargs)
    finally:
        handlers[op_call] = handler
