"""How one kind of module is cut into slices; `gyre_trainer.layers` has the known kinds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.backward.slice_dropout import (
    Masks,
    Undropped,
    dropout_inside,
    may_drop_out,
)
from gyre_trainer.rotation.output_reduction import OutputReduction, SumOfOutputs
from gyre_trainer.shards.layout import Cut, Layout


@dataclass(frozen=True, slots=True)
class ModuleSlice:
    """The slice of a module that is on this rank now.

    Attributes:
        module: the module, with the slice's weights in the place of its parameters.
        forward: its own forward. While a rule runs, the slice's weights stand in the place
            of the module's parameters.
        weights: tensors in the place of the parameters that are cut, by name.
        bounds: the half-open range of the cut dim that the slice holds, by name.
        deferred: gradients of linear layers that backward computes last.
        num_slices: how many slices make the module; 1 where it is computed whole.
        cuts: how its parameters are cut.
    """

    module: nn.Module
    forward: Callable[..., Any]
    weights: Mapping[str, Tensor]
    bounds: Mapping[str, tuple[int, int]]
    deferred: DeferredGrads
    num_slices: int
    cuts: Sequence[Cut]


@dataclass(frozen=True, slots=True)
class ArgumentCut:
    """How a tensor that a module is called with is cut.

    Attributes:
        dim: the dim that is cut.
        bounds: for each slice, the half-open range of it.
    """

    dim: int
    bounds: Sequence[tuple[int, int]]

    def part(self, tensor: Tensor, index: int) -> Tensor:
        """The part of slice ``index``, as a view."""
        start, stop = self.bounds[index]
        return tensor.narrow(self.dim, start, stop - start)


class Rule(ABC):
    """How one kind of module is cut, and how the slices' outputs make the module's output.

    Attributes:
        backward_reads_weights: False if gradients need no weights. Such weights do not travel in
            backward.
        divisible: whether any range of its one parameter can be a slice, so that a large slice may
            travel in pieces.
        recompute_pays: False if recomputation would save no memory.
        caches_heads: whether the keys and values that a slice adds to a cache are those of its own
            heads, so that slices can share a cache.
        linear_in: names of the parameters in which the outputs must be linear so that they add up;
            empty if that needs no check.
        drops_out: whether the forward may drop out. See [Note: Dropout in slices] in
            `gyre_trainer.rotation.backward.slice_dropout`.
    """

    backward_reads_weights: ClassVar[bool] = True
    divisible: ClassVar[bool] = False
    recompute_pays: ClassVar[bool] = True
    caches_heads: ClassVar[bool] = False
    drops_out: bool = False

    @property
    def uses_dropout(self) -> bool:
        """Whether slices drop out in training; the argument `MASKS_ARGUMENT` has the masks."""
        return self.drops_out

    def dropping(
        self, current: ModuleSlice, masks: Masks | None, arguments: Any
    ) -> AbstractContextManager[object]:
        """A context in which the slice's forward drops out as the rule says.

        Without masks nothing is dropped. ``arguments`` are those of the call.
        """
        if not self.drops_out or not may_drop_out(current.module):
            return nullcontext()
        masks = masks or Undropped()
        return dropout_inside(current.weights, self.linear_in, masks, arguments)

    def require_known_dropout(self, module: nn.Module) -> None:
        """Refuse a module that drops out otherwise than the rule knows, before each call.

        Rates may have changed since the module was rotated.

        Raises:
            RotationError: names the dropout.
        """
        return

    @property
    def linear_in(self) -> tuple[str, ...]:
        """Names of the parameters in which the outputs must be linear; none by default."""
        return ()

    @property
    def core(self) -> str:
        """The path of the module inside that is called with what the last layer does not take.

        Empty for a module whose own forward computes all; see `gyre_trainer.layers.split`.
        """
        return ""

    @property
    def cut_arguments(self) -> tuple[str, ...]:
        """Names of the forward's parameters whose tensors may be cut; none by default."""
        return ()

    def argument_cut(self, name: str, shape: Sequence[int], layout: Layout) -> ArgumentCut | None:
        """How a tensor of ``shape`` is cut that is given under one of `cut_arguments`.

        Returns:
            None where each slice is given all of it.

        Raises:
            RotationError: the tensor does not fit.
        """
        return None

    @abstractmethod
    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The cuts of a module. Parameters without a cut stay whole on every rank.

        Raises:
            RotationError: the module does not fit the rule; the message names module and parameter.
        """

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Any:
        """The output of the slice ``current`` for the module's arguments.

        It is a tensor, or tensors in tuples, lists and dicts, in the same form for every slice.
        """
        return current.forward(*args, **kwargs)

    def cached_heads(self, layout: Layout) -> Sequence[Sequence[int]]:
        """For each slice, which of as many equal parts of a cache's heads it has: one, its own.

        Each part must be in a slice, and may be in several.
        """
        return [(index,) for index in range(layout.num_slices)]

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """How the slices' outputs make the module's: they add up unless a rule differs.

        Args:
            position: the output's index among those that `run` returns.
            layout: the layout of the slices.
            dtype: the dtype of the activations around the module.
        """
        return SumOfOutputs(dtype)


class RowsRule(Rule):
    """The rule of a module that gives rows of its one parameter, cut along these, to its tokens.

    The rows that a rank needs are sent to it, so the slices stay where they are. See [Note: Rows of
    an embedding] in `gyre_trainer.shards.row_exchange`.

    Attributes:
        padding_idx: the token whose row takes no gradient; None for no such token.
    """

    padding_idx: int | None

    @abstractmethod
    def of_rows(self, current: ModuleSlice, places: Tensor, padding: int | None) -> Tensor:
        """The output for tokens whose rows stand in the parameter's place.

        Args:
            current: the module with these rows in the place of its parameter.
            places: of each token, the place of its row.
            padding: the place of the padding's row; None where there is none.
        """


def parameter_at(module: nn.Module, name: str) -> Any:
    """The parameter of a name, or the plain tensor that stands in its place.

    Raises:
        RotationError: the module has no such parameter any more.
    """
    path, _, last = name.rpartition(".")
    return _parameters_at(module, path, last)[last]


def _parameters_at(module: nn.Module, path: str, last: str) -> dict[str, Any]:
    """The parameters of the submodule at ``path``, with one named ``last``.

    `get_submodule` takes eight times as long.
    """
    inside: Any = module
    for name in path.split(".") if path else ():
        inside = None if inside is None else inside._modules.get(name)
    if inside is None or last not in inside._parameters:
        raise RotationError(
            f"{type(module).__name__} was changed after it was rotated, such as by adapters: "
            f"its parameter {path}{'.' if path else ''}{last} is gone. "
            "Change the model first, then rotate it, or rotate it with find_blocks=False."
        )
    parameters: dict[str, Any] = inside._parameters
    return parameters


class swapped:  # noqa: N801  # a context, used as a function is
    """A context in which ``tensors`` replace the module's parameters of these names.

    Raises:
        RotationError: the module has no such parameter any more.
    """

    __slots__ = ("_before", "_module", "_tensors")

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._module = module
        self._tensors = tensors

    def __enter__(self) -> None:
        places = []
        for name in self._tensors:
            path, _, last = name.rpartition(".")
            parameters = _parameters_at(self._module, path, last)
            places.append((parameters, last, parameters[last]))
        self._before = places
        for (parameters, last, _), tensor in zip(places, self._tensors.values(), strict=True):
            parameters[last] = tensor

    def __exit__(self, *_error: object) -> None:
        for parameters, last, parameter in self._before:
            parameters[last] = parameter
