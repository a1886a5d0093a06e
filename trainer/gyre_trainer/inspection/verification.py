"""Compares a rotated module with the whole one, gathered for that once: outputs and gradients.

Also here:

* Checks that a rule is true of its module, on the own slice and before training.
* The checks of a rule at a module's first calls: what it says of itself, and what it computes.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from gyre_trainer.comm.mesh import ring_group
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RotationError, TrainError
from gyre_trainer.inspection.agreement import refuse_together, refusing_together
from gyre_trainer.rotation.call import Call, cast
from gyre_trainer.rotation.output_reduction import SumOfOutputs
from gyre_trainer.rotation.recomputation import (
    MASKS_ARGUMENT,
    Dropout,
    Place,
    Undropped,
    dropout_inside,
    generators_of,
    may_drop_out,
    outside_of_layers,
    set_states,
    states_of,
)
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotated_module import RotatedModule, uncompiled
from gyre_trainer.rotation.rule import Rotation, Rule, parameter_at, swapped
from gyre_trainer.shards.layout import local_of
from gyre_trainer.torch_internals import is_fake, tree_flatten, tree_map, tree_map_only

_DROPOUTS = frozenset(
    (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.native_dropout,
        torch.bernoulli,
    )
)


def check_rule(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module whose slices' outputs do not add up to its own output, in its present mode.

    Random numbers that it draws for this are drawn again afterwards.

    Raises:
        RotationError: it drops out before its first layers or after its last one and the rule does
            not, or elsewhere than the rule knows, or its output is not linear in the weights that
            the rule names.
    """
    with _same_numbers(rotation), torch.inference_mode(mode=False):
        _check_dropout(rotation, *_recordable(args, kwargs))
    with _same_numbers(rotation):
        _check_linearity(rotation, args, kwargs)


@contextmanager
def _same_numbers(rotation: Rotation) -> Iterator[None]:
    """A context whose random numbers are drawn again afterwards."""
    generators = generators_of(rotation.sharded.flat.device)
    states = states_of(generators)
    try:
        yield
    finally:
        set_states(generators, states)


def _recordable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Arguments with copies of tensors of inference mode, so that a graph may keep them."""

    def recordable(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.is_inference() else tensor

    found: tuple[Any, Any] = tree_map_only(Tensor, recordable, (args, kwargs))
    return found


class _DropoutOutside(TorchFunctionMode):
    """Refuses dropout before or after a module's layers: all slices must have one mask there.

    Attributes:
        seen: whether anything was dropped out.
    """

    def __init__(self, name: str, *, after: bool) -> None:
        """With ``after``, what takes a gradient is refused, and else what takes none."""
        super().__init__()
        self._name, self._after = name, after
        self.seen = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        x = args[0] if args else (kwargs or {}).get("input")
        rate = (kwargs or {}).get("p", args[1] if len(args) > 1 else None)
        if func in _DROPOUTS and isinstance(x, Tensor) and rate != 0 and _trains(args, kwargs):
            self.seen = True
            if x.requires_grad is self._after:
                where = "after its last layer" if self._after else "before its first layers"
                raise RotationError(
                    f"{self._name} drops out {where}, with {getattr(func, '__name__', 'dropout')}: "
                    "each slice would draw another mask. Keep that dropout outside of the rotated "
                    "module, or give its rule drops_out=True."
                )
        return func(*args, **kwargs or {})


def _trains(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a dropout drops anything, by its third argument."""
    last = args[2] if len(args) > 2 else (kwargs or {}).get("training", True)
    return last is not False


def _check_dropout(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not rotation.module.training:
        return
    last = [cut.name in rotation.rule.linear_in for cut in rotation.layout.cuts]
    outside = _DropoutOutside(rotation.name, after=True)
    behind = _dropouts(rotation, args, kwargs, last, outside)
    first = [not each for each in last]
    if not rotation.rule.drops_out and outside.seen:
        before = _DropoutOutside(rotation.name, after=False)
        _dropouts(rotation, args, kwargs, first, before)
    if not behind:
        return
    inside = _dropouts(rotation, args, kwargs, first)
    for one, other in zip(behind, inside, strict=True):
        is_whole = one.takes_grad or not other.takes_grad
        if is_whole is (one.place is Place.INSIDE):
            raise RotationError(
                f"{rotation.name} drops out a tensor of shape {one.shape} that "
                f"{'every slice has whole' if is_whole else 'is cut'}, "
                f"{'between' if is_whole else 'after'} its layers, so its rule does not know which "
                "slices must drop the same entries. Keep that dropout outside the rotated module."
            )


def _dropouts(
    rotation: Rotation,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    trainable: list[bool],
    outside: AbstractContextManager[object] | None = None,
) -> list[Dropout]:
    """What the own slice drops out as the rule knows, where these parameters take a gradient.

    ``outside`` is a context for other dropout.
    """
    undropped = Undropped()
    if rotation.rule.drops_out:
        kwargs = {**kwargs, MASKS_ARGUMENT: undropped}
    with torch.no_grad():
        call, flat = _own_slice_call(rotation, args, kwargs)
    call.trainable = trainable
    with torch.enable_grad(), outside or nullcontext():
        call.compute(rotation.sharded.ring.rank, flat)
    return undropped.seen


@torch.no_grad()
def _check_linearity(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module whose slices' outputs do not add up to its own output.

    They add up where the output is linear in the weights that the rule names: times -2 where these
    weights are times -2. With a residual, a norm or an activation after the last layer it is not.

    Raises:
        RotationError: the output is not linear in these weights.
    """
    names = rotation.rule.linear_in
    call, flat = _own_slice_call(rotation, args, kwargs)
    index = rotation.sharded.ring.rank
    with _same_numbers(rotation):
        outputs = call.compute(index, flat).outputs
    expected = [-2 * output for output in _that_add_up(rotation, outputs)]
    scaled = flat.clone()
    for cut, view in zip(rotation.layout.cuts, rotation.layout.views(scaled, index), strict=True):
        view.mul_(-2 if cut.name in names else 1)
    found = _that_add_up(rotation, call.compute(index, scaled).outputs)
    if not all(_is_close(one, other) for one, other in zip(found, expected, strict=True)):
        raise RotationError(
            f"the output of {rotation.name} is not linear in {', '.join(names)}, "
            "so its slices do not add up to it. Keep residuals, norms, activations and dropout "
            "after the last layer outside of the rotated module."
        )


def _that_add_up(rotation: Rotation, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Those of a slice's outputs that are added to the other slices'."""
    return [
        output
        for position, output in enumerate(outputs)
        if isinstance(
            rotation.rule.output_reduction(position, rotation.pieces, output.dtype), SumOfOutputs
        )
    ]


@torch.no_grad()
def _own_slice_call(
    rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, Tensor]:
    """A call for the own slice alone, and that slice in the dtype of the computation.

    No compiler takes part: a graph for the checks alone would be one of few.
    """
    rotation = replace(rotation, policy=replace(rotation.policy, compiler=None))
    call = Call(rotation, args, kwargs)
    call.detach_inputs(call.tensors[:])
    flat, buffer = rotation.own_piece(0)
    own = flat.clone()
    if buffer is not None:
        rotation.sharded.ring.pool.put(buffer)
    return call, own


def largest_finite(tensor: Tensor) -> float:
    """The largest magnitude among the finite values; 0 where there is none."""
    if not tensor.numel():  # an expert without tokens
        return 0.0
    return float(tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max().item())


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether they are equal but for rounding, with the same values that are not finite."""
    atol = 1e-2 * largest_finite(expected)
    return torch.allclose(found, expected, rtol=1e-2, atol=atol, equal_nan=True)


# Relative to the largest value. Sums in another order differ by far less, a wrong rule by far more.
# Norms of `transformers` compute in float32, even of float64.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_OF_OTHERS = 5e-2
# Some gradients, as those of keys' biases, are zero but for rounding. Up to this, relative to the
# largest gradient of the module's parameters, a gradient counts as zero, rotated and whole.
_NOISE = {torch.float64: 1e-12, torch.float32: 1e-6}
_NOISE_OF_OTHERS = 5e-3
# What both ways sum in few bits, such as gradients of keys, which cancel, may be off by more. So a
# difference is compared with the whole module's own rounding: its distance from float32.
_TIMES_ROUNDING = 4.0


def verify_module(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module that computes something else when it rotates than it does as a whole.

    Compared are the outputs and, where gradients are enabled, those of inputs and parameters.
    Every rank holds the whole module meanwhile. Dropout that the rule knows of drops nothing. A
    module that draws other random numbers in training, where its slices draw others, is compared in
    evaluation instead, with gradients; one that draws them there, too, is not, and a warning says
    so. Collective.

    Raises:
        RotationError: on every rank of the ring, where one sees a difference; the message names
            what differs.
    """
    if is_fake(rotation.sharded.flat):
        return
    generators = generators_of(rotation.sharded.flat.device)
    states = [generator.get_state() for generator in generators]
    try:
        is_compared = _compare(rotation, args, kwargs)
        if not is_compared and rotation.module.training:
            with _evaluating(rotation.module):
                is_compared = _compare(rotation, args, kwargs)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    if not is_compared:
        warnings.warn(
            f"{rotation.name} draws random numbers in evaluation, too, so it was not compared with "
            "its result as a whole: test its rule with these numbers switched off, or pass "
            "verify=False",
            stacklevel=2,
        )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """A context in which the module and those inside are in evaluation."""
    training = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in training.items():
            each.training = mode


def _compare(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether both ways were compared: not where a rank's whole module draws random numbers."""
    generators = generators_of(rotation.sharded.flat.device)
    before = [generator.get_state() for generator in generators]
    expected = _Results(rotation, args, kwargs, rotates=False)
    is_random = not all(
        torch.equal(generator.get_state(), state)
        for generator, state in zip(generators, before, strict=True)
    )
    if _on_any_rank(rotation, is_random):
        return False
    found = _Results(rotation, args, kwargs, rotates=True)
    dtype = _dtype_of(rotation)
    compared = list(zip(found.named(), expected.named(), strict=True))
    noise = _NOISE.get(dtype, _NOISE_OF_OTHERS) * expected.largest_grad()
    different = [
        (place, name)
        for place, ((name, one), (_, other)) in enumerate(compared)
        if not _agree(rotation, one, other, noise if place >= found.num_before_grads else 0.0)
    ]
    if dtype not in _TOLERANCE and _on_any_rank(rotation, bool(different)):
        exact = _in_float32(rotation, args, kwargs)
        different = [
            (place, name)
            for place, name in different
            if not exact or not _rounded(*(each for _, each in (*compared[place], exact[place])))
        ]
    reason = ""
    for place, name in different[:1]:
        (_, one), (_, other) = compared[place]
        off = _off(*_both(one, other))
        reason = (
            f"{rotation.name} computes something else when it rotates: {name} is {off}; its rule "
            "does not fit it, or its forward reads sizes that a slice does not have"
        )
    refuse_together(rotation, reason)
    if reason:
        raise RotationError(reason)
    return True


def _in_float32(
    rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor | None]]:
    """The whole module's results in float32; none where its code does not take that."""
    kind = rotation.sharded.flat.device.type
    try:
        with torch.autocast(kind, enabled=False):
            found = _Results(rotation, args, kwargs, rotates=False, dtype=torch.float32)
            return list(found.named())
    except RuntimeError:  # foreign code, with a dtype of its own
        return []


def _on_any_rank(rotation: Rotation, value: bool) -> bool:
    """Whether it is true of a rank of the ring: an expert without tokens draws nothing."""
    mesh = _mesh_of(rotation)
    flag = torch.tensor([int(value)], device=rotation.sharded.flat.device)
    with ring_of(mesh).hang_diagnosis.collective("verifying a rotated module"):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=ring_group(mesh))
    return bool(flag.item())


def _dtype_of(rotation: Rotation) -> torch.dtype:
    """What is computed in, which autocast may have chosen."""
    kind = rotation.sharded.flat.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return rotation.policy.compute_dtype or rotation.sharded.flat.dtype


def _mesh_of(rotation: Rotation) -> DeviceMesh:
    parameter = rotation.sharded.parameters[0]
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh


def _agree(rotation: Rotation, found: Tensor | None, expected: Tensor | None, noise: float) -> bool:
    """Whether they are equal but for rounding, or not above ``noise``; None counts as zeros."""
    if found is None and expected is None:
        return True
    dtype = _dtype_of(rotation)
    return _close(*_both(found, expected), _TOLERANCE.get(dtype, _TOLERANCE_OF_OTHERS), noise)


def _both(found: Tensor | None, expected: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both, with zeros in place of None."""
    some = expected if found is None else found
    assert some is not None
    return (
        torch.zeros_like(some) if found is None else found,
        torch.zeros_like(some) if expected is None else expected,
    )


def _rounded(found: Tensor | None, expected: Tensor | None, exact: Tensor | None) -> bool:
    """Whether ``found`` is about as far from the exact values as the whole module's own are."""
    if exact is None:
        return False
    one, other = _both(found, expected)
    if one.shape != other.shape or _of_another_kind(one, other).any():
        return False
    rounding = largest_finite(other.float() - exact)
    return largest_finite(one.float() - exact) <= _TIMES_ROUNDING * rounding


def _off(found: Tensor, expected: Tensor) -> str:
    """How they differ, for a message."""
    if found.shape != expected.shape:
        return f"of shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if (places := _of_another_kind(found, expected)).any():
        return f"of another kind (finite, infinite or no number) in {places.sum()} places"
    off, largest = largest_finite(found - expected), largest_finite(expected)
    return f"off by {off:.2g} where its largest value is {largest:.2g}"


class _Results:
    """Outputs and gradients of one call, whole or rotated; gradients of shards are averaged.

    Attributes:
        outputs: all tensors among the outputs.
        input_grads: gradients by the names of inputs; None for no gradient.
        grads: those by the names of parameters.
    """

    def __init__(
        self,
        rotation: Rotation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        rotates: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Call the module; as a whole in ``dtype``, or else in that of the policy."""
        self._rotation = rotation
        args, kwargs = tree_map(_leaf, (args, kwargs))
        leaves = tree_flatten((args, kwargs))[0]
        inputs = [each for each in leaves if _takes_grad(each)]
        names = [cut.name for cut in rotation.layout.cuts]
        own = [parameter_at(rotation.module, name) for name in names]
        others = {name: parameter_at(rotation.module, name) for name in rotation.replicated}
        if rotates:
            weights: list[Tensor] = list(own)
            output = run(rotation, args, kwargs)
        else:
            whole = {name: _whole(p) for name, p in zip(names, own, strict=True)}
            weights = list(whole.values())
            dtype = dtype or rotation.policy.compute_dtype
            local = {name: local_of(each) for name, each in others.items()}
            used = {name: cast(each, dtype) for name, each in {**whole, **local}.items()}
            args, kwargs = tree_map_only(Tensor, lambda each: cast(each, dtype), (args, kwargs))
            with swapped(rotation.module, used), _undropped(rotation, used):
                output = rotation.forward(*args, **kwargs)
        leaves = tree_flatten(output)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.outputs = [tensor.detach() for tensor in tensors]
        trained_others = {name: each for name, each in others.items() if each.requires_grad}
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        wanted = [
            *inputs,
            *trained_others.values(),
            *(tensor for tensor in weights if tensor.requires_grad),
        ]
        grads: list[Tensor | None] = [None] * len(wanted)
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        if trained and wanted:
            cotangents = [_cotangent(tensor) for tensor in trained]
            with _without_hooks(wanted):
                grads = list(torch.autograd.grad(trained, wanted, cotangents, allow_unused=True))
        found = iter(grads)
        self.input_grads = [(f"input {index}", next(found)) for index, _ in enumerate(inputs)]
        self.grads: list[tuple[str, Tensor | None]] = []
        for name in trained_others:
            grad = next(found)
            self.grads.append((name, None if grad is None else local_of(grad)))
        if not torch.is_grad_enabled():
            return
        for position, (name, weight) in enumerate(zip(names, weights, strict=True)):
            if weight.requires_grad:
                self.grads.append((name, self._shard(position, next(found), rotates=rotates)))

    @property
    def num_before_grads(self) -> int:
        """How many of `named` are no gradients of parameters."""
        return len(self.outputs) + len(self.input_grads)

    def named(self) -> Iterator[tuple[str, Tensor | None]]:
        """All of them with their names: outputs, and gradients of inputs and of parameters."""
        yield from ((f"output {place}", each) for place, each in enumerate(self.outputs))
        for name, grad in (*self.input_grads, *self.grads):
            yield f"the gradient of {name}", grad

    def largest_grad(self) -> float:
        """The largest entry of the gradients of parameters; 0 without any."""
        return max((largest_finite(each) for _, each in self.grads if each is not None), default=0)

    def _shard(self, position: int, grad: Tensor | None, *, rotates: bool) -> Tensor | None:
        """The own shard's averaged gradient."""
        rotation, ring = self._rotation, self._rotation.sharded.ring
        if rotates:
            return None if grad is None else local_of(grad)
        parameter = rotation.sharded.parameters[position]
        flat = rotation.sharded.flat
        mean = torch.zeros(parameter.shape, dtype=flat.dtype, device=flat.device)
        if grad is not None:
            mean.copy_(grad)
        mesh = _mesh_of(rotation)
        with ring_of(mesh).hang_diagnosis.collective("verifying a rotated module"):
            dist.all_reduce(mean, group=ring_group(mesh))
        layout = rotation.sharded.layout
        cut = layout.cuts[position]
        start, stop = layout.bounds(cut, ring.rank)
        return mean.narrow(cut.dim, start, stop - start) / ring.size


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context in which no hook on the gradient of one of the tensors is called."""
    hooks = {id(each): each._backward_hooks for each in tensors if each._backward_hooks}
    kept = [(each, dict(each)) for each in hooks.values() if each is not None]
    for each, _ in kept:
        each.clear()
    try:
        yield
    finally:
        for each, before in kept:
            each.update(before)


def _undropped(rotation: Rotation, weights: Mapping[str, Tensor]) -> AbstractContextManager[object]:
    """A context in which the whole module drops nothing that the rule knows of, as slices do."""
    rule = rotation.rule
    if not (rule.drops_out and may_drop_out(rotation.module)):
        return nullcontext()
    return dropout_inside(weights, rule.linear_in, Undropped())


def _whole(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        whole = parameter.full_tensor()
    return whole.detach().requires_grad_(parameter.requires_grad)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _cotangent(output: Tensor) -> Tensor:
    """What the output's entries weigh in the loss: as different as random ones, but no draw."""
    return torch.arange(output.numel(), device=output.device).cos().view_as(output).to(output.dtype)


def _takes_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _of_another_kind(one: Tensor, other: Tensor) -> Tensor:
    """Where one is infinite or no number, and the other one is not the same."""
    same = (one == other) | (one.isnan() & other.isnan())
    return ~(one.isfinite() & other.isfinite()) & ~same


def _close(found: Tensor, expected: Tensor, tolerance: float, noise: float) -> bool:
    """Whether they are equal but for rounding; what is not larger than ``noise`` is zero.

    Infinities and values that are not a number must be in the same places: a plain model may have
    them, too.
    """
    if found.shape != expected.shape or _of_another_kind(found, expected).any():
        return False
    largest = largest_finite(expected)
    if max(largest, largest_finite(found)) <= noise:
        return True
    return torch.allclose(
        found.to(expected.dtype), expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True
    )


# A module of this size is gathered in milliseconds, and holds 16 MiB in float32 meanwhile. Larger
# ones might not fit into the memory that rotation is used for.
_MAX_VERIFIED_NUMEL = 2**22


def check_at_first_calls(module: nn.Module, rule: Rule | None, verify: bool | None) -> None:
    """From now on a module's first call in each mode, training and evaluation, is checked.

    Args:
        module: rotated by a rule; any other is left as it is.
        rule: that of the caller; None for the way of the module's class.
        verify: as `rotate_all` has it.
    """
    # A module of which a part rotates, such as torch's attention, is of a kind with tests.
    if not isinstance(module, RotatedModule) or not _has_one_way(module):
        return
    numel = sum(prod(cut.shape) for cut in module.rotation.layout.cuts)
    is_large = verify is None and rule is not None and numel > _MAX_VERIFIED_NUMEL
    module.is_unverified = is_large
    verifies = rule is not None and not is_large if verify is None else verify
    proves = rule is not None and bool(rule.linear_in)
    if not (verifies or proves):
        return
    module.unchecked_modes = frozenset((True, False))

    @uncompiled
    def first_call(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rotated: RotatedModule = called
        left = rotated.unchecked_modes  # a copy of the module has its own
        if rotated.training not in left:
            return
        try:
            # A checkpoint around the call counts what is saved; the checks are not made again.
            with outside_of_layers(), saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                if proves:
                    with refusing_together(rotated.rotation):
                        check_rule(rotated.rotation, args, kwargs)
                if verifies:
                    verify_module(rotated.rotation, args, kwargs)
        except Exception as error:
            if rule is not None and not isinstance(error, TrainError):
                error.add_note(_told_of_slices(rotated))
            raise
        rotated.unchecked_modes = left - {rotated.training}
        hooks = called._forward_pre_hooks
        if not rotated.unchecked_modes and hooks.get(hook.id) is first_call:
            del hooks[hook.id], called._forward_pre_hooks_with_kwargs[hook.id]

    entry: Any = module
    hook = entry.register_forward_pre_hook(first_call, with_kwargs=True)


def _has_one_way(module: RotatedModule) -> bool:
    """Whether each of its calls goes round the ring with the arguments of the call."""
    return type(module).forward is RotatedModule.forward


def _told_of_slices(module: RotatedModule) -> str:
    """What to do where the code of a module fails that rotates as a whole."""
    return (
        f"{module.rotation.name} rotates as a whole, by {type(module.rotation.rule).__name__}, so "
        "its code runs with a slice of its parameters. If that fails, let the layers "
        "inside rotate one by one: no rule for the module, and find_blocks=False"
    )
