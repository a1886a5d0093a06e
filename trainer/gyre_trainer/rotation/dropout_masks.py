"""Dropout in what rotates: masks that backward finds again, and masks that are the same at every number of ranks.

`RotationPolicy.dropout` chooses. "independent": each rank draws its own masks, and each slice on it, from a generator that is
seeded for this slice of this call. "equal": whether an entry is kept is a function of the call's key, of the sample's place in
the global batch and of the entry's place in the sample alone, computed by a counter-based hash; so it depends neither on the
rank that has the sample nor on the slice that has the entry.

A call's key is drawn from torch's CPU generator. So it is another one in every call, `torch.utils.checkpoint` draws it again,
and runs that are seeded alike have the same ones. For "equal" masks every rank must be seeded alike, and the ranks' parts of a
batch lie in the order of the ranks and are equally large.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from math import prod

import torch
from torch import Tensor

from gyre_trainer.comm.ring import Ring

DRAW = "_draw"  # the argument by which a call's draw reaches its slices


def fresh_key() -> int:
    """One call's; drawn from torch's CPU generator."""
    return int(torch.randint(2**62, ()))


@dataclass(frozen=True, slots=True)
class Draw:
    """Where masks of one call come from.

    Attributes:
        key: of the call.
        ring: that the batch is spread over.
        equal: at every number of ranks.
        batch_dim: of what is dropped.
        first: place of the first entry along the last dim: of what is sliced, each slice has another one.
        places: number the masks of one call.
    """

    key: int
    ring: Ring
    equal: bool
    batch_dim: int = 0
    first: int = 0
    places: Iterator[int] = field(default_factory=count)

    def of_slice(self, first: int, batch_dim: int) -> "Draw":
        """The draw of one slice."""
        return replace(self, first=first, batch_dim=batch_dim, places=count())

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Each entry of ``x`` is 0 with probability ``p``, else divided by 1 - p."""
        seed = _seed(self.key, next(self.places), *(() if self.equal else (self.ring.rank, self.first)))
        if self.equal:
            kept = self._kept(x, p, seed)
        else:
            generator = torch.Generator(x.device).manual_seed(seed)
            kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
        return torch.where(kept, x, 0) * (1 / (1 - p) if p < 1 else 0.0)

    def _kept(self, x: Tensor, p: float, seed: int) -> Tensor:
        """Which entries stay: a hash of the row in the global batch (upper half of the bits) and the place in it."""
        *leading, width = x.shape
        sizes = [size * (self.ring.size if dim == self.batch_dim else 1) for dim, size in enumerate(leading)]
        counters = torch.arange(self.first, self.first + width, device=x.device)
        for dim, size in enumerate(leading):
            offset = self.ring.rank * size if dim == self.batch_dim else 0
            places = torch.arange(offset, offset + size, device=x.device) * (prod(sizes[dim + 1 :]) << 32)
            counters = counters + places.view(-1, *[1] * (len(leading) - dim))
        return _hashed(counters, seed) >= int(p * 2**53)


def _seed(*numbers: int) -> int:
    digest = blake2b(b"".join(number.to_bytes(8, "little") for number in numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _hashed(counters: Tensor, seed: int) -> Tensor:
    """53 random bits for each int64 counter: SplitMix64's finalizer (Steele et al., OOPSLA 2014), in place where it can be."""
    bits = (counters * -0x61C8864680B583EB).add_(seed)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << 33) - 1))
    return (bits >> 11).bitwise_and_((1 << 53) - 1)
