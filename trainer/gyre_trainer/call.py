"""A rotated module's arguments, and what one slice makes of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gyre_trainer.errors import RotationError
from gyre_trainer.home import local_of
from gyre_trainer.joined import Sum
from gyre_trainer.late import Late, LateGrads
from gyre_trainer.rotation import Rotation
from gyre_trainer.rule import Part, swapped


class _Missing:
    """Stands where a tensor will be."""


class Call:
    """One call of a rotated module.

    Attributes:
        tensors: what the outer graph sees: the home's parts, then the passengers, then the tensors among the arguments.
        recorded: whether a backward may follow.
        trainable: of the home's parts, whether they take a gradient in it.
        whole: passengers and arguments, cut off the outer graph.
        sums: of their gradients while slices contribute.
        outer_dtype: of the outputs.
    """

    def __init__(self, rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._rotation = rotation
        self._leaves, self._spec = tree_flatten((args, kwargs))
        homes = [rotation.home.local(rotation.module.get_parameter(cut.name), cut.name) for cut in rotation.layout.cuts]
        passengers = [local_of(rotation.module.get_parameter(name)) for name in rotation.passengers]
        self.tensors = [*homes, *passengers, *(leaf for leaf in self._leaves if isinstance(leaf, Tensor))]
        self.recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)
        self.whole: list[Tensor] = []
        self._output: tuple[list[Any], Any] | None = None

    def take_in(self, tensors: Sequence[Tensor]) -> None:
        """Cut the inputs off the graph around; passengers and the first input take on the dtype to compute in."""
        num_cuts, first = len(self._rotation.layout.cuts), len(self._rotation.passengers)
        self.tensors.clear()
        self.trainable = [self.recorded and tensor.requires_grad for tensor in tensors[:num_cuts]]
        self.sums = [Sum(tensor.dtype) for tensor in tensors[num_cuts:]]
        self.whole = [tensor.detach() for tensor in tensors[num_cuts:]]
        self.outer_dtype = self._rotation.home.flat.dtype
        if len(self.whole) > first and self.whole[first].is_floating_point():
            self.outer_dtype = self.whole[first].dtype
        for place, tensor in enumerate(self.whole[: first + 1]):
            if tensor.is_floating_point():
                self.whole[place] = tensor.to(self._rotation.policy.compute_dtype or tensor.dtype)
        if self.recorded:
            for tensor, source in zip(self.whole, tensors[num_cuts:], strict=True):
                tensor.requires_grad_(source.requires_grad)
        arrived = iter(self.whole[first:])
        self._leaves = [next(arrived) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self.late = Late({id(tensor): total for tensor, total in zip(self.whole, self.sums, strict=True)})

    def compute(self, index: int, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """One piece's outputs, and the leaves that its trainable parts of the parameters are in the outputs' graph."""
        rotation, pieces = self._rotation, self._rotation.pieces
        weights, bounds, trained = {}, {}, []
        for cut, view, trainable in zip(pieces.cuts, pieces.views(flat, index), self.trainable, strict=True):
            leaf = view.detach().requires_grad_(trainable)
            if trainable:
                trained.append(leaf)
            start, stop = bounds[cut.name] = pieces.bounds(cut, index)
            weights[cut.name] = F.pad(leaf, (start, cut.shape[0] - stop)) if cut.padded else leaf
        whole = dict(zip(rotation.passengers, self.whole, strict=False))
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        self.late.places = {id(leaf): place for place, leaf in enumerate(trained)}
        with swapped(rotation.module, {**weights, **whole}), LateGrads(self.late):
            output = rotation.rule.run(rotation.forward, Part(weights, bounds, self.late), args, kwargs)
        return self._take_apart(output), trained

    def _take_apart(self, output: Any) -> list[Tensor]:
        """The tensors of an output; its form and whatever else it has are the first slice's."""
        leaves, spec = tree_flatten(output)
        if self._output is None:
            self._output = [_Missing if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        wrong = next((tensor.dtype for tensor in tensors if not tensor.is_floating_point()), None)
        if wrong is not None or not tensors:
            raise RotationError(
                f"{self._rotation.name} returns {f'a tensor of {wrong}' if wrong else type(output).__name__}; "
                "what rotates returns floating-point tensors, one or several in tuples, lists and dicts"
            )
        return tensors

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """The module's output, of the joined tensors."""
        assert self._output is not None
        leaves, spec = self._output
        missing = iter(tensors)
        return tree_unflatten([next(missing) if leaf is _Missing else leaf for leaf in leaves], spec)

    def finish(self) -> list[Tensor | None]:
        """The gradients of passengers and arguments; nothing of the call is kept any more."""
        grads = [total.total for total in self.sums]
        self.whole.clear()
        self.sums.clear()
        self._leaves.clear()
        del self.late
        return grads
