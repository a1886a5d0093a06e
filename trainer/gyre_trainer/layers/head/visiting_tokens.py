"""Tokens that travel round the ring, while each rank keeps its slice of the vocabulary.

[Note: Visiting tokens]

The dual of the backward ring (`gyre_trainer.rotation.ring_pass`): what stays and what travels have
changed places. The tokens of each rank go round counter-clockwise. Rank r computes with those of
rank r+1, r+2, ..., and with its own last. What is computed for them, their *result*, follows one
step behind: it starts on rank s-1, which is the first that tokens of rank s visit, each rank adds
its part, and after N-1 hops it is back on rank s, which adds the last one. So sums are formed in
one order, to the bit, in every run. Tokens travel with what belongs to them in one buffer, and in
several rounds where they are more than a buffer of the pool has room for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.comm.ring import Direction, Hop, Ring
from gyre_trainer.comm.transport import Stream

# Rounds of tokens have other numbers than those of slices, of which there are at most 16: a rank
# that sends slices of the same module is told apart. After the last number comes the first again.
_ROUND_OF_COUNTS, _FIRST_ROUND, _NUM_ROUND_NUMBERS = 31, 32, 32
_ALIGNMENT = 8  # bytes: where each part of a buffer begins


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of what travels for some tokens: of shape (T, ``width``), or (``width``, T).

    Attributes:
        dtype: its dtype.
        width: its other dim.
        by_token: whether tokens are its first dim.
    """

    dtype: torch.dtype
    width: int
    by_token: bool = False

    def num_bytes(self, num_tokens: int) -> int:
        """How many bytes it takes, with what is left free behind it."""
        size = num_tokens * self.width * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def of(self, tensor: Tensor, tokens: slice) -> Tensor:
        """The part of some tokens, as a view."""
        return tensor[tokens] if self.by_token else tensor[:, tokens]


@dataclass(frozen=True, slots=True)
class Parcel:
    """How the fields of some tokens lie in a flat buffer.

    Attributes:
        fields: the tensors, one after the other.
        dtype: the buffer's, whatever the fields are.
    """

    fields: tuple[Field, ...]
    dtype: torch.dtype

    def num_bytes(self, num_tokens: int) -> int:
        """How many bytes travel for so many tokens."""
        return sum(field.num_bytes(num_tokens) for field in self.fields)

    def numel(self, num_tokens: int) -> int:
        """How many of the buffer's elements these are."""
        return self.num_bytes(num_tokens) // self.dtype.itemsize

    def num_tokens(self, numel: int) -> int:
        """How many tokens have room in a buffer of ``numel`` elements; at least one."""
        free = numel * self.dtype.itemsize - _ALIGNMENT * len(self.fields)
        per_token = sum(field.width * field.dtype.itemsize for field in self.fields)
        return max(1, free // max(1, per_token))

    def views(self, flat: Tensor, num_tokens: int) -> list[Tensor]:
        """The fields of so many tokens in a buffer."""
        found, start = [], 0
        for field in self.fields:
            shape = (num_tokens, field.width) if field.by_token else (field.width, num_tokens)
            stop = start + field.num_bytes(num_tokens) // self.dtype.itemsize
            part = flat[start:stop]
            part = part if part.dtype == field.dtype else part.view(field.dtype)
            found.append(part[: prod(shape)].view(shape))
            start = stop
        return found


def counts_of_all(
    ring: Ring, number: int, num_tokens: int, form: int, like: Tensor
) -> list[int] | None:
    """How many tokens each rank has; None where not all ranks have the same ``form``. Collective.

    Fake tensors are taken to be as many on each rank.

    Args:
        ring: the ranks.
        number: the module's in `Ring.modules`.
        num_tokens: of this rank.
        form: a digest of what ranks must agree in to send tokens.
        like: has the dtype of buffers, and the device.

    Raises:
        RingError: a rank is gone or too late.
        RotationError: another rank calls another module.
    """
    is_fake = isinstance(like, FakeTensor)
    own = torch.tensor([num_tokens, form], device=like.device)
    outgoing, before = own.view(like.dtype), None
    numel, found = outgoing.numel(), {ring.rank: [num_tokens, form]}
    for step in range(1, ring.size):
        buffer = ring.pool.take(numel, like.dtype, like.device)
        hop = HopIdentity(number, True, False, _ROUND_OF_COUNTS, step).pack()
        incoming = buffer[:numel]
        # as slices go in forward: a rank that sends some is told which module this one calls
        ring.shift(outgoing, incoming, Direction.CLOCKWISE, Stream.WEIGHTS, hop).wait()
        if before is not None:
            ring.pool.put(before)
        outgoing, before = incoming, buffer
        arrived = [num_tokens, form] if is_fake else incoming.view(torch.int64).tolist()
        found[(ring.rank - step) % ring.size] = arrived
    if before is not None:
        ring.pool.put(before)
    if any(theirs != form for _, theirs in found.values()):
        return None
    return [found[rank][0] for rank in range(ring.size)]


class Visitor:
    """Some tokens of one rank, while they are on this one.

    Attributes:
        fields: what travels with them.
        is_first: whether no rank has added to their result: its memory is uninitialised.
    """

    def __init__(
        self, fields: Sequence[Tensor], receive: Callable[[], list[Tensor]], *, is_first: bool
    ) -> None:
        self.fields = fields
        self.is_first = is_first
        self._receive = receive
        self._result: list[Tensor] | None = None

    @property
    def result(self) -> list[Tensor]:
        """The fields of the result as the ranks before have left them; the first use waits."""
        if self._result is None:
            self._result = self._receive()
        return self._result


Compute = Callable[[Visitor], None]
"""Adds this rank's part to the result of a visitor, which it fills where it is the first."""


@dataclass(frozen=True, slots=True)
class Trip:
    """What all ranks' tokens do on one trip round the ring. See [Note: Visiting tokens].

    Attributes:
        ring: the ranks.
        hop: the identity of its hops, but for round, step and stream.
        counts: how many tokens each rank has.
        parcel: what travels for them.
        result: what is computed for them; without fields where nothing follows them.
        device: where all of it is.
    """

    ring: Ring
    hop: HopIdentity
    counts: Sequence[int]
    parcel: Parcel
    result: Parcel
    device: torch.device

    def run(
        self,
        own: Sequence[Tensor],
        outcome: Sequence[Tensor],
        compute: Compute,
        before_own: Callable[[], None] = lambda: None,
    ) -> None:
        """Let ``compute`` add to the results of all ranks' tokens. Collective.

        Args:
            own: the fields of this rank's tokens.
            outcome: filled with the fields of their result.
            compute: is called with each rank's tokens, and with this one's last.
            before_own: is called before that, when nothing but results will travel.

        Raises:
            RingError: a rank is gone or too late.
            RotationError: another rank calls another module.
        """
        size = self._tokens_of_round()
        for round_, start in enumerate(range(0, max(self.counts), size)):
            part = _Round(self, round_, slice(start, start + size))
            visitor = part.visit(own, compute)
            if start + size >= max(self.counts):
                before_own()
            compute(visitor)
            part.end(visitor, outcome)

    def _tokens_of_round(self) -> int:
        """How many tokens of each rank travel in one round: as many as a buffer has room for."""
        largest, most = self.ring.pool.largest_whole_numel, max(1, *self.counts)
        if not largest:
            return most
        fitting = min(each.num_tokens(largest) for each in (self.parcel, self.result))
        num_rounds = -(-most // fitting)
        return -(-most // num_rounds)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A hop that sends from the buffer ``leaving`` and fills the beginning of ``arriving``."""

    hop: Hop
    leaving: Tensor
    arriving: Tensor


class _Round:
    """The trip of some tokens of each rank.

    On two ranks the copy of the own tokens, and their result as it arrives, lie in memory of their
    own, which is no larger than they are. So the pool needs one buffer of each kind, as it does for
    slices.
    """

    def __init__(self, trip: Trip, round_: int, tokens: slice) -> None:
        self._trip, self._tokens = trip, tokens
        self._hop = trip.hop._replace(round_=_FIRST_ROUND + round_ % _NUM_ROUND_NUMBERS)
        counts, size = trip.counts, tokens.stop - tokens.start
        self._counts: list[int] = [min(max(0, count - tokens.start), size) for count in counts]
        self._is_pair = trip.ring.size == 2
        self._here: Tensor | None = None  # the buffer of the result that is here
        self._flight: _InFlight | None = None  # the result that is on its way

    def visit(self, own: Sequence[Tensor], compute: Compute) -> Visitor:
        """Let the tokens of all other ranks visit this one; returns its own."""
        trip, pool, size = self._trip, self._trip.ring.pool, self._trip.ring.size
        parts = [
            field.of(tensor, self._tokens)
            for field, tensor in zip(trip.parcel.fields, own, strict=True)
        ]
        leaving = self._buffer(trip.parcel, is_own=True)
        for view, part in zip(self._views(trip.parcel, leaving, 0), parts, strict=True):
            view.copy_(part)
        flight = self._send(trip.parcel, leaving, 1)
        for step in range(1, size):
            flight.hop.wait()
            if not self._is_pair:
                pool.put(flight.leaving)
            here = flight.arriving
            if step + 1 < size:
                flight = self._send(trip.parcel, here, step + 1)
            visitor = self._visitor(self._views(trip.parcel, here, step), step)
            compute(visitor)
            self._send_result(visitor, step)
        pool.put(here)
        return self._visitor(parts, size)

    def end(self, own: Visitor, outcome: Sequence[Tensor]) -> None:
        """Copy the result of the own tokens to their places in ``outcome``."""
        for field, tensor, found in zip(self._trip.result.fields, outcome, own.result, strict=True):
            field.of(tensor, self._tokens).copy_(found)
        if self._here is not None and not self._is_pair:
            self._trip.ring.pool.put(self._here)

    def _visitor(self, fields: Sequence[Tensor], step: int) -> Visitor:
        return Visitor(fields, partial(self._receive, step), is_first=step == 1)

    def _receive(self, step: int) -> list[Tensor]:
        result, flight = self._trip.result, self._flight
        if not result.fields:
            return []
        if flight is None:
            self._here = self._buffer(result)
        else:
            flight.hop.wait()
            self._trip.ring.pool.put(flight.leaving)
            self._here = flight.arriving
        return self._views(result, self._here, step)

    def _send_result(self, visitor: Visitor, step: int) -> None:
        if visitor.result:
            assert self._here is not None
            self._flight = self._send(self._trip.result, self._here, step, Stream.GRADIENTS)

    def _send(
        self, parcel: Parcel, leaving: Tensor, step: int, stream: Stream = Stream.WEIGHTS
    ) -> _InFlight:
        """Send what is in ``leaving`` one rank back, and receive what comes after it."""
        offset = step if stream is Stream.GRADIENTS else step - 1
        arriving = self._buffer(parcel, is_own=stream is Stream.GRADIENTS)
        hop = self._trip.ring.shift(
            leaving[: parcel.numel(self._count(offset))],
            arriving[: parcel.numel(self._count(offset + 1))],
            Direction.COUNTER_CLOCKWISE,
            stream,
            self._hop._replace(gradients=stream is Stream.GRADIENTS, step=step).pack(),
        )
        return _InFlight(hop, leaving, arriving)

    def _count(self, offset: int) -> int:
        """How many tokens of the rank ``offset`` places further on travel in this round."""
        return self._counts[(self._trip.ring.rank + offset) % self._trip.ring.size]

    def _views(self, parcel: Parcel, buffer: Tensor, offset: int) -> list[Tensor]:
        return parcel.views(buffer, self._count(offset))

    def _buffer(self, parcel: Parcel, *, is_own: bool = False) -> Tensor:
        """Memory for the tokens of any rank; on two ranks, ``is_own`` says: for the own ones."""
        pool, dtype, device = self._trip.ring.pool, parcel.dtype, self._trip.device
        if is_own and self._is_pair:
            return torch.empty(parcel.numel(self._count(0)), dtype=dtype, device=device)
        return pool.take(parcel.numel(max(self._counts)), dtype, device)
