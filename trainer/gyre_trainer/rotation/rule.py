"""How one kind of module is cut into slices; `gyre_trainer.layers` has the known kinds.

A rotated module between two calls: how it is cut, where its slice lies, how slices travel.

The life of a parameter: `gyre_trainer.shards.shard_parameters` keeps 1/N of it on each rank, and no
rank ever holds more of it than slices in transient buffers. A call sends copies of the slices round
the ring, and each rank runs the module on its own part of the batch with each slice in turn.
Backward sends the slices once more and returns an averaged gradient for the own slice, which the
optimizer applies in place. See [Note: The backward ring] in `gyre_trainer.rotation.ring_pass`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from types import MethodType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.output_reduction import DeferredGrads, OutputReduction, SumOfOutputs
from gyre_trainer.shards.layout import Cut, Layout
from gyre_trainer.shards.sharded_parameters import ShardedParameters
from gyre_trainer.torch_internals import parameters_of


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
    an embedding] in `gyre_trainer.rotation.embedding_rows`.

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
        module: the module whose parameters lie in ``sharded``.
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
