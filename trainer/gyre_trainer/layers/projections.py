"""The linear layers of a block: into a width that is cut, and out of it.

A layer is an `nn.Linear`, or one of `transformers` that keeps its weight transposed, as GPT-2 has
them. One layer may pack several, as sections one after the other.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import mix_in
from gyre_trainer.shards.layout import Cut


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is the layer of `transformers` that GPT-2 has; it may not be installed."""
    cls = own_class(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def is_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether a block may have this embedding: one whose columns do not depend on each other."""
    if type(module) is not nn.Embedding:
        return False
    options = module.max_norm, module.scale_grad_by_freq, module.sparse
    return all(option is None or option is False for option in options)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def features_of(layer: nn.Module) -> tuple[int, int]:
    """Input and output features of such a layer."""
    rows, columns = layer.get_parameter("weight").shape
    return (rows, columns) if is_transposed_linear(layer) else (columns, rows)


class SliceTransposed:
    """Mixed in before the class of a transposed layer inside a block: its width is its weight's."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The features that the present weight makes."""
        return F.linear(x, self.weight.t(), self.bias)


def projections(
    module: nn.Module, inputs: tuple[str, ...], output: str, sections: tuple[int, ...] = ()
) -> list[Cut]:
    """The cuts of linear layers into a common width, and of the layer ``output`` out of it.

    Each of ``inputs`` has the given sections of output features; none where it is one layer.

    Raises:
        RotationError: one of them is missing or not linear.
    """
    weights, biases = [], []
    for name in (*inputs, output):
        layer = layer_of(module, name)
        closes, transposed = name == output, is_transposed_linear(layer)
        if transposed:
            mix_in(layer, SliceTransposed, "Slice")
        weight, bias = layer.get_parameter("weight"), layer._parameters["bias"]
        own = () if closes else sections
        dim = int(closes != transposed)
        weights.append(Cut(f"{name}.weight", tuple(weight.shape), dim, sections=own))
        if bias is not None:
            shape = tuple(bias.shape)
            biases.append(Cut(f"{name}.bias", shape, 0, padded=closes, sections=own))
    return weights + biases


def layer_of(module: nn.Module, name: str) -> nn.Module:
    """The linear layer of this name.

    Raises:
        RotationError: it is missing or not linear.
    """
    layer = dict(module.named_modules()).get(name)
    if not isinstance(layer, nn.Module) or not _is_linear(layer):
        raise RotationError(
            f"{type(module).__name__}.{name} is {type(layer).__name__}, "
            "but the rule needs a Linear there"
        )
    return layer


def core_of(module: nn.Module, path: str) -> nn.Module:
    """The module inside whose forward computes all but a block's last layer.

    Raises:
        RotationError: there is none.
    """
    found: nn.Module | None = dict(module.named_modules()).get(path)
    if found is None:
        raise RotationError(
            f"{type(module).__name__} has no module {path}, but the rule needs the core of a block "
            "there"
        )
    return found


def owner_of(module: nn.Module, count: str) -> tuple[Any, str]:
    """The object that has a count, the module or its ``config``, and the attribute's name."""
    first, _, last = count.rpartition(".")
    return (getattr(module, first) if first else module), last


def require_counts(module: nn.Module, counts: tuple[str, ...], divisor: int) -> None:
    """Return if each of the counts is a whole number that ``divisor`` divides.

    Raises:
        RotationError: a count is missing, is no whole number, or is not divisible.
    """
    for count in counts:
        value = count_of(module, count)
        if value is None or value % divisor:
            raise RotationError(
                f"{type(module).__name__}.{count} is {value}, but the rule needs a whole number "
                f"there that {divisor} divides"
            )


def require_changeable(module: nn.Module, counts: tuple[str, ...]) -> None:
    """Return if a slice can read other values of the counts, as `changed_counts` has it.

    Raises:
        RotationError: a count is one of a frozen dataclass, or another object that takes no value.
    """
    for count in counts:
        value = count_of(module, count)
        try:
            with changed_counts(module, {} if value is None else {count: value}):
                pass
        except (AttributeError, TypeError, NotImplementedError) as error:
            owner = count.rpartition(".")[0]
            holder = type(getattr(module, owner)).__name__ if owner else "the module"
            raise RotationError(
                f"{type(module).__name__}.{count} cannot be set, because {holder} is frozen or has "
                "it from elsewhere, but a slice has another number. Let the forward read it from "
                "the weights (view(..., -1, head_dim)) or from an attribute of the module, or let "
                f"{holder} take another value."
            ) from error


def count_of(module: nn.Module, count: str) -> int | None:
    """The value of a count; None where it is missing or no whole number."""
    try:
        owner, name = owner_of(module, count)
        value = getattr(owner, name)
    except AttributeError:
        return None
    return value if type(value) is int else None


@contextmanager
def changed_counts(module: nn.Module, counts: Mapping[str, int]) -> Iterator[None]:
    """A context in which the module reads other values of its counts, those of a slice.

    Counts of a ``config``, which modules share, are changed in a copy of it.
    """
    if not counts:
        yield
        return
    before = dict(vars(module))
    try:
        for first in {count.rpartition(".")[0] for count in counts} - {""}:
            vars(module)[first] = copy(getattr(module, first))
        for count, value in counts.items():
            owner, name = owner_of(module, count)
            setattr(owner, name, value)
        yield
    finally:
        for name in {count.partition(".")[0] for count in counts}:
            vars(module).pop(name, None)
            if name in before:
                vars(module)[name] = before[name]
