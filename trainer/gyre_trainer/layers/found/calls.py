"""The calls in which a rule is tried on a twin: which arguments its forward takes.

A forward of attention may take a tensor of all heads, such as a bias of positions. Which of its
parameters does is found out by calls: such a tensor is taken, and changes what is returned.
"""

import inspect
import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gyre_trainer.rotation.call import may_be_returned

# The twin's width; its heads are as many and as wide as the module's.
WIDTH = 8
# As many rows as few modules have heads: where they are equal, a tensor of the batch passes for one
# of all heads.
_BATCH, TIME, _SOURCE_TIME = 7, 3, 4
# Names that `transformers` has for arguments of attention.
MASK, _ROTARY, _PLACES = "attention_mask", "position_embeddings", "cache_position"
_SOURCES = "key_value_states", "encoder_hidden_states"

_Module = TypeVar("_Module", bound=nn.Module)


def plain_arguments(
    module: nn.Module,
    *,
    attends: bool,
    width: int = WIDTH,
    time: int = TIME,
    others_are_none: bool = False,
) -> dict[str, Any]:
    """Arguments that a forward requires: activations first; others, and no mask, by their names.

    Of an attention (``attends``), one that has another name is left out. Activations are of
    ``time`` tokens and have ``width`` features.

    Raises:
        TypeError: the forward requires something else, which ``others_are_none`` lets be None.
    """
    first, *others = parameters_of(module)
    arguments: dict[str, Any] = {first.name: _random(_BATCH, time, width)}
    for parameter in others:
        if parameter.name == _ROTARY and attends:
            angles = _random(_BATCH, time, _head_dim(module))
            arguments[parameter.name] = angles.cos(), angles.sin()
        elif parameter.name == _PLACES and attends:
            arguments[parameter.name] = torch.arange(time)
        elif parameter.name == MASK:
            arguments[parameter.name] = None
        elif parameter.default is parameter.empty and not attends:
            if not others_are_none:
                raise TypeError(parameter.name)
            arguments[parameter.name] = None
    return arguments


def parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """The parameters of a forward that have names."""
    found = inspect.signature(module.forward).parameters.values()
    return [each for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def other_arguments(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """A mask, and activations of a source to attend to, by the names of the parameters for them.

    Args:
        module: what is called.
        arguments: of all its calls. A mask fits a source among them.
    """
    _, time, _ = shape_of(arguments)
    width = _SOURCE_TIME if any(name in arguments for name in _SOURCES) else time
    mask = torch.linspace(-1, 1, time * width, dtype=torch.float64).view(1, 1, time, width)
    known = {MASK: mask.expand(_BATCH, -1, -1, -1)} | _sources()
    names = {parameter.name for parameter in parameters_of(module)}
    names -= arguments.keys() & {*_SOURCES}
    return {name: tensor for name, tensor in known.items() if name in names}


def optional_arguments(
    module: nn.Module, arguments: dict[str, Any], known: Collection[str]
) -> dict[str, Tensor]:
    """Tensors like the activations, by the names of parameters that are None by default.

    Such a one may be a residual, which is not what slices may add up.

    Args:
        module: the module.
        arguments: of all its calls.
        known: names of parameters of which arguments are known.
    """
    return {
        parameter.name: _random(*shape_of(arguments))
        for parameter in parameters_of(module)[1:]
        if parameter.default is None and parameter.name not in known
    }


def without_hooks(twin: _Module) -> _Module:
    """The twin, which calls no hooks of its own: a call of the whole module calls them, once."""
    twin._forward_hooks.clear()
    twin._forward_pre_hooks.clear()
    twin._backward_hooks.clear()
    twin._backward_pre_hooks.clear()
    return twin


# Whole numbers that are few may be a switch, and random ones may all be equal.
_MIN_INVENTED = 8


def is_invented(buffer: Tensor) -> bool:
    """Whether a twin has other values in the place of a buffer; see `with_values`."""
    return buffer.is_meta or buffer.is_floating_point()


def with_values(buffer: Tensor) -> Tensor:
    """Values for a buffer of a twin: random positive numbers; zeros and ones for whole numbers.

    Floating-point numbers may change after the module was tried, as when a checkpoint is read, and
    may be zeros before. On `meta` nothing has values.

    Raises:
        TypeError: whole numbers on `meta` are so few that they may be a switch.
    """
    if buffer.is_floating_point():
        return (torch.rand(buffer.shape, dtype=torch.float64) + 0.5).to(buffer.dtype)
    if buffer.numel() < _MIN_INVENTED:
        raise TypeError(f"a buffer of {buffer.numel()} whole numbers without values")
    return torch.randint(2, buffer.shape).to(buffer.dtype)


def required_sources(module: nn.Module) -> dict[str, Tensor]:
    """Activations to attend to, by the names of parameters for them that have no default."""
    required = {each.name for each in parameters_of(module) if each.default is each.empty}
    return {name: tensor for name, tensor in _sources().items() if name in required}


def shape_of(arguments: dict[str, Any]) -> tuple[int, int, int]:
    """Rows, tokens and features of the activations, the first argument."""
    rows, time, width = next(iter(arguments.values())).shape
    return rows, time, width


def _sources() -> dict[str, Tensor]:
    return dict.fromkeys(_SOURCES, _random(_BATCH, _SOURCE_TIME, WIDTH))


def arguments_by_heads(
    module: nn.Module, arguments: dict[str, Any], num_heads: int
) -> dict[str, Tensor]:
    """By the names of parameters that take one: a tensor of all heads in dim -3.

    Args:
        module: in evaluation.
        arguments: others, to call it with.
        num_heads: query heads.
    """
    # a bias of scores, and a factor of what each head gives
    _, time, _ = shape_of(arguments)
    scores = num_heads, time, time
    shapes = (1, *scores), scores, (1, num_heads, 1, 1)
    found: dict[str, Tensor] = {}
    with _quiet():
        before = outputs_of(module, arguments)
        for parameter in parameters_of(module)[1:]:
            if parameter.name in (MASK, *_SOURCES) or parameter.name in arguments:
                continue
            if parameter.default is not None and parameter.default is not parameter.empty:
                continue
            for shape in shapes:
                given, other = ({parameter.name: _random(*shape)} for _ in range(2))
                after = outputs_of(module, arguments | given)
                # One that is required may be ignored, too.
                without = before or outputs_of(module, arguments | other)
                if after and without and not _are_equal(without, after):
                    found |= given
                    break
    return found


def batched_arguments(
    module: nn.Module, arguments: dict[str, Any], by_heads: dict[str, Tensor]
) -> Iterator[str]:
    """Names of ``by_heads`` under which a tensor with three dims has the batch in front, not heads.

    The module takes it with as many rows as the batch has, and not with as many as there are heads.
    """
    with _quiet():
        for name, tensor in by_heads.items():
            time = shape_of(arguments)[1]
            of_heads, of_batch = (_random(size, time, time) for size in (tensor.shape[-3], _BATCH))
            if outputs_of(module, arguments | {name: of_heads}) is None and (
                outputs_of(module, arguments | {name: of_batch}) is not None
            ):
                yield name


def outputs_of(module: nn.Module, arguments: dict[str, Any]) -> list[Tensor] | None:
    """What a module returns beside its arguments; None where it cannot be called like this."""
    try:
        with _quiet():
            return returned(module(**arguments), arguments)
    except Exception:  # foreign code, with arguments of another form than it takes
        return None


def returned(output: Any, arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors of an output that are none of the arguments.

    Raises:
        TypeError: there is no tensor, or there may be others inside of an object.
    """
    given = {id(each) for each in arguments.values()}
    leaves = tree_leaves(output)
    odd = next((leaf for leaf in leaves if not may_be_returned(leaf)), None)
    if odd is not None or not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(f"returns {type(output if odd is None else odd).__name__}")
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in given]


def _are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _head_dim(module: nn.Module) -> int:
    """The channels of a head that have rotary positions."""
    head_dim: int = getattr(module, "head_dim", None) or module.head_size  # type: ignore[assignment]
    return int(head_dim * getattr(getattr(module, "config", None), "partial_rotary_factor", 1.0))


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which a forward does not warn of arguments that it ignores."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
