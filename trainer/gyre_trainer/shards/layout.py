"""How parameters are cut, and where the shards of one slice lie in the flat buffer that travels.

Also here:

* A rank's shard of a DTensor parameter: its memory, its place in the whole, its values.
* Slices of other ranks on their way: the next one is in flight while the caller uses this one.
* The way of a slice's gradient to its owner: each rank adds its contribution and sends it on.
* Products of bfloat16 or float16 matrices, added in float32, on CUDA.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gyre_trainer.comm.identity import HopIdentity, digest_of_names, with_room
from gyre_trainer.comm.mesh import ring_axis, unnamed
from gyre_trainer.comm.ring import Direction, Hop, Ring, Stream
from gyre_trainer.torch_internals import DTensorSpec, is_fake, shard_of, spec_of

_Place = tuple[tuple[int, ...], tuple[int, ...], int]

# A slice that can be divided travels in pieces no larger than the largest slice that cannot, so
# that one large vocabulary does not set the size of all transient buffers. Smaller pieces than 2^18
# elements (1 MiB in float32) cost more time in hops than they save memory; more rounds multiply the
# hops per call.
_MIN_PIECE_NUMEL = 2**18
_MAX_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Cut:
    """One parameter and the dim that it is cut along.

    Attributes:
        name: the parameter's name inside the rotated module.
        shape: the shape of the whole parameter.
        dim: the dim that is cut, as `torch.chunk` cuts.
        padded: whether the slice's forward sees this one-dim parameter whole, with zeros outside
            the slice's range. Outputs that add up contain such a bias once.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    padded: bool = False


@dataclass(frozen=True)
class Layout:
    """Where the shards of all parameters lie in the flat buffer of each slice.

    A slice may travel in several pieces, one per round. Pieces are numbered round by round: the
    piece of slice s in round r is r * num_slices + s. In a single round the pieces are the slices.
    """

    cuts: tuple[Cut, ...]
    num_slices: int
    num_rounds: int = 1

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], int]]:
        """Shape and cut dim of each parameter, without the names."""
        return [(cut.shape, cut.dim) for cut in self.cuts]

    def in_rounds(self, num_rounds: int) -> "Layout":
        """The same slices in ``num_rounds`` pieces each.

        More than one round takes a single parameter that is cut along its first dim.
        """
        assert num_rounds == 1 or [cut.dim for cut in self.cuts] == [0]
        return self if num_rounds == self.num_rounds else replace(self, num_rounds=num_rounds)

    def in_pieces(self, largest_whole_numel: int) -> "Layout":
        """The slices of one parameter in pieces, no larger than the largest slice of all others.

        A parameter that is not cut along its first dim travels in one piece, and so does any where
        nothing else travels: ``largest_whole_numel`` is 0.
        """
        if [cut.dim for cut in self.cuts] != [0] or not largest_whole_numel:
            return self
        num_rounds = -(-self.numel(0) // max(largest_whole_numel, _MIN_PIECE_NUMEL))
        return self.in_rounds(min(_MAX_ROUNDS, max(1, num_rounds)))

    def piece(self, index: int, round_: int) -> int:
        """The number of the piece of slice ``index`` in round ``round_``."""
        return round_ * self.num_slices + index

    def bounds(self, cut: Cut, piece: int) -> tuple[int, int]:
        """The half-open range of the cut dim that a piece holds."""
        return self.bounds_in[piece][cut.name]

    def numel(self, piece: int) -> int:
        """The number of elements of a piece; piece 0 is the largest."""
        return self._numels[piece]

    def piece_in(self, flat: Tensor, piece: int) -> Tensor:
        """A piece, as a view of ``flat``, the buffer of its whole slice."""
        if self.num_rounds == 1:
            return flat
        start = sum(self._numels[piece % self.num_slices : piece : self.num_slices])
        return flat[start : start + self._numels[piece]]

    def views(self, flat: Tensor, index: int) -> list[Tensor]:
        """The shards in ``flat``, the buffer of piece ``index``, in the order of the cuts."""
        first = flat.storage_offset()
        return [
            flat.as_strided(shape, stride, first + start)
            for shape, stride, start in self._places[index]
        ]

    def only(self, wanted: Sequence[bool]) -> "Layout":
        """The layout of the cuts whose flag in ``wanted`` is true."""
        if all(wanted):
            return self
        key = tuple(wanted)
        if key not in self._narrowed:
            cuts = tuple(cut for cut, want in zip(self.cuts, key, strict=True) if want)
            self._narrowed[key] = replace(self, cuts=cuts)
        return self._narrowed[key]

    @cached_property
    def _narrowed(self) -> dict[tuple[bool, ...], "Layout"]:
        return {}

    @cached_property
    def bounds_in(self) -> list[dict[str, tuple[int, int]]]:
        """Of each piece, the half-open range of the cut dim of each parameter, by name."""
        num_pieces = self.num_slices * self.num_rounds
        return [
            {cut.name: self._bounds_of(cut, piece) for cut in self.cuts}
            for piece in range(num_pieces)
        ]

    def _bounds_of(self, cut: Cut, piece: int) -> tuple[int, int]:
        round_, index = divmod(piece, self.num_slices)
        size = cut.shape[cut.dim]
        start, stop = slice_bounds(size, index, self.num_slices)
        largest = -(-slice_bounds(size, 0, self.num_slices)[1] // self.num_rounds)
        return min(start + round_ * largest, stop), min(start + (round_ + 1) * largest, stop)

    @cached_property
    def _places(self) -> list[list[_Place]]:
        """Shape, stride and start of each shard in the buffer of each piece."""
        places = list[list[_Place]]()
        for bounds in self.bounds_in:
            places.append([])
            end = 0
            for cut in self.cuts:
                start, stop = bounds[cut.name]
                shape = (*cut.shape[: cut.dim], stop - start, *cut.shape[cut.dim + 1 :])
                places[-1].append((shape, _strides(shape), end))
                end += prod(shape)
        return places

    @cached_property
    def _numels(self) -> list[int]:
        return [sum(prod(shape) for shape, _, _ in places) for places in self._places]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def slice_bounds(size: int, index: int, num_slices: int) -> tuple[int, int]:
    """The half-open range of slice ``index`` of a dim of ``size``, as DTensor cuts it.

    As with `torch.chunk`, every slice has ceil(size / num_slices) entries, except that the last
    slices may be short or empty.
    """
    largest = -(-size // num_slices)
    return min(index * largest, size), min((index + 1) * largest, size)


# Words are summed at the speed of memory: 64 MiB take 9 ms of one thread in 4093 columns, and 17 ms
# in 61. A prime number, so that equal layers do not meet in one column.
_DIGEST_COLUMNS = 4093
_WORD_BYTES = 8


def digest_of(tensor: Tensor) -> int:
    """A number that is equal for equal bits, and different for nearly all others; 0 on `meta`.

    Every bit counts; words of 8 bytes are added up in columns, in one pass over the memory.
    """
    if tensor.is_meta or is_fake(tensor) or not tensor.numel():
        return 0
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % _WORD_BYTES:
        raw = raw.clone()
    stop = len(raw) - len(raw) % (_DIGEST_COLUMNS * _WORD_BYTES)
    digest = blake2b(raw[stop:].cpu().numpy().tobytes(), digest_size=6)
    if stop:
        rows = raw[:stop].view(torch.int64).view(-1, _DIGEST_COLUMNS)
        digest.update(rows.sum(0).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def local_of(parameter: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself if it is plain.

    A gradient of the shard reaches the DTensor.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return shard_of(parameter)
    local: Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]
    return local


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, with a gradient that is cut as the parameter is.

    `to_local` would work the gradient's placement out in each backward.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = spec_of(parameter)
        ctx.set_materialize_grads(False)
        local = shard_of(parameter)
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else with_spec(grad, ctx.spec)


def with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor cut so, with ``local`` as this rank's part; it takes no gradient."""
    return DTensor(local.contiguous(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def as_parameter(
    local: Tensor, mesh: DeviceMesh, placement: Placement, whole: nn.Parameter
) -> nn.Parameter:
    """A DTensor parameter with the local tensor ``local`` and the shape and dtype of ``whole``."""
    placements = [*[Replicate()] * ring_axis(mesh), placement]
    tensor = as_dtensor(local, unnamed(mesh), placements, whole.shape)
    return nn.Parameter(tensor, requires_grad=whole.requires_grad)


def with_local(parameter: DTensor, local: Tensor) -> nn.Parameter:
    """A DTensor parameter as ``parameter`` is, on the same mesh, with another local tensor."""
    spec = spec_of(parameter)
    assert spec is not None
    return nn.Parameter(with_spec(local.detach(), spec), requires_grad=parameter.requires_grad)


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A DTensor of that shape, with ``local`` as this rank's part; no rank asks another."""
    size, stride = torch.Size(shape), _strides(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank's shard of a parameter is in the whole.

    Attributes:
        dim: the dim that is cut.
        start: the first index along it.
        stop: the index after the last.
        is_first: whether this rank is on the first ring of the mesh, so that no other rank with the
            same shard comes before it.
    """

    dim: int
    start: int
    stop: int
    is_first: bool


def place_of(parameter: DTensor) -> Place | None:
    """The place of this rank's shard; None if the rank has the whole parameter."""
    placement, mesh = parameter.placements[-1], parameter.device_mesh
    if not isinstance(placement, Shard):
        return None
    axis = ring_axis(mesh)
    bounds = slice_bounds(
        parameter.shape[placement.dim], mesh.get_local_rank(axis), mesh.size(axis)
    )
    return Place(placement.dim, *bounds, is_first=not axis or mesh.get_local_rank(0) == 0)


_HALVES = (torch.bfloat16, torch.float16)
_IS_THERE = hasattr(torch.ops.aten.addmm, "dtype_out")


# Where a product of matrices has another dtype than the sum, it needs other memory. It is
# formed in blocks of at most this many elements (16 MiB in float32). Twice as many raise the peak
# by as much; far fewer make the matrix products too small for the processor.
_MAX_PRODUCT_NUMEL = 2**22


def add_product(
    total: Tensor, left: Tensor, right: Tensor, *, alpha: float = 1, beta: float = 1
) -> None:
    """``total = beta * total + alpha * left @ right``; ``total`` is unread if ``beta`` is 0.

    The product, which may have another dtype, is not formed as a whole next to ``total``.
    """
    is_wide = total.dtype == torch.float32 and left.dtype == right.dtype and left.dtype in _HALVES
    if total.dtype == left.dtype == right.dtype:
        total.addmm_(left, right, beta=beta, alpha=alpha)
    elif total.is_cuda and is_wide and _IS_THERE:
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, alpha=alpha, out=total)
    else:
        if beta == 0:
            total.zero_()
        num_rows = max(1, _MAX_PRODUCT_NUMEL // max(1, total.shape[1]))
        of_blocks = torch.split(total, num_rows), torch.split(left, num_rows)
        for rows, of_rows in zip(*of_blocks, strict=True):
            rows.add_(of_rows @ right, alpha=alpha)


class _Incoming(NamedTuple):
    """A slice in flight to this rank: it fills ``flat``, the beginning of the pool's ``buffer``."""

    hop: Hop
    buffer: Tensor
    flat: Tensor


class RemoteSlices:
    """The other ranks' slices, one after the other. The first hop starts when this object is made.

    Iterating yields (number, flat piece) for each remote slice's piece of one round, ring.size - 1
    of them: clockwise in the order rank-1, rank-2, ..., counter-clockwise in the order rank+1,
    rank+2, .... A piece is valid until the next one is asked for. Only transient buffers are
    written to. ``own`` must not change before the first piece was yielded.
    """

    def __init__(
        self, ring: Ring, own: Tensor, layout: Layout, direction: Direction, hop: HopIdentity
    ) -> None:
        """Start the first hop. ``hop`` is its identity, with the round."""
        self._ring = ring
        self._layout = layout
        self._direction = direction
        self._hop = hop
        self._next = self._start_hop(own, 1)

    def _start_hop(self, outgoing: Tensor, step: int) -> _Incoming | None:
        if step >= self._ring.size:
            return None
        buffer = self._ring.pool.take(self._layout.numel(0), outgoing.dtype, outgoing.device)
        incoming = buffer[: self._layout.numel(self._piece(step))]
        identity = self._hop._replace(step=step).pack()
        hop = self._ring.shift(outgoing, incoming, self._direction, Stream.WEIGHTS, identity)
        return _Incoming(hop, buffer, incoming)

    def _piece(self, step: int) -> int:
        return self._layout.piece(
            (self._ring.rank - step * self._direction) % self._ring.size, self._hop.round_
        )

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for step in range(1, self._ring.size):
            incoming = self._next
            assert incoming is not None
            incoming.hop.wait()
            self._next = self._start_hop(incoming.flat, step + 1)
            yield self._piece(step), incoming.flat
            if self._next is not None:
                self._next.hop.wait()  # it sends from the buffer put back now
            self._ring.pool.put(incoming.buffer)

    def close(self) -> None:
        """Return when no hop is in flight, even if not all slices were asked for."""
        if self._next is not None:
            self._next.hop.wait()
            self._ring.pool.put(self._next.buffer)
            self._next = None


def all_pieces(
    ring: Ring, own: Tensor, layout: Layout, number: int, *, forward: bool
) -> Iterator[tuple[int, Tensor]]:
    """Number and piece of every rank's slice, each valid until the next is asked for. Collective.

    Args:
        ring: of the slices.
        own: this rank's slice, flat. It must not change meanwhile.
        layout: of one tensor, cut along its first dim if it has several rounds.
        number: the module's in `Ring.modules`.
        forward: whether this is for the module's forward.
    """
    for round_ in range(layout.num_rounds):
        piece, hop = layout.piece(ring.rank, round_), HopIdentity(number, forward, False, round_, 1)
        sent = layout.piece_in(own, piece)
        with closing(RemoteSlices(ring, sent, layout, Direction.CLOCKWISE, hop)) as remote:
            yield piece, sent
            yield from remote


class SliceGrad:
    """One slice's gradient while it is on this rank.

    Every contribution is scaled before it is added. The memory of an empty gradient is
    uninitialised until something was added to it.
    """

    def __init__(self, parts: Sequence[Tensor], *, empty: bool, scale: float) -> None:
        """``parts`` are the gradients of the parameters, views of the buffer that travels."""
        self._parts = parts
        self._empty = [empty] * len(parts)
        self._scale = scale

    def add(self, position: int, grad: Tensor) -> None:
        """Add ``grad``, of the same shape, to the gradient at ``position``."""
        part = self._parts[position]
        if not self._empty[position]:
            part.add_(grad, alpha=self._scale)
        elif part.dtype == grad.dtype:
            torch.mul(grad, self._scale, out=part)
        else:
            part.copy_(grad).mul_(self._scale)
        self._empty[position] = False

    def add_product(
        self, position: int, left: Tensor, right: Tensor, entry: int | None = None
    ) -> None:
        """Add the product of two matrices to the gradient at ``position``.

        With ``entry``, add it to that matrix along the gradient's first dim.
        """
        part, empty = self._parts[position], self._empty[position]
        self._empty[position] = False
        if entry is not None:
            if empty:
                part.zero_()
            part, empty = part[entry], False
        add_product(part, left, right, alpha=self._scale, beta=0 if empty else 1)

    def close(self) -> None:
        """Fill with zeros the gradients that nothing was added to."""
        for part, empty in zip(self._parts, self._empty, strict=True):
            if empty:
                part.zero_()


class _GradientPiece(NamedTuple):
    """The gradient of one piece, on this rank or in flight to it.

    Attributes:
        piece: its number in the layout.
        flat: place of the gradient: in ``buffer`` or in the own slice's gradient.
        buffer: the pool's buffer; None for a piece of the own slice.
    """

    piece: int
    flat: Tensor
    buffer: Tensor | None


class GradientRing:
    """The gradients of one module's slices, each one step behind its weights, counter-clockwise.

    For each piece of each round, from rank+1's to the own one: `receive` it, add to it, then
    `send_on`. By default, contributions are scaled so that the sum is the average over the ranks.
    """

    def __init__(
        self,
        ring: Ring,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        number: int,
        scale: float | None = None,
    ) -> None:
        """``number`` is the module's in `Ring.modules`; ``scale`` None is 1 / ring.size."""
        self._scale = 1 / ring.size if scale is None else scale
        self._number = number
        self._trained = digest_of_names(cut.name for cut in layout.cuts)
        self._ring = ring
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._here: tuple[_GradientPiece, SliceGrad] | None = None
        # The hop, the piece that it sends, and the piece that arrives.
        self._in_flight: tuple[Hop, _GradientPiece, _GradientPiece] | None = None
        self._own: Tensor | None = None

    def receive(self, piece: int) -> SliceGrad:
        """The gradient of ``piece`` as the previous ranks left it; empty on the first rank.

        Calls before the next `send_on` return the same object.

        Raises:
            RingError: the gradient did not arrive.
        """
        if self._here is None:
            flight, self._in_flight = self._in_flight, None
            if flight is None:
                here = self._piece(piece)
            else:
                hop, sent, here = flight
                hop.wait()
                assert sent.buffer is not None
                self._ring.pool.put(sent.buffer)
            parts = self._layout.views(here.flat, piece)
            self._here = here, SliceGrad(parts, empty=flight is None, scale=self._scale)
        return self._here[1]

    def send_on(self) -> None:
        """Send the received gradient to rank - 1, and receive the next piece's from rank + 1.

        The own slice's gradient stays.
        """
        assert self._here is not None
        here, grad = self._here
        grad.close()
        self._here = None
        round_, index = divmod(here.piece, self._ring.size)
        if index != self._ring.rank:
            arriving = self._piece(self._layout.piece((index + 1) % self._ring.size, round_))
            step = (index - self._ring.rank) % self._ring.size
            identity = HopIdentity(self._number, False, True, round_, step, self._trained).pack()
            hop = self._ring.shift(
                here.flat, arriving.flat, Direction.COUNTER_CLOCKWISE, Stream.GRADIENTS, identity
            )
            self._in_flight = hop, here, arriving

    def finish(self) -> Tensor:
        """The own slice's gradient, flat and complete, in memory that belongs to the caller."""
        assert self._own is not None
        return self._own

    def _piece(self, piece: int) -> _GradientPiece:
        """Memory for the gradient of ``piece``."""
        if piece % self._ring.size != self._ring.rank:
            buffer = self._ring.pool.take(self._layout.numel(0), self._dtype, self._device)
            return _GradientPiece(piece, buffer[: self._layout.numel(piece)], buffer)
        if self._own is None:
            numel = self._layout.in_rounds(1).numel(self._ring.rank)
            # pieces arrive in the order of rounds, so behind one nothing has been written yet
            self._own = with_room(numel, self._dtype, self._device, is_scratch=True)
        return _GradientPiece(piece, self._layout.piece_in(self._own, piece), None)

    def sum(self, part: Callable[[int], Tensor]) -> Tensor:
        """The own slice's sum, flat, of what ``part`` gives for each piece of one parameter."""
        for round_ in range(self._layout.num_rounds):
            for step in range(1, self._ring.size + 1):
                piece = self._layout.piece((self._ring.rank + step) % self._ring.size, round_)
                contribution = part(piece)
                self.receive(piece).add(0, contribution)
                self.send_on()
        return self.finish()
