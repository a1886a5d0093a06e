"""Checks that a rule is true of its module, on the own slice and before training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.dropout_masks import MASKS_ARGUMENT
from gyre_trainer.rotation.backward.inner_checkpoints import WatchCheckpoints
from gyre_trainer.rotation.backward.randomness import generators_of, set_states, states_of
from gyre_trainer.rotation.backward.slice_dropout import Dropout, Place, Undropped
from gyre_trainer.rotation.caches.shared_cache import is_cache
from gyre_trainer.rotation.call import Call
from gyre_trainer.rotation.output_reduction import SumOfOutputs
from gyre_trainer.rotation.rotation import Rotation

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

    found: tuple[Any, Any] = tree_map_only(Tensor, recordable, (args, kwargs), is_leaf=is_cache)
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


def check_checkpoints(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module whose forward calls torch's checkpoint, where gradients are taken.

    Random numbers that it draws for this are drawn again afterwards.

    Raises:
        RotationError: it does.
    """
    if not torch.is_grad_enabled():
        return
    call, flat = _own_slice_call(rotation, args, kwargs)
    for tensor in call.inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    call.trainable = [True] * len(rotation.layout.cuts)
    with _same_numbers(rotation), WatchCheckpoints() as watch:
        outputs = call.compute(rotation.sharded.ring.rank, flat).outputs
    if watch.found(outputs):
        raise RotationError(
            f"{rotation.name} calls torch.utils.checkpoint in its forward, or saves tensors for "
            "backward by its own hooks, which does not work with a slice of its parameters. "
            'Leave that out and take RotationPolicy(recompute="block"), or let the layers inside '
            "rotate one by one (no rule for the module)."
        )


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
    if not all(_close(one, other) for one, other in zip(found, expected, strict=True)):
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
    flat, buffer = rotation.own_piece(0, forward=True)
    own = flat.clone()
    if buffer is not None:
        rotation.sharded.ring.pool.put(buffer)
    return call, own


def largest_finite(tensor: Tensor) -> float:
    """The largest magnitude among the finite values; 0 where there is none."""
    if not tensor.numel():  # an expert without tokens
        return 0.0
    return float(tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max().item())


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether they are equal but for rounding, with the same values that are not finite."""
    atol = 1e-2 * largest_finite(expected)
    return torch.allclose(found, expected, rtol=1e-2, atol=atol, equal_nan=True)
