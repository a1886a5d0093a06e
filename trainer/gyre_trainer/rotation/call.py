"""A rotated module's arguments, and what one slice computes from them.

The form of a call's arguments, or of an output: everything in it but its tensors. A module is
called once for each slice, so its arguments are put together as often.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre_trainer.comm.identity import path_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.recomputation import Recomputation, recomputable
from gyre_trainer.rotation.rule import (
    ArgumentCut,
    DeferredGrads,
    DeferWeightGrads,
    ModuleSlice,
    Rotation,
    RunningSum,
    autocast_of_now,
    parameter_at,
    swapped,
)
from gyre_trainer.shards.layout import local_of, with_spec
from gyre_trainer.torch_internals import TreeSpec, spec_of, tree_flatten, tree_unflatten, version_of


class Missing:
    """Marks the position of a tensor."""


@dataclass(frozen=True, slots=True)
class Passed:
    """Marks the position of a tensor that the module was called with.

    Attributes:
        place: the tensor's index among those of the arguments.
    """

    place: int


class Form:
    """The form of a value, nested or not.

    Attributes:
        leaves: of the value, in their order, with `Missing` in place of each tensor, or `Passed`.
    """

    def __init__(self, value: Any, given: Sequence[Tensor] = ()) -> None:
        """Keep none of the tensors in ``given``, which are the arguments'."""
        leaves, self._spec = _flat(value)
        places = {id(tensor): place for place, tensor in enumerate(given)}
        self._tensors: list[Tensor] = []
        self.leaves: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self.leaves.append(leaf)
            elif id(leaf) in places:
                self.leaves.append(Passed(places[id(leaf)]))
            else:
                self.leaves.append(Missing)
                self._tensors.append(leaf)

    def take_tensors(self) -> list[Tensor]:
        """The tensors among the leaves. The form keeps them no longer."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def filled(self, tensors: Sequence[Tensor], given: Sequence[Tensor] = ()) -> Any:
        """The value, with ``tensors`` in the places of `Missing`, and ``given`` of `Passed`."""
        arrived = iter(tensors)
        leaves = [
            next(arrived)
            if leaf is Missing
            else given[leaf.place]
            if isinstance(leaf, Passed)
            else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self._spec)


def _is_cache(value: Any) -> bool:
    library = sys.modules.get("transformers.cache_utils")
    return library is not None and isinstance(value, library.Cache)


def _flat(value: Any) -> tuple[list[Any], TreeSpec]:
    return tree_flatten(value, is_leaf=_is_cache)  # `transformers` registers some as containers


def _can_be_written_to(spec: TreeSpec) -> bool:
    """Whether a list, a dict or another container that can change is in a nested value."""
    if spec.is_leaf():
        return False
    is_tuple = spec.type is tuple or issubclass(spec.type, tuple)
    return not is_tuple or any(map(_can_be_written_to, spec.children()))


class Arguments(Form):
    """The form of the arguments of a call."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__((list(args), dict(kwargs)))
        given = (each for part in self._spec.children() for each in part.children())
        self._can_be_written_to = any(map(_can_be_written_to, given))
        self._given: list[tuple[TreeSpec, list[int]]] = []

    def call(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments; see `filled`."""
        args, kwargs = self.filled(tensors)
        if self._can_be_written_to:
            self._given = list(map(_identities, (*args, *kwargs.values())))
        return args, kwargs

    def written_to(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """One of the lists and dicts of the last `call` that the module has changed since, or None.

        They are others than the caller's, which would stay as it was.
        """
        if not self._can_be_written_to:
            return None
        values = zip((*args, *kwargs.values()), self._given, strict=True)
        return next((value for value, before in values if _identities(value) != before), None)


def _identities(value: Any) -> tuple[TreeSpec, list[int]]:
    """The structure of a value and the ids of its leaves, which are not kept."""
    leaves, spec = _flat(value)
    return spec, list(map(id, leaves))


_CONSTANTS = (
    Tensor,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    NoneType,
    range,
    slice,
    frozenset,
    Enum,
    PurePath,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def is_constant(value: Any) -> bool:
    """Whether no call can change an argument: it is immutable, or a function."""
    if isinstance(value, _CONSTANTS) or callable(value):
        return True
    return is_dataclass(value) and bool(getattr(value, "__dataclass_params__").frozen)  # noqa: B009


def may_be_returned(leaf: Any) -> bool:
    """Whether a leaf of an output has no tensors inside, which would be those of one slice."""
    return leaf is Missing or isinstance(leaf, (Passed, *_CONSTANTS))


def _told_of_output(name: str, returned: str) -> str:
    return (
        f"{name} returns {returned}; a rotated module must return floating-point tensors, one or "
        "several in tuples, lists and dicts. Or let the layers inside rotate one by one "
        "(find_blocks=False, and no rule for the module)"
    )


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A floating-point tensor in ``dtype``; any other, or with None, as it is."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


@dataclass(frozen=True, slots=True)
class ComputedSlice:
    """What a module computes with one slice.

    Attributes:
        outputs: the tensors that it returns, without arguments that it returns as they are.
        weights: the leaves of their graph that stand for the slice's trainable shards.
        inputs: those that stand for `Call.inputs`.
    """

    outputs: list[Tensor]
    weights: list[Tensor]
    inputs: list[Tensor]


class Call:
    """One call of a rotated module.

    Attributes:
        tensors: the inputs of the call in the graph around it: the sharded parameters, then the
            replicated parameters, then the tensors among the arguments.
        recorded: whether a backward may follow.
        recomputed: whether backward computes the slices again. Then an input is kept only where
            nothing can compute it again.
        trainable: for each shard, whether it takes a gradient in this call.
        inputs: the replicated parameters and the arguments, detached from the graph around the
            call.
        sums: the sums of the inputs' gradients, which all slices add to.
        outer_dtype: the dtype of the outputs.
        output_form: the form of the outputs; None before the first slice.
    """

    def __init__(self, rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._rotation = rotation
        self._arguments = Arguments(args, kwargs)
        self._num_replicated = len(rotation.replicated)
        sharded = [parameter_at(rotation.module, cut.name) for cut in rotation.layout.cuts]
        for parameter, cut in zip(sharded, rotation.layout.cuts, strict=True):
            rotation.sharded.require_here(parameter, cut.name)
        replicated = [local_of(parameter_at(rotation.module, name)) for name in rotation.replicated]
        self._specs = [spec_of(parameter) for parameter in sharded]
        given = self._arguments.take_tensors()
        self._argument_cuts = self._cuts_of(args, kwargs, given)
        self.tensors = [*sharded, *replicated, *given]
        self.recorded = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in self.tensors
        )
        self._require_constants()
        if self.recorded:
            rotation.sharded.before_training(path_of(rotation.module))
        self.recomputed = (
            self.recorded and rotation.policy.recomputes and rotation.rule.recompute_pays
        )
        self._autocast = autocast_of_now(rotation.sharded.flat.device)
        self._recomputations: list[Recomputation | None] = []
        # How to compute an input again; or the input, and its version after the call.
        self._kept_inputs: list[Recomputation | tuple[Tensor, int]] = []
        self.inputs: list[Tensor] = []
        self.output_form: Form | None = None

    def _cuts_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]
    ) -> dict[int, ArgumentCut]:
        """How arguments are cut, by their places among `inputs`."""
        rotation, found = self._rotation, {}
        if not rotation.rule.cut_arguments:
            return {}
        named = {**dict(zip(rotation.argument_names, args, strict=False)), **kwargs}
        for name in rotation.rule.cut_arguments:
            tensor = named.get(name)
            if not isinstance(tensor, Tensor):
                continue
            cut = rotation.rule.argument_cut(name, tensor.shape, rotation.layout)
            if cut is not None:
                place = next(place for place, each in enumerate(given) if each is tensor)
                found[self._num_replicated + place] = cut
        return found

    @property
    def given(self) -> list[Tensor]:
        """The tensors among the arguments, before `detach_inputs`."""
        return self.tensors[len(self._rotation.layout.cuts) + self._num_replicated :]

    def _require_constants(self) -> None:
        """Refuse objects that every slice would change, such as caches of keys and values."""
        for leaf in self._arguments.leaves:
            if not is_constant(leaf):
                raise RotationError(
                    f"{self._rotation.name} is called with a {type(leaf).__name__}, which each "
                    "slice could change: the module runs once for every rank's slice. Call the "
                    "model without it (use_cache=False for a cache of keys and values), or let the "
                    "layers inside rotate one by one (find_blocks=False, and no rule for the "
                    "module)"
                )

    def detach_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Detach the inputs from the graph around the call."""
        num_cuts, first = len(self._rotation.layout.cuts), self._num_replicated
        self.tensors.clear()
        self.trainable = [self.recorded and tensor.requires_grad for tensor in tensors[:num_cuts]]
        self.sums = [RunningSum(tensor.dtype) for tensor in tensors[num_cuts:]]
        self._take_grads = [self.recorded and tensor.requires_grad for tensor in tensors[num_cuts:]]
        inputs = [tensor.detach() for tensor in tensors[num_cuts:]]
        self.outer_dtype = self._rotation.outer_dtype(inputs[first:])
        self._set_inputs(inputs)

    def _set_inputs(self, inputs: list[Tensor]) -> None:
        """Cast the replicated parameters and the arguments to the dtype to compute in."""
        dtype = self._rotation.policy.compute_dtype
        self.inputs = [
            cast(tensor, dtype).requires_grad_(takes)
            for tensor, takes in zip(inputs, self._take_grads, strict=True)
        ]
        self.deferred = DeferredGrads(
            {id(tensor): total for tensor, total in zip(self.inputs, self.sums, strict=True)}
        )
        is_compiled = self._rotation.is_compiled
        self._defer = nullcontext() if is_compiled else DeferWeightGrads(self.deferred)

    def find_recomputations(self) -> None:
        """Find out how backward can get each argument without keeping it.

        This must happen before the graph around the call takes ``tensors`` in.
        """
        num_others = len(self._rotation.layout.cuts) + self._num_replicated
        arguments = [recomputable(tensor) for tensor in self.tensors[num_others:]]
        self.tensors[num_others:] = [tensor for tensor, _ in arguments]
        self._recomputations = [
            *[None] * self._num_replicated,
            *(recomputation for _, recomputation in arguments),
        ]

    def release_inputs(self) -> None:
        """Release the inputs that can be computed again, until `restore_inputs`."""
        self._kept_inputs = [
            recomputation or (tensor, version_of(tensor))
            for tensor, recomputation in zip(self.inputs, self._recomputations, strict=True)
        ]
        self.inputs.clear()
        del self.deferred, self._defer

    def restore_inputs(self) -> None:
        """Make all inputs available again.

        Raises:
            RotationError: one that nothing computes again was written to since the call.
        """
        kept = (each for each in self._kept_inputs if not isinstance(each, Recomputation))
        if any(version_of(tensor) != version for tensor, version in kept):
            raise RotationError(
                f"a tensor that {self._rotation.name} was called with was written to before its "
                "backward, which computes the module again from it. Give the module a copy "
                '(clone()), or take RotationPolicy(recompute="none").'
            )
        cache: dict[Any, Tensor] = {}
        self._set_inputs(
            [
                each.compute_again(cache) if isinstance(each, Recomputation) else each[0]
                for each in self._kept_inputs
            ]
        )
        self._kept_inputs.clear()

    def _inputs_of(self, index: int) -> list[Tensor]:
        """The inputs of a slice: of a cut argument, a leaf for its part."""
        if not self._argument_cuts:
            return self.inputs
        inputs = self.inputs[:]
        for place, cut in self._argument_cuts.items():
            part = cut.part(inputs[place].detach(), index)
            inputs[place] = part.requires_grad_(self._take_grads[place])
        return inputs

    def add_grads(self, index: int, grads: Iterator[Tensor | None]) -> None:
        """Add a slice's gradients of the inputs that take one, in their order."""
        for place, takes_grad in enumerate(self._take_grads):
            grad = next(grads) if takes_grad else None
            cut = self._argument_cuts.get(place)
            if cut is None or grad is None:
                self.sums[place].add(grad)
            else:
                cut.part(self.sums[place].writable(self.inputs[place]), index).add_(grad)

    def compute(self, index: int, flat: Tensor) -> "ComputedSlice":
        """What a piece gives, with the leaves of its graph.

        Args:
            index: the number of the piece.
            flat: the piece's weights.

        Raises:
            RotationError: the module returns something else than floating-point tensors.
        """
        rotation, pieces = self._rotation, self._rotation.pieces
        weights, bounds, trained = {}, pieces.bounds_in[index], []
        for cut, view, trainable in zip(
            pieces.cuts, pieces.views(flat, index), self.trainable, strict=True
        ):
            leaf = view.detach().requires_grad_(trainable)
            if trainable:
                trained.append(leaf)
            if cut.padded:
                start, stop = bounds[cut.name]
                leaf = F.pad(leaf, (start, cut.shape[0] - stop))
            weights[cut.name] = leaf
        inputs = self._inputs_of(index)
        others, given = inputs[: self._num_replicated], inputs[self._num_replicated :]
        args, kwargs = self._arguments.call(given)
        self.deferred.positions = {id(leaf): position for position, leaf in enumerate(trained)}
        with (
            swapped(rotation.module, weights | dict(zip(rotation.replicated, others, strict=True))),
            self._defer if torch.is_grad_enabled() else nullcontext(),
            self._autocast(),
        ):
            forward = rotation.slice_forward
            current = ModuleSlice(
                rotation.module,
                forward,
                weights,
                bounds,
                self.deferred,
                pieces.num_slices,
            )
            output = rotation.rule.run(current, *args, **kwargs)
        written = self._arguments.written_to(args, kwargs)
        if written is not None:
            raise RotationError(
                f"{rotation.name} writes to a {type(written).__name__} that it is called with. It "
                "runs once for every rank's slice, so the writes of a slice would be lost. Return "
                "it, or let the layers inside rotate one by one (find_blocks=False, and no rule "
                "for the module)"
            )
        return ComputedSlice(self._tensors_of(output, given), trained, inputs)

    def _tensors_of(self, output: Any, given: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of an output that are not among those that the slice was ``given``.

        The first slice's output gives the form and everything else.
        """
        form = Form(output, given)
        tensors = form.take_tensors()
        if self.output_form is None:
            odd = next((leaf for leaf in form.leaves if not may_be_returned(leaf)), None)
            if odd is not None:
                raise RotationError(_told_of_output(self._rotation.name, type(odd).__name__))
            self.output_form = form
        wrong = next((tensor.dtype for tensor in tensors if not tensor.is_floating_point()), None)
        if wrong is not None or not tensors:
            returned = f"a tensor of {wrong}" if wrong else type(output).__name__
            raise RotationError(_told_of_output(self._rotation.name, returned))
        return tensors

    def of_parameters(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the trainable shards as those of their parameters."""
        specs = [spec for spec, wanted in zip(self._specs, self.trainable, strict=True) if wanted]
        return [
            grad if spec is None else with_spec(grad, spec)
            for grad, spec in zip(grads, specs, strict=True)
        ]

    def finish(self) -> list[Tensor | None]:
        """The gradients of the inputs. Afterwards the call keeps nothing."""
        grads = [total.result() for total in self.sums]
        self.inputs.clear()
        self.sums.clear()
        self._arguments.leaves.clear()
        del self.deferred, self._defer
        return grads
