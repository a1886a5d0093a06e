"""Checks that a rule is true of its module, on the own slice and before training."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.call import Call
from gyre_trainer.rotation.rotation import Rotation


@torch.no_grad()
def check_linearity(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module whose slices' outputs do not add up to its own output.

    They add up where the output is linear in the weights that the rule names: times -2 where these
    weights are times -2. With a residual, a norm or an activation after the last layer it is not.

    Raises:
        RotationError: the output is not linear in these weights.
    """
    names = rotation.rule.linear_in
    call, flat = _own_slice_call(rotation, args, kwargs)
    index = rotation.sharded.ring.rank
    expected = [-2 * output for output in call.compute(index, flat)[0]]
    scaled = flat.clone()
    for cut, view in zip(rotation.layout.cuts, rotation.layout.views(scaled, index), strict=True):
        view.mul_(-2 if cut.name in names else 1)
    found = call.compute(index, scaled)[0]
    if not all(_close(one, other) for one, other in zip(found, expected, strict=True)):
        raise RotationError(
            f"the output of {rotation.name} is not linear in {', '.join(names)}, "
            "so its slices do not add up to it; keep residuals, norms, activations and dropout "
            "after the last layer outside of the rotated module"
        )


@torch.no_grad()
def _own_slice_call(
    rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, Tensor]:
    """A call for the own slice alone, and that slice in the dtype of the computation."""
    call = Call(rotation, args, kwargs)
    call.detach_inputs(call.tensors[:])
    return call, rotation.sharded.flat.to(
        rotation.policy.compute_dtype or rotation.sharded.flat.dtype
    )


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(
        found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item(), equal_nan=True
    )
