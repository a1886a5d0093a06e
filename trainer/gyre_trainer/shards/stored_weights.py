"""Tensors of a model in safetensors files: each rank reads and writes its own part of each.

In: tensors by the names that they have in the files. Which names those are, and what else lies in a
folder, is for the modules above.

Tensors that consist of parts of other tensors, not in memory.

transformers stacks the experts of a layer in one parameter and keeps each by itself in files. The
code that joins and cuts them is the library's own: it is called with `Joined` tensors, which have a
shape and a dtype and note where their elements come from. A rank then reads or writes those of its
shard alone.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.comm.ring import collective
from gyre_trainer.errors import CheckpointFailed, CheckpointRejected, TrainError
from gyre_trainer.shards.layout import local_of, place_of
from gyre_trainer.shards.sharded_parameters import note_rewritten
from gyre_trainer.shards.tensor_files import Part, StoredTensor, open_regular, read_part, write_part

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
        return replace(
            self,
            begin=tuple(self.begin[dim] for dim in order),
            shape=tuple(self.shape[dim] for dim in order),
            dims=tuple(self.dims[dim] for dim in order),
        )

    def unsqueezed(self, dim: int) -> Self:
        """The piece of the whole with a new dim of size 1 before ``dim``."""
        return replace(
            self,
            begin=(*self.begin[:dim], 0, *self.begin[dim:]),
            shape=(*self.shape[:dim], 1, *self.shape[dim:]),
            dims=(*self.dims[:dim], None, *self.dims[dim:]),
        )

    def squeezed(self, dim: int) -> Self:
        """The piece of the whole without a dim of size 1."""
        return self.permuted([each for each in range(len(self.shape)) if each != dim])

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
        """Note an operator's effect on the places of elements."""
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


Files = Mapping[str, tuple[bytes, dict[str, StoredTensor]]]
"""Header and places of each file, by its name."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter or buffer of the model.

    Attributes:
        names: all its names; a tied one has several, the first is the one that is saved.
        whole: the tensor, a DTensor if it is sharded.
        local: this rank's part.
        ranges: where that is in the whole: of each dim the half-open range.
        is_written_here: whether this rank writes its part; of replicated ones one rank does.
    """

    names: tuple[str, ...]
    whole: Tensor
    local: Tensor
    ranges: tuple[tuple[int, int], ...]
    is_written_here: bool


@contextmanager
def agreed(what: str) -> Iterator[None]:
    """A context for work of all ranks; where it fails on one, every rank raises that error."""
    told: tuple[bool, str] | None = None
    cause: Exception | None = None
    try:
        yield
    except (TrainError, OSError) as error:
        is_rejected = isinstance(error, CheckpointRejected)
        told, cause = (is_rejected, str(error) if is_rejected else f"{what} failed: {error}"), error
    everyone = [told]
    if dist.is_initialized():
        everyone *= dist.get_world_size()
        with collective(what):
            dist.all_gather_object(everyone, told)
    for rank, each in enumerate(everyone):
        if each is not None:
            kind, where = (CheckpointRejected, CheckpointFailed)[not each[0]], f"rank {rank}: "
            raise kind(f"{where if len(everyone) > 1 else ''}{each[1]}") from cause


def targets_of(tensors: Mapping[str, object]) -> list[Target]:
    """The tensors among the values, each once."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            names.setdefault(tensor, []).append(name)
    return [_target(whole, found) for whole, found in names.items()]


def _target(whole: Tensor, names: list[str]) -> Target:
    local, is_first = whole.detach(), is_first_rank()
    ranges = [(0, size) for size in whole.shape]
    if isinstance(whole, DTensor):
        local = local_of(whole).detach()
        if (place := place_of(whole)) is not None:
            ranges[place.dim] = place.start, place.stop
            is_first = place.is_first
    return Target(tuple(names), whole, local, tuple(ranges), is_first)


def is_first_rank() -> bool:
    """Whether this rank writes for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def joined(targets: Iterable[Target]) -> dict[str, Joined]:
    """The targets as they are, by the names that they are saved under."""
    return {
        each.names[0]: Joined.whole(each, each.whole.shape, each.whole.dtype) for each in targets
    }


def read_targets(
    targets: list[Target], stored: Mapping[str, StoredTensor | Joined], path: object
) -> None:
    """Copy this rank's part of each tensor from the files in the folder ``path``.

    Raises:
        CheckpointRejected: a tensor is missing, or of another shape or kind, and nothing was
            copied; or a tied one has several values.
        OSError: a file cannot be opened or read.
    """
    sources = [_found(target, stored, path) for target in targets]
    with ExitStack() as files, torch.no_grad():
        fds: dict[Path, int] = {}

        def read(found: Joined, target: Target, local: Tensor) -> None:
            for piece in found.pieces:
                path_of = piece.source.path
                if path_of not in fds:
                    fds[path_of] = files.enter_context(open_regular(path_of)).fileno()
                cut = piece.within(target.ranges)
                if cut is not None:
                    _read(fds[path_of], cut, local)

        for target, (found, *others) in zip(targets, sources, strict=True):
            read(found, target, target.local)
            for other in others:
                values = torch.empty_like(target.local)
                read(other, target, values)
                if not torch.equal(values, target.local):
                    raise CheckpointRejected(
                        f"{path}: the values of {' and '.join(target.names)} differ, which are one "
                        "parameter in the model. Make a model that does not tie them, such as by "
                        "tie_word_embeddings=False in its configuration."
                    )
    note_rewritten(each.whole for each in targets if isinstance(each.whole, nn.Parameter))


def write_targets(
    folder: Path, tensors: Mapping[str, Joined], files: Files, finish: Callable[[], None]
) -> None:
    """Write this rank's part of each file; collective. The first rank calls ``finish`` at the end.

    Args:
        folder: where the files will be.
        tensors: of the files, by name; their pieces are of a `Target`.
        files: their headers, and where each tensor is.
        finish: writes the rest of the folder.

    Raises:
        CheckpointFailed: on every rank: a file could not be written; files of the same names that
            were there before are as they were.
    """
    temporary = {name: folder / f".{name}.incomplete" for name in files}
    try:
        with agreed("creating the files of the weights"):
            if is_first_rank():
                folder.mkdir(parents=True, exist_ok=True)
                for name, (header, places) in files.items():
                    _create(temporary[name], header, places)
        with agreed("writing weights"):
            for name, (_, places) in files.items():
                _write(temporary[name], tensors, places)
        with agreed("finishing the files of the weights"):
            if is_first_rank():
                for name, path in temporary.items():
                    path.replace(folder / name)
                finish()
    except TrainError:
        if is_first_rank():
            for each in temporary.values():
                with suppress(OSError):  # the folder may not exist
                    each.unlink()
        raise


def _found(
    target: Target, stored: Mapping[str, StoredTensor | Joined], path: object
) -> list[Joined]:
    """A target's values under each of its names that is in the files."""
    names = [name for name in target.names if name in stored]
    if not names:
        raise CheckpointRejected(f"{path} has no {target.names[0]}")
    return [_fitting(target, name, stored[name], path) for name in names]


def _fitting(target: Target, name: str, found: StoredTensor | Joined, path: object) -> Joined:
    if isinstance(found, StoredTensor):
        found = Joined.whole(found, found.shape, found.dtype)
    where = found.pieces[0].source.path if found.pieces else path
    if found.shape != target.whole.shape:
        raise CheckpointRejected(
            f"{name} in {where} has the shape {list(found.shape)}, "
            f"but {list(target.whole.shape)} in the model"
        )
    for piece in found.pieces:
        if piece.source.dtype.is_floating_point != target.whole.dtype.is_floating_point:
            raise CheckpointRejected(
                f"{name} in {where} is {piece.source.dtype}, but {target.whole.dtype} in the model"
            )
    return found


def _read(fd: int, piece: Piece[StoredTensor], local: Tensor) -> None:
    """Read a piece of a rank's part."""
    stored, ranges = piece.source, piece.source_ranges
    part, place = Part(stored.shape, ranges), _box(local, piece.ranges)
    is_same = place.dtype == stored.dtype and place.device.type == "cpu" and piece.is_in_order
    if is_same and place.is_contiguous():
        read_part(fd, stored, part, place)
    else:
        values = torch.empty([stop - start for start, stop in ranges], dtype=stored.dtype)
        read_part(fd, stored, part, values)
        place.copy_(piece.of_source(values))


def _box(tensor: Tensor, ranges: Iterable[tuple[int, int]]) -> Tensor:
    return tensor[tuple(slice(*each) for each in ranges)]


def _create(path: Path, header: bytes, places: Mapping[str, StoredTensor]) -> None:
    """A file of its final size, which other ranks can write to."""
    with path.open("wb") as file:
        file.write(header)
        end = max((each.offset + each.num_bytes for each in places.values()), default=len(header))
        file.truncate(end)


def _write(path: Path, tensors: Mapping[str, Joined], places: Mapping[str, StoredTensor]) -> None:
    """Write this rank's parts of the tensors in one file, and wait until they are stored."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for name, place in places.items():
            for piece in tensors[name].pieces:
                target: Target = piece.source
                own = piece.of_sources(target.ranges) if target.is_written_here else None
                if own is not None:
                    begins = (start for start, _ in target.ranges)
                    ranges = [
                        (start - begin, stop - begin)
                        for begin, (start, stop) in zip(begins, own.source_ranges, strict=True)
                    ]
                    values = own.of_source(_box(target.local, ranges))
                    part = Part(place.shape, own.ranges)
                    write_part(fd, place, part, values.cpu().to(place.dtype).contiguous())
        os.fsync(fd)
    finally:
        os.close(fd)


def stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor has in a file; ``dtype`` is for floating-point ones."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
