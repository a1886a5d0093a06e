# ruff: noqa: N803, N806, N815  # names carry shape letters
"""A head's statistics where the tokens of all ranks go round, and its slices stay.

See [Note: Visiting tokens] in `gyre_trainer.layers.head.visiting_tokens`. In forward a token's
statistics follow it, in backward the gradient of its features. A rank adds up the gradient of its
own slice from the tokens of all ranks, so no gradient of the vocabulary travels. Each call takes
this way where it sends fewer bytes than the slices would be; the number of tokens decides.

Dims: T tokens, D features, V classes of the slice, S statistics.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.comm.spans import path_of, span
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.head.slice_statistics import (
    Asked,
    Classes,
    add_product,
    differentiate,
    statistics_of,
    wide,
)
from gyre_trainer.layers.head.visiting_tokens import Field, Parcel, Trip, Visitor, counts_of_all
from gyre_trainer.layers.linear import rows
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.prefetch import prefetch_of
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import Rule, parameter_at
from gyre_trainer.shards.gradient_ring import SliceGrad
from gyre_trainer.shards.layout import Cut
from gyre_trainer.shards.local_shards import local_of, spec_of, with_spec

_NO_TARGET = -1


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
    call = _Call(rotation, x_TD, asked, whole_bias)
    if not call.is_fit:
        return None
    with span(f"{path_of(rotation.module)} forward: counting tokens"):
        call.counts = call.agreed_counts(len(x_TD))
    if call.counts is None:
        return None
    targets_T = torch.where(counted_T, targets_T, _NO_TARGET)
    _require_classes(targets_T, asked_of=call.num_classes)
    bias = whole_bias if whole_bias is not None else call.bias
    statistics: Tensor = _Visited.apply(call, x_TD, call.weight, bias, targets_T)  # type: ignore[no-untyped-call]
    return statistics


def _require_classes(targets_T: Tensor, asked_of: int) -> None:
    """Let torch refuse targets that are no classes, on the rank that has them."""
    classes = targets_T.new_zeros(()).expand(asked_of)
    classes.gather(0, torch.where(targets_T == _NO_TARGET, 0, targets_T))


class _Call:
    """One call of a head that tokens visit.

    Attributes:
        counts: how many tokens each rank has; None until that is known.
        is_fit: whether tokens may travel, whatever their number is; the same on all ranks.
    """

    counts: list[int] | None = None

    def __init__(
        self, rotation: Rotation, x_TD: Tensor, asked: Asked, whole_bias: Tensor | None
    ) -> None:
        self.rotation, self.asked = rotation, asked
        self.sharded, self.ring = rotation.sharded, rotation.sharded.ring
        self.num_features = x_TD.shape[1]
        self.weight = parameter_at(rotation.module, "weight")
        cut = {each.name for each in rotation.layout.cuts}
        self.bias = parameter_at(rotation.module, "bias") if "bias" in cut else None
        self.whole_bias = whole_bias
        trained = [
            each is not None and each.requires_grad
            for each in (x_TD, self.weight, self.bias, whole_bias)
        ]
        self.takes_grads = [torch.is_grad_enabled() and each for each in trained]
        self.given_dtype, self.dtype = x_TD.dtype, rotation.policy.compute_dtype or x_TD.dtype
        self.is_fit = not (
            rotation.replicated
            or rotation.layout.is_regrouped
            or asked.ahead
            or self.dtype != rotation.travelling_dtype
            or torch.is_autocast_enabled(x_TD.device.type)
        )
        self.device = x_TD.device
        self.version = self.sharded.version

    @property
    def num_classes(self) -> int:
        return int(self.rotation.layout.cuts[0].shape[0])

    def agreed_counts(self, num_tokens: int) -> list[int] | None:
        """How many tokens each rank has; None where slices travel."""
        number, like = self.rotation.number, torch.empty(0, dtype=self.dtype, device=self.device)
        form = repr((self.num_statistics, self.takes_grads)).encode()
        counts = counts_of_all(self.ring, number, num_tokens, crc32(form), like)
        return counts if counts is not None and self._sends_less(sum(counts)) else None

    def _sends_less(self, num_tokens: int) -> bool:
        """Whether as many tokens, of all ranks, are fewer bytes than the slices would be."""
        trains = any(self.takes_grads)
        per_class = (self.num_features + (self.bias is not None)) * self.dtype.itemsize
        parcels = [self.parcel, self.statistics]
        if trains:
            trained = self.num_features * self.takes_grads[1] + self.takes_grads[2]
            per_class = 2 * per_class + trained * self._grad_dtype.itemsize
            parcels += [self.parcel_of_backward, self.gradient]
        return sum(each.num_bytes(num_tokens) for each in parcels) < per_class * self.num_classes

    @property
    def num_statistics(self) -> int:
        return 2 + self.asked.with_sum

    @property
    def _grad_dtype(self) -> torch.dtype:
        return self.rotation.policy.grad_dtype or self.sharded.flat.dtype

    @cached_property
    def parcel(self) -> Parcel:
        """In forward: features, targets."""
        features = Field(self.dtype, self.num_features, by_token=True)
        return Parcel((features, Field(torch.int64, 1)), self.dtype)

    @cached_property
    def statistics(self) -> Parcel:
        """What follows tokens in forward."""
        return Parcel((Field(wide(self.dtype), self.num_statistics),), self._grad_dtype)

    @cached_property
    def parcel_of_backward(self) -> Parcel:
        """The same as in forward, the log-sum-exp, and the gradients of the statistics."""
        numbers = Field(wide(self.dtype), 1 + self.num_statistics)
        return Parcel((*self.parcel.fields, numbers), self.dtype)

    @cached_property
    def gradient(self) -> Parcel:
        """What follows tokens in backward: the gradient of the features, where one is wanted."""
        fields = (Field(self.given_dtype, self.num_features, by_token=True),)
        return Parcel(fields if self.takes_grads[0] else (), self._grad_dtype)

    def trip(self, parcel: Parcel, result: Parcel, *, forward: bool) -> Trip:
        """One trip of all tokens."""
        hop = HopIdentity(self.rotation.number, forward, False, 0, 0)
        assert self.counts is not None
        return Trip(self.ring, hop, self.counts, parcel, result, self.device)

    def pieces(self) -> Iterator["_Piece"]:
        """The own slice, piece by piece where it is computed with in another dtype."""
        rotation, rank = self.rotation, self.ring.rank
        is_copied = self.dtype != self.sharded.flat.dtype
        layout = rotation.pieces if is_copied else rotation.layout
        for round_ in range(layout.num_rounds):
            index = layout.piece(rank, round_)
            flat = layout.piece_in(self.sharded.flat.detach(), index)
            buffer = None
            if is_copied:
                buffer = self.ring.pool.take(layout.numel(0), self.dtype, self.device)
                flat = buffer[: flat.numel()].copy_(flat)
            weight_VD, *bias = layout.views(flat, index)
            start, stop = layout.bounds_in(index)["weight"]
            bias_V = bias[0] if bias else None
            if self.whole_bias is not None:
                bias_V = cast(local_of(self.whole_bias).detach()[start:stop], self.dtype)
            yield _Piece(round_, Classes(start, stop, self.num_classes), weight_VD, bias_V)
            if buffer is not None:
                self.ring.pool.put(buffer)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some classes of the own slice: the number of the piece, the classes, their parameters."""

    round_: int
    classes: Classes
    weight_VD: Tensor
    bias_V: Tensor | None


class _Visited(torch.autograd.Function):
    """Statistics of this rank's tokens over all classes."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        x_TD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets_T: Tensor,
    ) -> Tensor:
        call.sharded.require_here(weight, "weight")
        if any(call.takes_grads) and call.sharded.replica_gradients is not None:
            call.sharded.replica_gradients.before_training(path_of(call.rotation.module))
        statistics_ST = torch.empty(
            call.num_statistics, len(x_TD), dtype=wide(call.dtype), device=call.device
        )
        own = [cast(x_TD.detach(), call.dtype), targets_T[None]]
        trip = call.trip(call.parcel, call.statistics, forward=True)
        with span(f"{path_of(call.rotation.module)} forward: of visiting tokens"):
            trip.run(own, [statistics_ST], partial(_add_statistics, call))
        ctx.call = call
        ctx.save_for_backward(x_TD, targets_T, statistics_ST[0].clone())
        return statistics_ST

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ST: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
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
        with span(f"{path_of(rotation.module)} backward: of visiting tokens"):
            trip.run(
                own,
                [] if grad_x_TD is None else [grad_x_TD],
                grads.add,
                before_own=lambda: prefetch.start_next(rotation, rotation.pieces.num_rounds - 1),
            )
        return None, grad_x_TD, *grads.result(), None


def _add_statistics(call: _Call, visitor: Visitor) -> None:
    """Add those of the own classes."""
    x_TD, (targets_T,) = visitor.fields
    inputs = x_TD, targets_T, targets_T != _NO_TARGET
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

    def __init__(self, call: _Call) -> None:
        self._call = call
        _, self._of_weight, self._of_bias, self._of_whole_bias = call.takes_grads
        flat, scale = call.sharded.flat, 1 / call.ring.size
        self._flat = flat
        self._slices: list[SliceGrad] = []
        if self._of_weight or self._of_bias:
            dtype = torch.promote_types(flat.dtype, call.rotation.policy.grad_dtype or flat.dtype)
            self._flat = torch.empty_like(flat, dtype=dtype)
            copied = call.dtype != flat.dtype
            layout = call.rotation.pieces if copied else call.rotation.layout
            for round_ in range(layout.num_rounds):
                index = layout.piece(call.ring.rank, round_)
                views = layout.views(layout.piece_in(self._flat, index), index)
                self._slices.append(SliceGrad(views, empty=True, scale=scale))
        bias = call.whole_bias
        self._whole_bias = (
            torch.zeros_like(local_of(bias)) if self._of_whole_bias and bias is not None else None
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
            places_T, elsewhere_T = piece.classes.places(targets_T, targets_T != _NO_TARGET)
            slice_ = piece.weight_VD, piece.bias_V, places_T, elsewhere_T
            add = partial(self._add, visitor, x_TD, piece)
            differentiate(x_TD, slice_, numbers[0], numbers[1:], call.asked.chain, add)

    def _add(
        self, visitor: Visitor, x_TD: Tensor, piece: _Piece, chunk: slice, grads_TV: Tensor
    ) -> None:
        if self._of_weight:
            self._slices[piece.round_].add_product(0, grads_TV.T, x_TD[chunk])
        if self._of_bias:
            self._slices[piece.round_].add(1, grads_TV.sum(0))
        if self._whole_bias is not None:
            # not scaled: it is averaged over the ranks with other replicated parameters
            self._whole_bias[piece.classes.start : piece.classes.stop] += grads_TV.sum(0)
        for grad_x_TD in visitor.result:
            add_product(grad_x_TD[chunk], grads_TV, piece.weight_VD)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Of weight and bias: averages over the ranks, but for a bias that is whole."""
        for each in self._slices:
            each.close()
        call, found = self._call, {}
        if self._slices:
            shards = call.sharded.views(self._flat.to(call.sharded.flat.dtype))
            names = [cut.name for cut in call.rotation.layout.cuts]
            found = dict(zip(names, shards, strict=True))
        grads = [
            _as_gradient(found.get(name), parameter) if wanted else None
            for name, parameter, wanted in (
                ("weight", call.weight, self._of_weight),
                ("bias", call.bias, self._of_bias),
            )
        ]
        return grads[0], self._whole_bias if self._of_whole_bias else grads[1]


def _as_gradient(shard: Tensor | None, parameter: Tensor) -> Tensor | None:
    spec = spec_of(parameter)
    return shard if shard is None or spec is None else with_spec(shard, spec)
