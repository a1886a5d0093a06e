"""A rotated module's arguments, and what one slice makes of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.deferred_grads import Late, LateGrads
from gyre_trainer.rotation.output_reduction import Sum
from gyre_trainer.rotation.recomputation import Recipe, autocast_of_now, remembered
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import Part, swapped
from gyre_trainer.rotation.token_chunk import Portion
from gyre_trainer.shards.sharded_parameters import local_of


class _Missing:
    """Stands where a tensor will be."""


class Call:
    """One call of a rotated module.

    Attributes:
        tensors: what the outer graph sees: the home's parts, then the passengers, then the tensors among the arguments.
        recorded: whether a backward may follow.
        recomputed: whether that computes slices once more; then inputs are kept only where nobody else has them.
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
        arguments = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.tensors = [*homes, *passengers, *arguments]
        self.recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)
        self.recomputed = self.recorded and rotation.policy.recompute and rotation.rule.recompute_pays
        self._leaves = [_Missing if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._autocast = autocast_of_now(rotation.home.flat.device)
        self._recipes: list[Recipe | None] = []
        self._again: list[Recipe | Tensor] = []
        self.whole: list[Tensor] = []
        self._output: tuple[list[Any], Any] | None = None
        self._is_split = False

    def take_in(self, tensors: Sequence[Tensor]) -> None:
        """Cut the inputs off the graph around."""
        num_cuts, first = len(self._rotation.layout.cuts), len(self._rotation.passengers)
        self.tensors.clear()
        self.trainable = [self.recorded and tensor.requires_grad for tensor in tensors[:num_cuts]]
        self.sums = [Sum(tensor.dtype) for tensor in tensors[num_cuts:]]
        self._take_grads = [self.recorded and tensor.requires_grad for tensor in tensors[num_cuts:]]
        whole = [tensor.detach() for tensor in tensors[num_cuts:]]
        self.outer_dtype = self._rotation.home.flat.dtype
        if len(whole) > first and whole[first].is_floating_point():
            self.outer_dtype = whole[first].dtype
        self._hold(whole)

    def _hold(self, whole: list[Tensor]) -> None:
        """Passengers and the first argument take on the dtype to compute in."""
        for place, tensor in enumerate(whole[: len(self._rotation.passengers) + 1]):
            if tensor.is_floating_point():
                whole[place] = tensor.to(self._rotation.policy.compute_dtype or tensor.dtype)
        self.whole = [tensor.requires_grad_(takes) for tensor, takes in zip(whole, self._take_grads, strict=True)]
        self.late = Late({})

    def remember(self) -> None:
        """Find out how backward has the arguments once more, before the outer graph takes in the tensors."""
        num_others = len(self._rotation.layout.cuts) + len(self._rotation.passengers)
        arguments = [remembered(tensor) for tensor in self.tensors[num_others:]]
        self.tensors[num_others:] = [tensor for tensor, _ in arguments]
        self._recipes = [*[None] * len(self._rotation.passengers), *(recipe for _, recipe in arguments)]

    def let_go(self, outputs: Sequence[Tensor]) -> None:
        """Arguments that backward has once more are not kept; no slice can be computed until `take_back`."""
        self._is_split = self.can_be_split(outputs)
        self._again = [recipe or tensor for tensor, recipe in zip(self.whole, self._recipes, strict=True)]
        self.whole.clear()
        del self.late

    def take_back(self) -> None:
        """All arguments are here again."""
        made: dict[Any, Tensor] = {}
        self._hold([each.make(made) if isinstance(each, Recipe) else each for each in self._again])
        self._again.clear()

    def can_be_split(self, outputs: Sequence[Tensor]) -> bool:
        """Whether backward takes some tokens at a time: one argument has many, and each has its place in each output."""
        rule, limit = self._rotation.rule, self._rotation.policy.recompute_tokens
        arguments = self.whole[len(self._rotation.passengers) :]
        if not rule.by_token or len(arguments) != 1 or arguments[0].ndim < 2 or not arguments[0].is_contiguous():
            return False
        places = arguments[0].shape[:-1]
        return places.numel() > limit and all(output.shape[:-1] == places for output in outputs)

    def everything(self) -> Portion:
        """All tokens."""
        return Portion(self.whole, self.sums)

    def portions(self) -> Iterator[Portion]:
        """What backward computes a slice for, one after the other."""
        return self.split() if self._is_split else iter((self.everything(),))

    def split(self) -> Iterator[Portion]:
        """Some tokens at a time, where that can be."""
        return self.everything().split(len(self._rotation.passengers), self._rotation.policy.recompute_tokens)

    def compute(self, index: int, flat: Tensor, portion: Portion) -> tuple[list[Tensor], list[Tensor]]:
        """One piece's outputs, and the leaves that its trainable parts of the parameters are in the outputs' graph."""
        rotation, pieces = self._rotation, self._rotation.pieces
        weights, bounds, trained = {}, {}, []
        for cut, view, trainable in zip(pieces.cuts, pieces.views(flat, index), self.trainable, strict=True):
            leaf = view.detach().requires_grad_(trainable)
            if trainable:
                trained.append(leaf)
            start, stop = bounds[cut.name] = pieces.bounds(cut, index)
            weights[cut.name] = F.pad(leaf, (start, cut.shape[0] - stop)) if cut.padded else leaf
        whole = dict(zip(rotation.passengers, portion.inputs, strict=False))
        arrived = iter(portion.inputs[len(rotation.passengers) :])
        leaves = [next(arrived) if leaf is _Missing else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        self.late.sums = {id(tensor): total for tensor, total in zip(portion.inputs, portion.sums, strict=True)}
        self.late.places = {id(leaf): place for place, leaf in enumerate(trained)}
        with swapped(rotation.module, {**weights, **whole}), LateGrads(self.late), self._autocast():
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
