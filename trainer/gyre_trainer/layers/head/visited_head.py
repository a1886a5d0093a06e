# ruff: noqa: N803, N806, N815  # names carry shape letters
"""One call of a head whose slices stay: what travels for tokens, and whether it is less.

See [Note: Visiting tokens] in `gyre_trainer.layers.head.visiting_tokens`.

Dims: T tokens, D features, V classes of the slice, S statistics.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import torch
from torch import Tensor

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.layers.head.slice_statistics import Asked, Classes, wide
from gyre_trainer.layers.head.visiting_tokens import Field, Parcel, Trip, counts_of_all
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import parameter_at
from gyre_trainer.shards.layout import Layout

NO_TARGET = -1


class VisitedHead:
    """One call of a head that tokens may visit.

    Attributes:
        rotation: the head's.
        asked: what is asked of each slice.
        sharded, ring: its parameters, and the ranks.
        weight, bias: the parameters that are cut; the bias is None where it is not.
        whole_bias: the bias, where every rank has it whole.
        takes_grads: whether features, weight, bias and whole bias take a gradient in this call.
        given_dtype, dtype: of the features, and the one to compute in.
        device: where all of it is.
        version: of the parameters.
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
            or asked.ahead is not None
            or self.dtype != rotation.travelling_dtype
            or torch.is_autocast_enabled(x_TD.device.type)
        )
        self.device = x_TD.device
        self.version = self.sharded.version

    @property
    def num_classes(self) -> int:
        """Of the whole head."""
        return int(self.rotation.layout.cuts[0].shape[0])

    def agreed_counts(self, num_tokens: int) -> list[int] | None:
        """How many tokens each rank has; None where slices travel."""
        number, like = self.rotation.number, torch.empty(0, dtype=self.dtype, device=self.device)
        form = repr((self.asked, self.takes_grads, self.given_dtype)).encode()
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
        """How many numbers of its logits each token has."""
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

    @property
    def _is_copied(self) -> bool:
        """Whether the slice is computed with in another dtype than it rests in."""
        return self.dtype != self.sharded.flat.dtype

    @property
    def layout(self) -> Layout:
        """How the own slice is divided: not at all, unless its pieces are copied."""
        return self.rotation.pieces if self._is_copied else self.rotation.layout

    def pieces(self) -> Iterator["Piece"]:
        """The own slice, piece by piece where it is computed with in another dtype."""
        layout, rank = self.layout, self.ring.rank
        for round_ in range(layout.num_rounds):
            index = layout.piece(rank, round_)
            flat = layout.piece_in(self.sharded.flat.detach(), index)
            buffer = None
            if self._is_copied:
                buffer = self.ring.pool.take(layout.numel(0), self.dtype, self.device)
                flat = buffer[: flat.numel()].copy_(flat)
            weight_VD, *bias = layout.views(flat, index)
            start, stop = layout.bounds_in(index)["weight"]
            bias_V = bias[0] if bias else None
            if self.whole_bias is not None:
                bias_V = cast(self.whole_bias.detach()[start:stop], self.dtype)
            yield Piece(round_, Classes(start, stop, self.num_classes), weight_VD, bias_V)
            if buffer is not None:
                self.ring.pool.put(buffer)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some classes of the own slice: the number of the piece, the classes, their parameters."""

    round_: int
    classes: Classes
    weight_VD: Tensor
    bias_V: Tensor | None
