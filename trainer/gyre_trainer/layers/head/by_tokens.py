# ruff: noqa: N803, N806  # names carry shape letters
"""A head's statistics where the tokens of all ranks go round, and its slices stay.

See [Note: Visiting tokens] in `gyre_trainer.layers.head.visiting_tokens`. In forward a token's
statistics follow it, in backward the gradient of its features. A rank adds up the gradient of its
own slice from the tokens of all ranks, so no gradient of the vocabulary travels. Each call takes
this way where it sends fewer bytes than the slices would be; the number of tokens decides.

Dims: T tokens, D features, V classes of the slice, S statistics.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gyre_trainer.comm.spans import path_of, span
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.head.slice_statistics import (
    Asked,
    add_product,
    differentiate,
    statistics_of,
    wide,
)
from gyre_trainer.layers.head.visited_head import NO_TARGET, Piece, VisitedHead
from gyre_trainer.layers.head.visiting_tokens import Visitor
from gyre_trainer.layers.linear import rows
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.prefetch import prefetch_of
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rule import Rule, parameter_at
from gyre_trainer.shards.gradient_ring import SliceGrad
from gyre_trainer.shards.layout import Cut
from gyre_trainer.shards.local_shards import spec_of, with_spec


@dataclass(frozen=True)
class VisitedRule(Rule):
    """For a head whose slices stay: the module before it in backward starts no hop for it."""

    backward_reads_weights: ClassVar[bool] = False
    recompute_pays: ClassVar[bool] = False
    divisible: ClassVar[bool] = True

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Weight and bias, along the classes."""
        return rows(module)


def statistics_by_tokens(
    linear: RotatedModule,
    inputs: tuple[Tensor, Tensor, Tensor],
    asked: Asked,
    whole_bias: Tensor | None,
) -> Tensor | None:
    """Statistics [S, T] of the logits over all classes; None where slices had better travel.

    It is None on all ranks or on none. Collective on two ranks or more.

    Args:
        linear: the head.
        inputs: features [T, D], targets [T], and which of them count.
        asked: what is asked of each slice.
        whole_bias: the bias, where every rank has it whole.

    Raises:
        RotationError: another rank calls another module.
        RuntimeError: a target that counts is no class.
    """
    rotation = linear.rotation_by(VisitedRule())
    if rotation.sharded.ring.size == 1:
        return None
    x_TD, targets_T, counted_T = inputs
    call = VisitedHead(rotation, x_TD, asked, whole_bias)
    if not call.is_fit:
        return None
    with span(f"{path_of(rotation.module)} forward: counting tokens"):
        call.counts = call.agreed_counts(len(x_TD))
    if call.counts is None:
        return None
    _require_classes(torch.where(counted_T, targets_T, 0), call.num_classes)
    for cut in rotation.layout.cuts:
        call.sharded.require_here(parameter_at(rotation.module, cut.name), cut.name)
    if any(call.takes_grads) and call.sharded.replica_gradients is not None:
        call.sharded.replica_gradients.before_training(path_of(rotation.module))
    targets_T = torch.where(counted_T, targets_T, NO_TARGET)
    bias = whole_bias if whole_bias is not None else call.bias
    statistics: Tensor = _Visited.apply(call, x_TD, call.weight, bias, targets_T)  # type: ignore[no-untyped-call]
    return statistics


def _require_classes(targets_T: Tensor, num_classes: int) -> None:
    """Let torch refuse targets that are no classes, on the rank that has them."""
    targets_T.new_zeros(()).expand(num_classes).gather(0, targets_T)


class _Visited(torch.autograd.Function):
    """Statistics of this rank's tokens over all classes."""

    @staticmethod
    def forward(
        ctx: Any,
        call: VisitedHead,
        x_TD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets_T: Tensor,
    ) -> Tensor:
        statistics_ST = torch.empty(
            call.num_statistics, len(x_TD), dtype=wide(call.dtype), device=call.device
        )
        own = [cast(x_TD.detach(), call.dtype), targets_T[None]]
        prefetch_of(call.ring).cancel()  # a forward that a checkpoint runs once more, in backward
        trip = call.trip(call.parcel, call.statistics, forward=True)
        with span(f"{path_of(call.rotation.module)} forward: passing tokens on"):
            trip.run(own, [statistics_ST], partial(_add_statistics, call))
        ctx.call = call
        ctx.save_for_backward(x_TD, targets_T, statistics_ST[0].clone())
        return statistics_ST

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ST: Tensor) -> tuple[Tensor | None, ...]:
        call: VisitedHead = ctx.call
        x_TD, targets_T, log_sum_exp_T = ctx.saved_tensors
        rotation = call.rotation
        if call.sharded.version != call.version:
            raise RotationError(
                f"parameters of {rotation.name} changed between forward and backward"
            )
        prefetch = prefetch_of(call.ring)
        prefetch.backward_begins(rotation)
        prefetch.cancel()
        grads = _Gradients(call)
        numbers = torch.cat([log_sum_exp_T[None], grad_ST])
        own = [cast(x_TD, call.dtype), targets_T[None], numbers]
        grad_x_TD = torch.empty_like(x_TD) if call.takes_grads[0] else None
        trip = call.trip(call.parcel_of_backward, call.gradient, forward=False)
        with span(f"{path_of(rotation.module)} backward: passing tokens on"):
            trip.run(
                own,
                [] if grad_x_TD is None else [grad_x_TD],
                grads.add,
                before_own=lambda: prefetch.start_next(rotation, rotation.pieces.num_rounds - 1),
            )
        return None, grad_x_TD, *grads.result(), None


def _add_statistics(call: VisitedHead, visitor: Visitor) -> None:
    """Add those of the own classes."""
    x_TD, (targets_T,) = visitor.fields
    inputs = x_TD, targets_T, targets_T != NO_TARGET
    is_empty = visitor.is_first
    for piece in call.pieces():
        found_ST = statistics_of(inputs, piece.weight_VD, piece.bias_V, piece.classes, call.asked)
        (total_ST,) = visitor.result
        if is_empty:
            total_ST.copy_(found_ST)
        else:
            torch.logaddexp(total_ST[0], found_ST[0], out=total_ST[0])
            total_ST[1:] += found_ST[1:]
        is_empty = False


class _Gradients:
    """The gradients that visitors leave on this rank, and those that follow them."""

    def __init__(self, call: VisitedHead) -> None:
        self._call = call
        _, self._of_weight, self._of_bias, self._of_whole_bias = call.takes_grads
        wanted = {"weight": self._of_weight, "bias": self._of_bias}
        layout = call.layout.only([wanted[cut.name] for cut in call.layout.cuts])
        self._layout, rank = layout.in_rounds(1), call.ring.rank
        flat, scale = call.sharded.flat, 1 / call.ring.size
        dtype = torch.promote_types(flat.dtype, call.rotation.policy.grad_dtype or flat.dtype)
        self._flat = torch.empty(self._layout.numel(rank), dtype=dtype, device=flat.device)
        self._slices: list[SliceGrad] = []
        for round_ in range(layout.num_rounds):
            index = layout.piece(rank, round_)
            views = layout.views(layout.piece_in(self._flat, index), index)
            self._slices.append(SliceGrad(views, empty=True, scale=scale))
        bias = call.whole_bias
        self._whole_bias = (
            torch.zeros_like(bias) if self._of_whole_bias and bias is not None else None
        )

    def add(self, visitor: Visitor) -> None:
        """Add those that one rank's tokens give."""
        call = self._call
        x_TD, (targets_T,), numbers = visitor.fields
        if visitor.is_first:
            for grad_x_TD in visitor.result:
                grad_x_TD.zero_()
        for piece in call.pieces():
            if piece.classes.start == piece.classes.stop:
                continue
            places_T, elsewhere_T = piece.classes.places(targets_T, targets_T != NO_TARGET)
            slice_ = piece.weight_VD, piece.bias_V, places_T, elsewhere_T
            add = partial(self._add, visitor, x_TD, piece)
            differentiate(x_TD, slice_, numbers[0], numbers[1:], call.asked.chain, add)

    def _add(
        self, visitor: Visitor, x_TD: Tensor, piece: Piece, chunk: slice, grads_TV: Tensor
    ) -> None:
        if self._of_weight:
            self._slices[piece.round_].add_product(0, grads_TV.T, x_TD[chunk])
        if self._of_bias:
            self._slices[piece.round_].add(-1, grads_TV.sum(0))
        if self._whole_bias is not None:
            # not scaled: it is averaged over the ranks with other replicated parameters
            self._whole_bias[piece.classes.start : piece.classes.stop] += grads_TV.sum(0)
        for grad_x_TD in visitor.result:
            add_product(grad_x_TD[chunk], grads_TV, piece.weight_VD)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Of weight and bias: averages over the ranks, but for a bias that is whole."""
        for each in self._slices:
            each.close()
        call, layout = self._call, self._layout
        shards = layout.views(self._flat.to(call.sharded.flat.dtype), call.ring.rank)
        found = dict(zip([cut.name for cut in layout.cuts], shards, strict=True))
        of_weight = _as_gradient(found["weight"], call.weight) if self._of_weight else None
        of_bias = _as_gradient(found["bias"], call.bias) if self._of_bias else self._whole_bias
        return of_weight, of_bias


def _as_gradient(shard: Tensor, parameter: Tensor | None) -> Tensor:
    spec = None if parameter is None else spec_of(parameter)
    return shard if spec is None else with_spec(shard, spec)
