"""How one kind of module is cut into slices; `gyre_trainer.layers` has the known kinds.

A rotated module between two calls: how it is cut, where its slice is, how slices travel.

The life of a parameter: `gyre_trainer.shards.sharded_parameters` keeps 1/N of it on each rank, and
no rank ever holds more of it than slices in transient buffers. A call sends copies of the slices
round the ring, and each rank runs the module on its own part of the batch with each slice in turn.
Backward sends the slices once more and returns an averaged gradient for the own slice, which the
optimizer applies in place. See [Note: The backward ring] in `gyre_trainer.rotation.ring_pass`.

Also here:

* How the slices' outputs make the module's output, and sums that many slices contribute to.
* Weight gradients of linear layers, computed last in a slice's backward.

A slice's gradient is still in flight to this rank while the slice's backward begins. So a linear
layer only records the two matrices whose product is its weight's gradient. The product is formed
when the gradient's buffer has arrived, straight into it: no weight's gradient exists next to the
buffer, and the hop is hidden behind the rest of the slice's backward. An operator that forms its
weight's gradient in parts adds each part to the buffer at once, and so waits for the hop earlier.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from types import MethodType
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.layout import Cut, Layout, SliceGrad, add_product
from gyre_trainer.shards.sharded_parameters import ShardedParameters
from gyre_trainer.torch_internals import child_of, parameters_of


class RunningSum:
    """A sum that grows in float32 or better, and is rounded once, to its dtype.

    Sums of bfloat16 would be rounded after each of N slices, so the error would grow with N.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        self._total: Tensor | None = None
        self._owned = False

    def add(self, tensor: Tensor | None, *, owned: bool = False) -> None:
        """Add a tensor, or nothing for None.

        Only an ``owned`` tensor, which no one else reads, may be written to later.
        """
        if tensor is None:
            return
        if self._total is None:
            self._total = tensor.to(self._wide)
            self._owned = owned or self._total is not tensor
        elif self._owned:
            self._total += tensor
        else:
            self._total, self._owned = self._total + tensor, True

    def writable(self, like: Tensor) -> Tensor:
        """The sum so far, in its own memory, so that the caller may add to parts of it.

        It is zero, shaped as ``like``, where nothing was added.
        """
        if self._total is None:
            self._total = torch.zeros(like.shape, dtype=self._wide, device=like.device)
        elif not self._owned:
            self._total = self._total.clone()
        self._owned = True
        return self._total

    def add_product(self, left: Tensor, right: Tensor, shape: Sequence[int]) -> None:
        """Add the product of two matrices, viewed in ``shape``."""
        total = self._total
        if total is None or not self._owned or not total.is_contiguous():
            self.add((left @ right).view(shape), owned=True)
        else:
            add_product(total.view(left.shape[0], right.shape[1]), left, right)

    def result(self) -> Tensor | None:
        """The sum in its dtype; None if nothing was added. Nothing is kept."""
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)


class OutputReduction:
    """How the slices' outputs of one call make the module's output: they add up by default."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._sum = RunningSum(dtype)

    def add(self, index: int, output: Tensor) -> None:
        """Add the output of slice ``index``."""
        self._sum.add(output)

    def result(self) -> Tensor:
        """The module's output after every slice's was added. The reduction does not keep it."""
        total = self._sum.result()
        assert total is not None
        return total

    def grad_of_slice(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of slice ``index``'s output, given the gradient of the module's output."""
        return grad


class ConcatenatedOutputs(OutputReduction):
    """The slices' outputs are side by side along one dim."""

    def __init__(
        self, dim: int, bounds: Sequence[tuple[int, int]], name: str, dtype: torch.dtype
    ) -> None:
        """``bounds`` are the slices' half-open ranges along ``dim``, from parameter ``name``."""
        self._dim = dim
        self._name = name
        self._bounds = bounds
        self._dtype = dtype
        self._whole: Tensor | None = None

    def add(self, index: int, output: Tensor) -> None:
        """Copy the output of slice ``index`` to its range."""
        start, stop = self._bounds[index]
        if output.shape[self._dim] != stop - start:
            raise RotationError(
                f"a slice's output of shape {tuple(output.shape)} does not fit the others': "
                f"it has to be {stop - start} wide along dim {self._dim}, "
                f"as the slice of {self._name} is"
            )
        if self._whole is None:
            shape = list(output.shape)
            shape[self._dim] = max(stop for _, stop in self._bounds)
            self._whole = output.new_empty(shape, dtype=self._dtype)
        self._whole.narrow(self._dim, start, stop - start).copy_(output)

    def result(self) -> Tensor:
        """The module's output."""
        whole, self._whole = self._whole, None
        assert whole is not None
        return whole

    def grad_of_slice(self, index: int, grad: Tensor) -> Tensor:
        """The slice's own range of ``grad``."""
        start, stop = self._bounds[index]
        return grad.narrow(self._dim, start, stop - start)


_UNBIND = (torch.unbind, Tensor.unbind)


class WeightGradProduct(NamedTuple):
    """The gradient of a weight as the product of two matrices.

    Attributes:
        position: the weight's index among the shards that take a gradient.
        entry: which of the matrices along that shard's first dim the weight is; None where it is
            the whole shard.
    """

    position: int
    left: Tensor
    right: Tensor
    entry: int | None = None


@dataclass(slots=True)
class DeferredGrads:
    """What the slices' graphs of one call share next to autograd.

    Attributes:
        sums: sums of the gradients of the call's inputs, by the inputs' ids. They are complete
            after the backward of the last slice.
        positions: the weights of the slice whose graph is recorded, by their ids: their index among
            the shards that take a gradient.
        entries: position, entry and matrix of weights that were unbound, by the matrices' ids.
            Keeping the matrices here keeps their ids from being reused.
        products: recorded by linear layers of the slice whose backward runs; `take_products`
            empties it.
        slice_grad: waits for the gradient of the slice whose backward runs, and returns it.
    """

    sums: Mapping[int, RunningSum]
    positions: Mapping[int, int] = field(default_factory=dict)
    entries: dict[int, tuple[int, int, Tensor]] = field(default_factory=dict)
    products: list[WeightGradProduct] = field(default_factory=list)
    slice_grad: Callable[[], SliceGrad] | None = None

    def add_product(self, position: int, left: Tensor, right: Tensor) -> None:
        """Add the product of two matrices to the gradient of the weight at ``position`` at once."""
        assert self.slice_grad is not None
        self.slice_grad().add_product(position, left, right)

    def take_products(self) -> list[WeightGradProduct]:
        """The products that were recorded since the last call."""
        products = self.products[:]
        self.products.clear()
        return products


class DeferWeightGrads(TorchFunctionMode):
    """A context: linear layers on the weights in ``deferred.positions`` record gradients.

    The same holds for the matrices that `unbind` takes out of such a weight.
    Any other use of a weight gives its gradient as usual.
    """

    def __init__(self, deferred: DeferredGrads) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if not args:  # by keywords, which no known layer does
            return result
        position = self._deferred.positions.get(id(args[0])) if func in _UNBIND else None
        if position is not None and result and result[0].ndim == 2:
            self._deferred.entries.update(
                {id(tensor): (position, entry, tensor) for entry, tensor in enumerate(result)}
            )
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._deferred.entries.clear()

    def _linear(
        self,
        input: Tensor,  # noqa: A002  # torch's name
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Any:
        position, entry = self._deferred.positions.get(id(weight)), None
        if position is None and id(weight) in self._deferred.entries:
            position, entry, _ = self._deferred.entries[id(weight)]
        if (
            position is None
            or not torch.is_grad_enabled()
            or torch.is_autocast_enabled(input.device.type)
        ):
            return F.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias, (position, entry), self._deferred)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """A linear layer that records its weight's gradient and adds its input's to a sum."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        where: tuple[int, int | None],
        deferred: DeferredGrads,
    ) -> Tensor:
        ctx.save_for_backward(source, weight)
        ctx.where, ctx.deferred, ctx.sum = where, deferred, deferred.sums.get(id(source))
        # With a bias and three dims or more it is a view, which nothing may write to in place.
        return F.linear(source, weight, bias).data

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # Only the backward of a ring pass comes here, and it records no graph.
        source, weight = ctx.saved_tensors
        grad = _rows(grad_output)
        position, entry = ctx.where
        product = WeightGradProduct(position, grad.t(), _rows(source), entry)
        ctx.deferred.products.append(product)
        grad_source = grad_bias = None
        if ctx.needs_input_grad[0] and ctx.sum is None:
            grad_source = (grad @ weight).view(source.shape)
        elif ctx.needs_input_grad[0]:
            ctx.sum.add_product(grad, weight, source.shape)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_source, None, grad_bias, None, None


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix of its last dim; `reshape` cannot do this where that dim is empty."""
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor.flatten(0, -2)


@dataclass(frozen=True, slots=True)
class ModuleSlice:
    """The slice of a module that is on this rank now.

    Attributes:
        module: the module, with the slice's weights in the place of its parameters.
        forward: its own forward. While a rule runs, the slice's weights stand in the place
            of the module's parameters.
        weights: tensors in the place of the cut parameters, by name.
        bounds: the half-open range of the cut dim that the slice holds, by name.
        deferred: gradients of linear layers that backward computes last.
        num_slices: how many slices make the module; 1 where it is computed whole.
    """

    module: nn.Module
    forward: Callable[..., Any]
    weights: Mapping[str, Tensor]
    bounds: Mapping[str, tuple[int, int]]
    deferred: DeferredGrads
    num_slices: int


@dataclass(frozen=True, slots=True)
class ArgumentCut:
    """How a tensor that a module is called with is cut.

    Attributes:
        dim: the cut dim.
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
        divisible: whether any range of its one parameter can be a slice, so that a large slice may
            travel in pieces.
        recompute_pays: False if recomputation would save no memory.
        linear_in: names of the parameters in which the outputs must be linear so that they add up;
            empty if that needs no check.
    """

    divisible: ClassVar[bool] = False
    recompute_pays: ClassVar[bool] = True

    @property
    def linear_in(self) -> tuple[str, ...]:
        """Names of the parameters in which the outputs must be linear; none by default."""
        return ()

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

    def call(
        self,
        rotation: "Rotation",
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        by_slices: "BySlices",
    ) -> Any:
        """The module's output; slices go round the ring unless a rule has another way, too."""
        return by_slices(rotation, args, kwargs)

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """How the slices' outputs make the module's: they add up unless a rule differs.

        Args:
            position: the output's index among those that `run` returns.
            layout: the layout of the slices.
            dtype: the dtype of the activations around the module.
        """
        return OutputReduction(dtype)


BySlices = Callable[["Rotation", Sequence[Any], Mapping[str, Any]], Any]
"""Runs a rotated module with positional and named arguments, slice by slice."""


def parameter_at(module: nn.Module, name: str) -> Any:
    """The parameter of a name, or the plain tensor that stands in its place.

    Raises:
        RotationError: the module has no such parameter any more.
    """
    path, _, last = name.rpartition(".")
    return _parameters_at(module, path, last)[last]


def _parameters_at(module: nn.Module, path: str, last: str) -> dict[str, Any]:
    """The parameters of the submodule at ``path``, with one named ``last``."""
    inside: Any = module
    for name in path.split(".") if path else ():
        inside = None if inside is None else child_of(inside, name)
    if inside is None or last not in parameters_of(inside):
        raise RotationError(
            f"{type(module).__name__} was changed after it was rotated, such as by adapters: "
            f"its parameter {path}{'.' if path else ''}{last} is gone. "
            "Change the model first, then rotate it, or rotate it with find_blocks=False."
        )
    parameters: dict[str, Any] = parameters_of(inside)
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


def autocast_of_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A function that makes contexts with autocast as it is now, but without its weight cache.

    The cached weights would belong to a remote slice.
    """
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    autocast = partial(torch.autocast, kind, dtype, enabled, cache_enabled=False)
    if enabled:
        return autocast
    return lambda: autocast() if torch.is_autocast_enabled(kind) else nullcontext()


Recompute = Literal["none", "block", "layer"]


@dataclass(frozen=True, slots=True)
class RotationPolicy:
    """How slices travel and compute. The rank's own shards keep the dtype of the parameters.

    Attributes:
        compute_dtype: the dtype of travelling weights and of the computation with them, to which
            every floating-point argument is cast; None for the parameters' own, and no cast.
        grad_dtype: the dtype of travelling gradients; None for the parameters' own.
        recompute: what backward computes again, so that no activation of it is kept. "none"; or
            "block", each slice and each norm, which sends nothing more; or "layer", also all else
            in a layer, the items of the model's outermost lists, of which only the inputs are
            kept. Then slices of what comes before a layer's last module travel once more, and all
            of a layer with listed experts.
        residual_dtype: the dtype of activations between rotated modules: of what these return, and
            of replicated parameters in use (norms) and the arguments of their modules. None for
            `compute_dtype`; without either, a module returns the dtype that it is called with.
        compiler: a backend of `torch.compile`, such as "inductor", for what a module with several
            parameters computes with a slice; None to run modules as they are. All slices of one
            size share one compiled graph. Weight gradients are then formed next to the buffer that
            travels, so they take memory of their own.
    """

    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    recompute: Recompute = "none"
    residual_dtype: torch.dtype | None = None
    compiler: str | None = None

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "residual_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise RotationError(
                    f"RotationPolicy({name}={dtype}): it must be a floating-point dtype or None"
                )
        if self.recompute not in get_args(Recompute):
            raise RotationError(
                f"RotationPolicy(recompute={self.recompute!r}): "
                f"it must be one of {', '.join(get_args(Recompute))}"
            )

    @property
    def recomputes(self) -> bool:
        """Whether backward computes slices again."""
        return self.recompute != "none"

    @property
    def outer_dtype(self) -> torch.dtype | None:
        """The dtype of activations between modules; None for that of each module's input."""
        return self.residual_dtype or self.compute_dtype


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotated module: how it is cut, and where its parameters are.

    Attributes:
        module: the module whose parameters are in ``sharded``.
        forward: the module's own forward, for whole and for sliced parameters.
        rule: how the module is cut.
        layout: how slices travel, with the parameters' names in this module.
        sharded: the sharded parameters; tied modules share them.
        policy: how slices travel and compute.
        replicated: names of parameters inside that no cut names; each rank has them whole.
        number: the module's number in `Ring.modules`, the same on every rank.
    """

    module: nn.Module
    forward: Callable[..., Tensor]
    rule: Rule
    layout: Layout
    sharded: ShardedParameters
    policy: RotationPolicy
    replicated: tuple[str, ...]
    number: int

    @property
    def name(self) -> str:
        """The name of the module's class, for messages."""
        return type(self.module).__name__

    @cached_property
    def _by_rule(self) -> dict[Rule, "Rotation"]:
        return {}

    def by(self, rule: Rule) -> "Rotation":
        """The same sharded parameters under another rule; equal rules give the same object."""
        if rule not in self._by_rule:
            self._by_rule[rule] = replace(self, rule=rule)
        return self._by_rule[rule]

    @cached_property
    def pieces(self) -> Layout:
        """How the slices travel: a large slice that can be divided travels in several pieces.

        The number of rounds is settled at the first call, when everything that rotates on the ring
        is known, and does not change afterwards.
        """
        if not self.rule.divisible:
            return self.layout
        return self.layout.in_pieces(self.sharded.ring.pool.largest_whole_numel)

    @property
    def travelling_dtype(self) -> torch.dtype:
        """The dtype of slices on their way; bytes of encoded weights stay bytes."""
        own = self.sharded.flat.dtype
        return self.policy.compute_dtype or own if own.is_floating_point else own

    def outer_dtype(self, arguments: Sequence[Tensor]) -> torch.dtype:
        """The dtype of the outputs of a call with these tensors among its arguments."""
        dtype = self.sharded.flat.dtype
        if arguments and arguments[0].is_floating_point():
            dtype = arguments[0].dtype
        return self.policy.outer_dtype or dtype

    @property
    def is_compiled(self) -> bool:
        """Whether slices are computed by a compiled graph; a single operator would gain nothing."""
        has_layers = len(self.layout.cuts) > 1 and isinstance(self.forward, MethodType)
        return self.policy.compiler is not None and has_layers

    @cached_property
    def argument_names(self) -> tuple[str, ...]:
        """The names of the forward's parameters, in their order."""
        return tuple(signature(self.forward).parameters)

    @cached_property
    def slice_forward(self) -> Callable[..., Any]:
        """The module's own forward, compiled if the policy says so."""
        if not self.is_compiled:
            return self.forward
        assert self.policy.compiler is not None
        compiled: Callable[..., Any] = torch.compile(self.forward, backend=self.policy.compiler)
        return compiled

    @property
    def sends_copy(self) -> bool:
        """Whether the own slice travels from a buffer, not from where it rests."""
        return self.travelling_dtype != self.sharded.flat.dtype

    def own_piece(self, round_: int) -> tuple[Tensor, Tensor | None]:
        """The own slice's piece of a round as it travels, and the pool's buffer that it is in.

        Without a buffer the piece is a view of the own slice. Else it is a copy in the dtype that
        travels, and the caller puts the buffer back.
        """
        ring = self.sharded.ring
        flat = self.pieces.piece_in(self.sharded.flat, self.pieces.piece(ring.rank, round_))
        if not self.sends_copy:
            return flat, None
        buffer = ring.pool.take(self.pieces.numel(0), self.travelling_dtype, flat.device)
        return buffer[: flat.numel()].copy_(flat), buffer
