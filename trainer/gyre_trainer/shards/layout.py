"""How parameters are cut, and where the shards of one slice lie in the flat buffer that travels.

A rank's shard of a DTensor parameter: its memory, its place in the whole, its values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from gyre_trainer.comm.mesh import ring_axis, unnamed
from gyre_trainer.torch_internals import is_fake

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
        return self._bounds[cut.name][piece]

    def _bounds_of(self, cut: Cut, piece: int) -> tuple[int, int]:
        round_, index = divmod(piece, self.num_slices)
        size = cut.shape[cut.dim]
        start, stop = slice_bounds(size, index, self.num_slices)
        largest = -(-slice_bounds(size, 0, self.num_slices)[1] // self.num_rounds)
        return min(start + round_ * largest, stop), min(start + (round_ + 1) * largest, stop)

    def bounds_in(self, piece: int) -> Mapping[str, tuple[int, int]]:
        """The half-open range of the cut dim of each parameter that a piece holds, by name."""
        return self._bounds_in[piece]

    def all_bounds(self, cut: Cut) -> list[tuple[int, int]]:
        """The half-open ranges of all pieces, in the order of their numbers."""
        return self._bounds[cut.name]

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
    def _bounds(self) -> dict[str, list[tuple[int, int]]]:
        num_pieces = self.num_slices * self.num_rounds
        return {
            cut.name: [self._bounds_of(cut, piece) for piece in range(num_pieces)]
            for cut in self.cuts
        }

    @cached_property
    def _bounds_in(self) -> list[dict[str, tuple[int, int]]]:
        num_pieces = self.num_slices * self.num_rounds
        return [
            {name: bounds[piece] for name, bounds in self._bounds.items()}
            for piece in range(num_pieces)
        ]

    @cached_property
    def _sizes(self) -> list[list[int]]:
        return [list(map(prod, shapes)) for shapes in self._parts]

    @cached_property
    def _parts(self) -> list[list[tuple[int, ...]]]:
        num_pieces = self.num_slices * self.num_rounds
        return [[self._part_shape(cut, piece) for cut in self.cuts] for piece in range(num_pieces)]

    @cached_property
    def _places(self) -> list[list[_Place]]:
        """Shape, stride and start of each shard in the buffer of each piece."""
        return [
            [
                (shape, tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))), start)
                for shape, start in zip(shapes, accumulate(sizes, initial=0), strict=False)
            ]
            for shapes, sizes in zip(self._parts, self._sizes, strict=True)
        ]

    @cached_property
    def _numels(self) -> list[int]:
        return list(map(sum, self._sizes))

    def _part_shape(self, cut: Cut, piece: int) -> tuple[int, ...]:
        start, stop = self.bounds(cut, piece)
        return (*cut.shape[: cut.dim], stop - start, *cut.shape[cut.dim + 1 :])


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
        return parameter._local_tensor
    local: Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]
    return local


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, with a gradient that is cut as the parameter is.

    `to_local` would work the gradient's placement out in each backward.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else with_spec(grad, ctx.spec)


def spec_of(parameter: Tensor) -> DTensorSpec | None:
    """How a DTensor is cut; None for a plain tensor."""
    return parameter._spec if isinstance(parameter, DTensor) else None


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
    tensor = DTensor(local.detach(), parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A DTensor of that shape, with ``local`` as this rank's part; no rank asks another."""
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank's shard of a parameter lies in the whole.

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
