"""Compares a rotated module with the whole one, gathered for that once: its outputs.

Also here:

* Checks that a rule is true of its module, on the own slice and before training.
* The checks of a rule at a module's first calls: what it says of itself, and what it computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError, TrainError
from gyre_trainer.inspection.agreement import refuse_together, refusing_together
from gyre_trainer.rotation.call import Call, cast
from gyre_trainer.rotation.recomputation import (
    generators_of,
    outside_of_layers,
    set_states,
    states_of,
)
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotated_module import RotatedModule, uncompiled
from gyre_trainer.rotation.rule import Rotation, Rule, SumOfOutputs, parameter_at, swapped
from gyre_trainer.torch_internals import is_fake, tree_leaves, tree_map_only


@contextmanager
def _same_numbers(rotation: Rotation) -> Iterator[None]:
    """A context whose random numbers are drawn again afterwards."""
    generators = generators_of(rotation.sharded.flat.device)
    states = states_of(generators)
    try:
        yield
    finally:
        set_states(generators, states)


@torch.no_grad()
def check_rule(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module whose slices' outputs do not add up to its own output, in its present mode.

    They add up where the output is linear in the weights that the rule names: times -2 where these
    weights are times -2. With a residual, a norm or an activation after the last layer it is not.
    Random numbers that it draws for this are drawn again afterwards.

    Raises:
        RotationError: the output is not linear in these weights, or is drawn by chance.
    """
    names, index = rotation.rule.linear_in, rotation.sharded.ring.rank
    call, flat = _own_slice_call(rotation, args, kwargs)
    with _same_numbers(rotation):
        before = states_of(generators_of(flat.device))
        outputs = call.compute(index, flat).outputs
        after = states_of(generators_of(flat.device))
    if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        raise RotationError(
            f"{rotation.name} draws random numbers, such as dropout's, and each slice would draw "
            "others. Keep that outside of the rotated module, or give no rule: its layers rotate "
            "one by one"
        )
    expected = [-2 * output for output in _that_add_up(rotation, outputs)]
    scaled = flat.clone()
    for cut, view in zip(rotation.layout.cuts, rotation.layout.views(scaled, index), strict=True):
        view.mul_(-2 if cut.name in names else 1)
    found = _that_add_up(rotation, call.compute(index, scaled).outputs)
    if not all(_close(one, other, 1e-2) for one, other in zip(found, expected, strict=True)):
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


# Relative to the largest value. Sums in another order differ by far less, a wrong rule by far more.
# Norms of `transformers` compute in float32, even of float64.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_OF_OTHERS = 5e-2


@torch.no_grad()
def verify_module(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module whose outputs are others when it rotates than as a whole.

    Every rank holds the whole module meanwhile. Random numbers that it draws for this are drawn
    again afterwards. Gradients follow from the outputs: autograd forms those of each slice.
    Collective.

    Raises:
        RotationError: on every rank of the ring, where one sees a difference; the message names
            the output.
    """
    if is_fake(rotation.sharded.flat):
        return
    with _same_numbers(rotation):
        expected = _tensors(_whole_output(rotation, args, kwargs))
    with _same_numbers(rotation):
        found = _tensors(run(rotation, args, kwargs))
    tolerance = _TOLERANCE.get(_dtype_of(rotation), _TOLERANCE_OF_OTHERS)
    reason = ""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not reason and not _close(one, other, tolerance):
            reason = (
                f"{rotation.name} computes something else when it rotates: output {place} is "
                f"{_off(one, other)}; its rule does not fit it, or its forward reads sizes that a "
                "slice does not have"
            )
    refuse_together(rotation, reason)
    if reason:
        raise RotationError(reason)


def _whole_output(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The output of the module with whole parameters. Collective."""
    module, dtype = rotation.module, rotation.policy.compute_dtype
    names = [*(cut.name for cut in rotation.layout.cuts), *rotation.replicated]
    whole = {name: cast(_whole(parameter_at(module, name)), dtype) for name in names}
    args, kwargs = tree_map_only(Tensor, lambda each: cast(each, dtype), (args, kwargs))
    with swapped(module, whole):
        return rotation.forward(*args, **kwargs)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _dtype_of(rotation: Rotation) -> torch.dtype:
    """What is computed in, which autocast may have chosen."""
    kind = rotation.sharded.flat.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return rotation.policy.compute_dtype or rotation.sharded.flat.dtype


def _off(found: Tensor, expected: Tensor) -> str:
    """How they differ, for a message."""
    if found.shape != expected.shape:
        return f"of shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if (found.isfinite() != expected.isfinite()).any():
        return "finite in other places"
    off, largest = largest_finite(found - expected), largest_finite(expected)
    return f"off by {off:.2g} where its largest value is {largest:.2g}"


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether they are equal but for rounding, with the same values that are not finite."""
    if found.shape != expected.shape:
        return False
    atol = tolerance * largest_finite(expected)
    found = found.to(expected.dtype)
    return torch.allclose(found, expected, rtol=tolerance, atol=atol, equal_nan=True)


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
