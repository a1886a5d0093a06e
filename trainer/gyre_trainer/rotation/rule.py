"""How a kind of module is cut into slices; `gyre_trainer.layers` has the rules for the kinds that are known."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gyre_trainer.rotation.deferred_grads import Late
from gyre_trainer.rotation.output_reduction import Added, Join
from gyre_trainer.shards.layout import Cut, Layout


@dataclass(frozen=True, slots=True)
class Part:
    """One slice while it is here.

    Attributes:
        weights: what stands for each parameter that is cut, by name.
        bounds: the half-open range of the cut dim that the slice holds, by name.
        late: what backward leaves for later; `Late.of` finds what concerns one tensor.
    """

    weights: Mapping[str, Tensor]
    bounds: Mapping[str, tuple[int, int]]
    late: Late


class Rule(ABC):
    """How one kind of module is cut, and how the slices' outputs make the module's.

    Attributes:
        backward_reads_weights: False where gradients need no weights, so that these need not travel again.
        divisible: whether any range of its one parameter will do as a slice, so that a large one may travel in pieces.
        recompute_pays: False where a slice keeps nothing for backward that it would pay to compute again.
        linear_in: names of parameters that outputs which add up are linear in; none where this needs no proof.
        by_token: whether a token's output is made of this token alone, so that backward may compute some tokens at a time once
            more. A token is whatever lies along the last dim.
    """

    backward_reads_weights: ClassVar[bool] = True
    divisible: ClassVar[bool] = False
    recompute_pays: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        """Whether slices need random numbers in training; `run` finds them in the argument `dropout_masks.DRAW`."""
        return False

    @property
    def linear_in(self) -> tuple[str, ...]:
        """See the class."""
        return ()

    @property
    def by_token(self) -> bool:
        """See the class."""
        return False

    @abstractmethod
    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """What is cut and where; parameters that are not named stay whole on every rank.

        Raises:
            RotationError: the module does not fit; names module and parameter.
        """

    def run(self, forward: Callable[..., Any], part: Part, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The output of one slice for the module's arguments; in ``forward``, its own, ``part`` stands for its parameters.

        It is a tensor, or tensors in tuples, lists and dicts, in the same form for every slice.
        """
        return forward(*args, **kwargs)

    def join(self, place: int, layout: Layout, dtype: torch.dtype) -> Join:
        """How the slices' outputs make the module's: they add up, unless a rule says otherwise.

        Args:
            place: of the output among those that `run` returns.
            layout: of the slices.
            dtype: of the activations around the module.
        """
        return Added(dtype)


@contextmanager
def swapped(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, ``tensors`` stand for the module's parameters of these names; after, the parameters are back."""
    split = [name.rpartition(".") for name in tensors]
    places = [(module.get_submodule(path)._parameters, name) for path, _, name in split]
    before = [parameters[name] for parameters, name in places]
    try:
        for (parameters, name), tensor in zip(places, tensors.values(), strict=True):
            parameters[name] = tensor  # type: ignore[assignment]  # attribute look-up returns whatever stands here
        yield
    finally:
        for (parameters, name), parameter in zip(places, before, strict=True):
            parameters[name] = parameter
