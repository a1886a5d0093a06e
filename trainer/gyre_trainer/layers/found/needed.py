"""Arguments without which a forward cannot be called, found by calls.

Attention of windows takes as many tokens as a window has, that of DeBERTa needs a mask and a table
of positions, and a layer of Swin the sizes of an image. Which parameter takes what is not known, so
one of a few values is given to one parameter after the other, and the first call that succeeds
counts.
"""

from collections.abc import Iterator
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gyre_trainer.layers.found.calls import (
    MASK,
    TIME,
    optional_arguments,
    other_arguments,
    outputs_of,
    parameters_of,
    shape_of,
)
from gyre_trainer.rotation.backward.module_attributes import BeforeCall

# Rows of a table of positions. A forward takes those that it needs; more cost time, and with fewer
# a call fails where positions are counted from the middle of 1,024.
_NUM_POSITIONS = 2048
# Tokens of a window. Above this a twin's scores, for each row and head, would be large.
_MAX_WINDOW = 256


def times_of(module: nn.Module) -> list[int]:
    """How many tokens a module may be called with: a few, or those of a window that it has.

    A window has a square buffer: the distance, or what stands for it, of each token to each other.
    """
    shapes = [tuple(buffer.shape) for buffer in module.buffers()]
    windows = {shape[0] for shape in shapes if len(shape) == 2 and shape[0] == shape[1]}
    return [TIME, *sorted(each for each in windows if TIME < each <= _MAX_WINDOW)]


def can_be_called(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a module can be called, without a mask or with one."""
    masks = {k: v for k, v in other_arguments(module, arguments).items() if k == MASK}
    return any(_is_taken(module, arguments | each) for each in ({}, masks))


def _is_taken(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a call succeeds with arguments where the module's parameters are.

    What a call that fails has written to attributes is as before, such as a smaller window.
    """
    device = next(module.parameters()).device
    placed = tree_map_only(Tensor, lambda each: each.to(device), arguments)
    before = BeforeCall(module)
    if outputs_of(module, placed) is not None:
        return True
    for place, was in before.changes():
        place.put(was)
    return False


def needed_arguments(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Further arguments, with which the module can be called; None where there are none.

    It needs no mask among them if a mask alone is enough.

    Args:
        module: in evaluation.
        arguments: others, to call it with. Those of unknown parameters without default are None.
    """
    if can_be_called(module, arguments):
        return {}
    known = other_arguments(module, arguments)
    masks = {name: known.pop(name) for name in (MASK,) if name in known}
    tried = [{name: each} for name, each in known.items()]
    tried += [{name: each} for name, each in _values(module, arguments, {MASK, *known})]
    for mask in ({}, masks) if masks else ({},):
        for each in tried:
            if _is_taken(module, arguments | mask | each):
                return mask | each
    return None


def _values(
    module: nn.Module, arguments: dict[str, Any], known: set[str]
) -> Iterator[tuple[str, Any]]:
    """What a parameter may take: activations, a table of positions, an image's height and width."""
    _, time, width = shape_of(arguments)
    given = {name for name, value in arguments.items() if value is not None} | known
    may_be_none = {name for name, value in arguments.items() if value is None}
    yield from optional_arguments(module, arguments, given).items()
    unknown = [
        each.name
        for each in parameters_of(module)[1:]
        if each.name not in given and (each.default is None or each.name in may_be_none)
    ]
    for name in unknown:
        yield name, torch.randn(_NUM_POSITIONS, width, dtype=torch.float64)
    side = isqrt(time)
    for name in unknown:
        yield name, ((side, side) if side * side == time else (1, time))


def mask_of_windows(
    module: nn.Module, arguments: dict[str, Any], others: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The mask among ``others`` without a dim for heads, where the module takes it so alone."""
    if MASK not in others or outputs_of(module, arguments | {MASK: others[MASK]}) is not None:
        return {}
    flat = {MASK: others[MASK].squeeze(1)}
    return flat if outputs_of(module, arguments | flat) is not None else {}
