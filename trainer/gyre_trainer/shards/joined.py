"""Tensors that consist of parts of other tensors, not in memory.

transformers stacks the experts of a layer in one parameter and keeps each by itself in files. The
code that joins and cuts them is the library's own: it is called with `Joined` tensors, which have a
shape and a dtype and note where their elements come from. A rank then reads or writes those of its
shard alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Generic, Self, TypeVar, cast

import torch
from torch import Tensor

Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class Piece(Generic[Source]):
    """A box of a source tensor, and its place in a whole.

    Attributes:
        source: the tensor that it is a box of.
        begin: of each dim of the whole, the first index that is the piece's.
        shape: of the piece, with the dims of the whole.
        first: of each dim of the source, the first index that belongs to the piece.
        dims: for each dim of the whole, that of the source; None for a new one of size 1. A dim of
            the source that is not among them has one index.
    """

    source: Source
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    first: tuple[int, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def whole(cls, source: Source, shape: Sequence[int]) -> Self:
        """The source as it is."""
        zeros = (0,) * len(shape)
        return cls(source, zeros, tuple(shape), zeros, tuple(range(len(shape))))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Of each dim of the whole, the half-open range of the piece."""
        return tuple(
            (begin, begin + size) for begin, size in zip(self.begin, self.shape, strict=True)
        )

    @property
    def source_ranges(self) -> tuple[tuple[int, int], ...]:
        """Of each dim of the source, the half-open range of the piece."""
        sizes = [1] * len(self.first)
        for dim, size in zip(self.dims, self.shape, strict=True):
            if dim is not None:
                sizes[dim] = size
        return tuple((first, first + size) for first, size in zip(self.first, sizes, strict=True))

    @property
    def is_in_order(self) -> bool:
        """Whether its elements follow each other as those of the source do."""
        used = [dim for dim in self.dims if dim is not None]
        return used == sorted(used)

    def within(self, ranges: Iterable[tuple[int, int]]) -> Self | None:
        """The piece within a box of the whole, as a piece of that box; None if it has nothing."""
        piece: Self | None = self
        for dim, (start, stop) in enumerate(ranges):
            piece = piece and piece.narrow(dim, start, stop)
        return piece

    def of_sources(self, ranges: Iterable[tuple[int, int]]) -> Self | None:
        """The piece within a box of its source, in its place; None if it has nothing of it."""
        piece: Self | None = self
        for dim, (start, stop) in enumerate(ranges):
            piece = piece and piece.narrow_source(dim, start, stop)
        return piece

    def narrow(self, dim: int, start: int, stop: int) -> Self | None:
        """The piece within ``[start, stop)`` of a dim of the whole, whose first index is 0 then."""
        begin, size = self.begin[dim], self.shape[dim]
        low, high = max(begin, start), min(begin + size, stop)
        if low >= high:
            return None
        first, source_dim = self.first, self.dims[dim]
        if source_dim is not None:
            first = _set(first, source_dim, first[source_dim] + low - begin)
        return replace(
            self,
            begin=_set(self.begin, dim, low - start),
            shape=_set(self.shape, dim, high - low),
            first=first,
        )

    def narrow_source(self, dim: int, start: int, stop: int) -> Self | None:
        """The piece within ``[start, stop)`` of a dim of its source; its place stays."""
        if dim not in self.dims:
            return self if start <= self.first[dim] < stop else None
        of_whole = self.dims.index(dim)
        shift = self.begin[of_whole] - self.first[dim]
        cut = self.narrow(of_whole, start + shift, stop + shift)
        return cut and cut.moved(of_whole, start + shift)

    def moved(self, dim: int, by: int) -> Self:
        """The piece further along a dim of the whole."""
        return replace(self, begin=_set(self.begin, dim, self.begin[dim] + by))

    def permuted(self, order: Sequence[int]) -> Self:
        """The piece of the whole with its dims in another order."""
        return self._with_dims(
            tuple(self.begin[dim] for dim in order),
            tuple(self.shape[dim] for dim in order),
            tuple(self.dims[dim] for dim in order),
        )

    def unsqueezed(self, dim: int) -> Self:
        """The piece of the whole with a new dim of size 1 before ``dim``."""
        return self._with_dims(
            (*self.begin[:dim], 0, *self.begin[dim:]),
            (*self.shape[:dim], 1, *self.shape[dim:]),
            (*self.dims[:dim], None, *self.dims[dim:]),
        )

    def squeezed(self, dim: int) -> Self:
        """The piece of the whole without a dim of size 1."""
        return self._with_dims(
            (*self.begin[:dim], *self.begin[dim + 1 :]),
            (*self.shape[:dim], *self.shape[dim + 1 :]),
            (*self.dims[:dim], *self.dims[dim + 1 :]),
        )

    def _with_dims(
        self, begin: tuple[int, ...], shape: tuple[int, ...], dims: tuple[int | None, ...]
    ) -> Self:
        return replace(self, begin=begin, shape=shape, dims=dims)

    def of_source(self, values: Tensor) -> Tensor:
        """The piece, of the values in its box of the source; a view where that is possible."""
        used = [dim for dim in self.dims if dim is not None]
        others = [dim for dim in range(values.dim()) if dim not in used]
        return values.permute([*used, *others]).reshape(self.shape)


class Joined(Tensor):
    """A tensor without memory, which knows where its elements come from.

    It can be joined, cut and transposed. Other operators need values and raise TypeError.
    """

    pieces: tuple[Piece[Any], ...]

    @staticmethod
    def __new__(
        cls, pieces: Sequence[Piece[Any]], shape: Sequence[int], dtype: torch.dtype
    ) -> "Joined":
        """A tensor of those pieces, which cover it."""
        made = cast("Any", Tensor)._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made.pieces = tuple(pieces)
        return cast("Joined", made)

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def whole(cls, source: Any, shape: Sequence[int], dtype: torch.dtype) -> "Joined":
        """One source as it is."""
        return cls([Piece.whole(source, shape)], shape, dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Joined({list(self.shape)}, {self.dtype}, {len(self.pieces)} pieces)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note what an operator does with the places of elements."""
        act = _OPERATORS.get(op.overloadpacket)
        if act is None:
            raise TypeError(f"{op.overloadpacket} needs values")
        return act(*args, **(kwargs or {}))

    def _with(self, change: Callable[[Piece[Any]], Piece[Any] | None], *shape: int) -> "Joined":
        changed = [piece for each in self.pieces if (piece := change(each)) is not None]
        return Joined(changed, shape, self.dtype)


def _set(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _slice(
    tensor: Joined, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Joined:
    if step != 1:
        raise TypeError("a slice with steps needs values")
    start, stop, _ = slice(start, stop).indices(tensor.shape[dim])
    shape = _set(tuple(tensor.shape), dim % tensor.dim(), max(0, stop - start))
    return tensor._with(lambda each: each.narrow(dim % tensor.dim(), start, stop), *shape)


def _split_sizes(tensor: Joined, sizes: Sequence[int], dim: int = 0) -> list[Joined]:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [_slice(tensor, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _split(tensor: Joined, size: int | Sequence[int], dim: int = 0) -> list[Joined]:
    if not isinstance(size, int):
        return _split_sizes(tensor, size, dim)
    length = tensor.shape[dim]
    sizes = [min(size, length - begin) for begin in range(0, length, size)]
    return _split_sizes(tensor, sizes, dim)


def _select(tensor: Joined, dim: int, index: int) -> Joined:
    index %= tensor.shape[dim]
    return _squeeze(_slice(tensor, dim, index, index + 1), dim)


def _squeeze(tensor: Joined, dim: int | Sequence[int] | None = None) -> Joined:
    dims = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    ones = sorted({each % tensor.dim() for each in dims if tensor.shape[each] == 1}, reverse=True)
    shape = [size for each, size in enumerate(tensor.shape) if each not in ones]
    return tensor._with(lambda piece: reduce(Piece.squeezed, ones, piece), *shape)


def _unsqueeze(tensor: Joined, dim: int) -> Joined:
    dim %= tensor.dim() + 1
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
    return tensor._with(lambda each: each.unsqueezed(dim), *shape)


def _permute(tensor: Joined, order: Sequence[int]) -> Joined:
    order = [dim % tensor.dim() for dim in order]
    return tensor._with(lambda each: each.permuted(order), *(tensor.shape[dim] for dim in order))


def _transpose(tensor: Joined, one: int, other: int) -> Joined:
    order = [*range(tensor.dim())]
    order[one], order[other] = order[other], order[one]
    return _permute(tensor, order)


def _cat(tensors: Sequence[Joined], dim: int = 0) -> Joined:
    first, *others = tensors
    dim %= first.dim()
    for each in others:
        if _set(tuple(each.shape), dim, 0) != _set(tuple(first.shape), dim, 0):
            raise TypeError(f"shapes differ: {list(first.shape)} and {list(each.shape)}")
    dtype = reduce(torch.promote_types, (each.dtype for each in tensors))
    pieces, length = list[Piece[Any]](), 0
    for each in tensors:
        pieces += [piece.moved(dim, length) for piece in each.pieces]
        length += each.shape[dim]
    return Joined(pieces, _set(tuple(first.shape), dim, length), dtype)


def _stack(tensors: Sequence[Joined], dim: int = 0) -> Joined:
    return _cat([_unsqueeze(each, dim) for each in tensors], dim)


def _same(tensor: Joined, **_options: Any) -> Joined:
    return tensor


_aten = torch.ops.aten
_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten.cat: _cat,
    _aten.clone: _same,
    _aten.detach: _same,
    _aten.permute: _permute,
    _aten.select: _select,
    _aten.slice: _slice,
    _aten.split: _split,
    _aten.split_with_sizes: _split_sizes,
    _aten.squeeze: _squeeze,
    _aten.stack: _stack,
    _aten.t: lambda tensor: _transpose(tensor, 0, 1),
    _aten.transpose: _transpose,
    _aten.unsqueeze: _unsqueeze,
}
