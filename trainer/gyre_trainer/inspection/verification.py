"""Compares a rotated module with its own layers, each gathered while it runs: the outputs.

A rule may fit a module's shapes and not its code. So the first call in training, and the first in
evaluation, is computed by slices and by whole layers. Zeros tell nothing, such as those of a last
layer that begins as zero: the next call is compared, too. Zeros next to other outputs do, if no
matrix is zero: T5's attention returns the positions' biases, which it may not have.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError, TrainError
from gyre_trainer.inspection.agreement import refuse_together
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.recomputation import generators_of, states_of
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rule import Rotation, Rule, parameter_at, swapped
from gyre_trainer.torch_internals import (
    is_fake,
    number_of_backward,
    tree_leaves,
    tree_map_only,
    uncompiled,
)

# Relative to the largest value. Sums in another order differ by far less, a wrong rule by far more.
# Norms of `transformers` compute in float32, even of float64.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_OF_OTHERS = 5e-2


@torch.no_grad()
def verify_module(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Refuse a module whose outputs are others when it rotates than as a whole.

    Every rank holds one whole layer at a time. Gradients follow from the outputs: autograd forms
    those of each slice. Collective.

    Returns:
        Whether the outputs tell of the rule, on some rank.

    Raises:
        RotationError: on every rank of the ring, where one sees a difference; the message names
            the output. Or it draws random numbers.
    """
    if is_fake(rotation.sharded.flat):
        return True
    generators, reason = generators_of(rotation.sharded.flat.device), ""
    before = states_of(generators)
    expected = _tensors(_whole_output(rotation, args, kwargs))
    after = states_of(generators)
    found = _tensors(run(rotation, args, kwargs))
    if not all(map(torch.equal, before, after)):
        reason = (
            f"{rotation.name} draws random numbers, such as dropout's, and each slice would draw "
            "others. Keep that outside of the rotated module, or give no rule: its layers rotate "
            "one by one"
        )
    tolerance = _TOLERANCE.get(_dtype_of(rotation), _TOLERANCE_OF_OTHERS)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        difference = _difference(one, other, tolerance)
        if difference and not reason:
            reason = (
                f"{rotation.name} computes something else when it rotates: output {place} is "
                f"{difference}; its rule does not fit it, or its forward reads sizes that a "
                "slice does not have. Keep residuals, norms, activations and dropout after the "
                "last layer outside of the rotated module"
            )
    are_zero = refuse_together(rotation, reason, is_zero=not _tell(rotation, expected))
    if reason:
        raise RotationError(reason)
    return not are_zero


def _tell(rotation: Rotation, outputs: Sequence[Tensor]) -> bool:
    """Whether none of the outputs is zero throughout, but for constants of its code."""
    have_values = [bool(each.any()) for each in outputs]
    shards = rotation.sharded.views(rotation.sharded.flat)
    is_zero = any(each.dim() > 1 and each.numel() and not each.any() for each in shards)
    return all(have_values) or (any(have_values) and not is_zero)


def _whole_output(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The output of the module with whole parameters. Collective.

    Those of a linear layer are whole while it is called, and NaN else. If a layer was not called,
    the module may have read its parameters, and computes again with all of them.
    """
    module, dtype = rotation.module, rotation.policy.compute_dtype
    names = [*(cut.name for cut in rotation.layout.cuts), *rotation.replicated]
    parameters = {name: parameter_at(module, name) for name in names}
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in names}
    left = {each for each in owners.values() if isinstance(each, nn.Linear) and each is not module}
    layers = frozenset(left)
    args, kwargs = tree_map_only(Tensor, lambda each: cast(each, dtype), (args, kwargs))

    def whole(names: Iterable[str]) -> dict[str, Tensor]:
        return {name: cast(_full(parameters[name]), dtype) for name in names}

    def called(layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        left.discard(layer)
        with swapped(module, whole(name for name in names if owners[name] is layer)):
            return forward(*args, **kwargs)

    nan = {name: _nan_like(parameters[name], dtype) for name in names if owners[name] in layers}
    with ExitStack() as stack:
        stack.enter_context(swapped(module, nan | whole(name for name in names if name not in nan)))
        for layer in layers:
            vars(layer)["forward"] = partial(called, layer, layer.forward)
            stack.callback(vars(layer).pop, "forward")
        output = rotation.forward(*args, **kwargs)
    if left:
        with swapped(module, whole(names)):
            output = rotation.forward(*args, **kwargs)
    return output


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _nan_like(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor of the parameter's shape, without memory."""
    nan = torch.full((), torch.nan, dtype=dtype or parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape)


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _dtype_of(rotation: Rotation) -> torch.dtype:
    """What is computed in, which autocast may have chosen."""
    kind = rotation.sharded.flat.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return rotation.policy.compute_dtype or rotation.sharded.flat.dtype


def _difference(found: Tensor, expected: Tensor, tolerance: float) -> str:
    """How they differ, if by more than rounding; values that are not finite must be the same."""
    if found.shape != expected.shape:
        return f"of shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    found, largest = found.to(expected.dtype), _largest_finite(expected)
    if torch.allclose(found, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
        return ""
    if (found.isfinite() != expected.isfinite()).any():
        return "finite in other places"
    off = _largest_finite(found - expected)
    return f"off by {off:.2g} where its largest value is {largest:.2g}"


def _largest_finite(tensor: Tensor) -> float:
    """The largest magnitude among the finite values; 0 where there is none."""
    if not tensor.numel():  # an expert without tokens
        return 0.0
    return float(tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max().item())


# A single layer of this size is gathered in milliseconds, and holds 16 MiB in float32 meanwhile. A
# larger one, such as a head, might not fit into the memory that rotation is used for.
_MAX_VERIFIED_NUMEL = 2**22


def check_at_first_calls(module: nn.Module, rule: Rule | None, verify: bool | None) -> None:
    """From now on a module's first call in each mode, training and evaluation, is checked.

    Args:
        module: rotated by a rule; any other is left as it is.
        rule: that of the caller; None for the way of the module's class.
        verify: as `rotate_all` has it.
    """
    # A module of which a part rotates, such as torch's attention, is of a kind with tests.
    if not isinstance(module, RotatedModule) or type(module).forward is not RotatedModule.forward:
        return
    numel = sum(prod(cut.shape) for cut in module.rotation.layout.cuts)
    is_block = rule is not None and bool(rule.linear_in)
    is_large = verify is None and rule is not None and not is_block and numel > _MAX_VERIFIED_NUMEL
    module.is_unverified = is_large
    if not (is_block or verify or (verify is None and rule is not None and not is_large)):
        return
    module.unchecked_modes = frozenset((True, False))

    @uncompiled
    def first_call(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rotated: RotatedModule = called
        left = rotated.unchecked_modes  # a copy of the module has its own
        if rotated.training not in left or number_of_backward() != -1:  # which computes again
            return
        try:
            # A checkpoint around the call counts saved tensors; the checks are not made again.
            with saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                is_checked = verify_module(rotated.rotation, args, kwargs)
        except Exception as error:
            if rule is not None and not isinstance(error, TrainError):
                error.add_note(
                    f"{rotated.rotation.name} rotates as a whole, by {type(rule).__name__}, so its "
                    "code runs with a slice of its parameters. If that fails, let the layers "
                    "inside rotate one by one: no rule for the module, and find_blocks=False"
                )
            raise
        if is_checked:
            rotated.unchecked_modes = left - {rotated.training}

    entry: Any = module
    entry.register_forward_pre_hook(first_call, with_kwargs=True)
