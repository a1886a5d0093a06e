"""Dropout masks that backward finds again, and masks that are equal at every number of ranks.

`RotationPolicy.dropout` chooses between two kinds. "independent": each rank draws its own masks,
for each slice from a generator that is seeded for this slice of this call. "equal": a counter-based
hash of the call's key, the sample's index in the global batch and the entry's index in the sample
says whether an entry is kept, so the mask depends neither on the rank that has the sample nor on
the slice that has the entry.

A call's key is drawn from torch's CPU generator. So each call has another key,
`torch.utils.checkpoint` draws the same one again, and runs with one seed have the same keys. For
"equal" masks every rank must have the same seed, and the ranks' parts of a batch must be equally
large and lie in the order of the ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from math import prod

import torch
from torch import Tensor

from gyre_trainer.comm.ring import Ring

MASKS_ARGUMENT = "_dropout_masks"  # the keyword argument that takes a call's masks to its slices


def new_key() -> int:
    """The key of one call, drawn from torch's CPU generator."""
    with torch._C._DisableTorchDispatch():  # a fake tensor has no value
        return int(torch.randint(2**62, ()))


@dataclass(frozen=True, slots=True)
class DropoutMasks:
    """The dropout masks of one call.

    Attributes:
        key: the call's key.
        ring: the ring that the batch is spread over.
        equal: whether the masks are equal at every number of ranks.
        batch_dim: the dim of the batch in the tensors that are dropped out.
        first: the index of the first entry along the last dim. It differs between slices of a
            sliced dim.
        positions: numbers the masks of one call.
    """

    key: int
    ring: Ring
    equal: bool
    batch_dim: int = 0
    first: int = 0
    positions: Iterator[int] = field(default_factory=count)

    def for_slice(self, first: int, batch_dim: int) -> "DropoutMasks":
        """The masks of one slice, which begins at ``first`` along the last dim."""
        return replace(self, first=first, batch_dim=batch_dim, positions=count())

    def apply(self, x: Tensor, p: float) -> Tensor:
        """``x`` with each entry set to 0 with probability ``p``, else divided by 1 - p."""
        seed = self.next_seed()
        if self.equal:
            kept = self._kept(x, p, seed)
        else:
            generator = torch.Generator(x.device).manual_seed(seed)
            kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(
                1 - p, generator=generator
            )
        return torch.where(kept, x, 0).mul_(1 / (1 - p) if p < 1 else 0.0)

    def next_seed(self) -> int:
        """The seed of the next mask."""
        return _seed(
            self.key, next(self.positions), *(() if self.equal else (self.ring.part, self.first))
        )

    def _kept(self, x: Tensor, p: float, seed: int) -> Tensor:
        """Which entries stay: bool, shaped as ``x``.

        The hash is of the row in the global batch, in the upper half of the bits, and the index in
        the row.
        """
        *leading, width = x.shape
        sizes = [
            size * (self.ring.num_parts if dim == self.batch_dim else 1)
            for dim, size in enumerate(leading)
        ]
        counters = torch.arange(self.first, self.first + width, device=x.device)
        for dim, size in enumerate(leading):
            offset = self.ring.part * size if dim == self.batch_dim else 0
            positions = torch.arange(offset, offset + size, device=x.device) * (
                prod(sizes[dim + 1 :]) << 32
            )
            counters = counters + positions.view(-1, *[1] * (len(leading) - dim))
        return _hashed(counters, seed) >= int(p * 2**53)


def _seed(*numbers: int) -> int:
    digest = blake2b(
        b"".join(number.to_bytes(8, "little") for number in numbers), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little", signed=True)


def _hashed(counters: Tensor, seed: int) -> Tensor:
    """53 random bits for each int64 counter: SplitMix64's finalizer (OOPSLA 2014)."""
    bits = (counters * -0x61C8864680B583EB).add_(seed)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << 33) - 1))
    return (bits >> 11).bitwise_and_((1 << 53) - 1)
