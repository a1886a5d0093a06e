"""A rotated module between two calls: how it is cut, where its slice lies, how slices travel.

The life of a parameter: `gyre_trainer.shards.shard_parameters` keeps 1/N of it on each rank, and no
rank ever holds more of it than slices in transient buffers. A call sends copies of the slices round
the ring, and each rank runs the module on its own part of the batch with each slice in turn.
Backward sends the slices once more and returns an averaged gradient for the own slice, which the
optimizer applies in place. See [Note: The backward ring] in `ring_pass`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.own_code import with_own_code
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.shards.layout import Layout
from gyre_trainer.shards.regrouping import meet, to_slice
from gyre_trainer.shards.sharded_parameters import ShardedParameters

_Dropout = Literal["independent", "equal"]
Recompute = Literal["none", "block", "layer"]
# Arguments of earlier versions, and what is written now.
_REMOVED = {
    "bundle_numel": "rotate_all(min_numel=...) to replicate small modules",
    "recompute_parts": 'recompute="layer"',
    "recompute_layers": 'recompute="layer"',
}


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
        dropout: "independent", each rank draws its own masks; or "equal", masks are equal at every
            number of ranks, if all ranks have one seed (`torch.manual_seed`). See
            `gyre_trainer.rotation.backward.dropout_masks`.
        residual_dtype: the dtype of activations between rotated modules: of what these return, and
            of replicated parameters in use (norms) and the arguments of their modules. None for
            `compute_dtype`; without either, a module returns the dtype that it is called with.
        compiler: a backend of `torch.compile`, such as "inductor", for what a module with several
            parameters computes with a slice; None to run modules as they are. All slices of one
            size share one compiled graph. Weight gradients are then formed beside the buffer that
            travels, so they take memory of their own. Blocks that drop out run as they are in
            training.
    """

    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    recompute: Recompute = "none"
    dropout: _Dropout = "independent"
    residual_dtype: torch.dtype | None = None
    compiler: str | None = None

    def __new__(cls, *_args: Any, **given: Any) -> "RotationPolicy":
        """Refuse arguments of earlier versions.

        Raises:
            RotationError: says all that is written now in their place.
        """
        now = [_REMOVED[name] for name in given if name in _REMOVED]
        if isinstance(given.get("recompute"), bool):
            now.insert(0, f'recompute="{"block" if given["recompute"] else "none"}"')
        if now:
            written = ", ".join(f"{name}={given[name]!r}" for name in given)
            raise RotationError(f"RotationPolicy({written}): write {' and '.join(now)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "residual_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise RotationError(
                    f"RotationPolicy({name}={dtype}): it must be a floating-point dtype or None"
                )
        for name, choices in (("recompute", Recompute), ("dropout", _Dropout)):
            if getattr(self, name) not in get_args(choices):
                raise RotationError(
                    f"RotationPolicy({name}={getattr(self, name)!r}): "
                    f"it must be one of {', '.join(get_args(choices))}"
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
        return self.policy.compiler is not None and len(self.layout.cuts) > 1

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
        forward = with_own_code(self.forward, type(self.module))
        compiled: Callable[..., Any] = torch.compile(forward, backend=self.policy.compiler)
        return compiled

    @property
    def sends_copy(self) -> bool:
        """Whether the own slice travels from a buffer, not from where it rests."""
        return self.travelling_dtype != self.sharded.flat.dtype or self.layout.is_regrouped

    def own_piece(self, round_: int, *, forward: bool) -> tuple[Tensor, Tensor | None]:
        """The own slice's piece of a round as it travels, and the pool's buffer that it is in.

        Without a buffer the piece is a view of the own slice; else a copy in the dtype and the form
        that travel, and the caller puts the buffer back. Collective where a parameter is packed.

        Args:
            round_: the number of the round.
            forward: whether it is for the module's forward.
        """
        flat = self.pieces.at_rest.piece_in(
            self.sharded.flat, self.pieces.piece(self.sharded.ring.rank, round_)
        )
        buffer = None
        if self.travelling_dtype != flat.dtype:
            buffer = self._take_buffer()
            flat = buffer[: flat.numel()].copy_(flat)
        return (
            self._regrouped(flat, buffer, forward) if self.layout.is_regrouped else (flat, buffer)
        )

    def _regrouped(
        self, resting: Tensor, buffer: Tensor | None, forward: bool
    ) -> tuple[Tensor, Tensor]:
        """The own slice as it travels, of all ranks' shards, and the buffer that it is in.

        ``buffer``, where ``resting`` may lie, is put back.
        """
        ring, hop = self.sharded.ring, HopIdentity(self.number, forward, False, 0, 0)
        meet(ring, resting, hop)
        own = self._take_buffer()
        travelling = own[: self.layout.numel(ring.rank)]
        to_slice(self.layout, ring, resting, travelling, hop)
        if buffer is not None:
            ring.pool.put(buffer)
        return travelling, own

    def _take_buffer(self) -> Tensor:
        """A buffer of the pool for a slice, in the dtype that travels."""
        flat = self.sharded.flat
        return self.sharded.ring.pool.take(self.pieces.numel(0), self.travelling_dtype, flat.device)
