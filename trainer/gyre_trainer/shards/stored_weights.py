"""Tensors of a model in safetensors files: each rank reads and writes its own part of each.

In: tensors by the names that they have in the files. Which names those are, and what else lies in a
folder, is for the modules above.

transformers stacks the experts of a layer in one parameter and keeps each by itself in files. The
code that joins and cuts them is the library's own: it is called with `Joined` tensors, which have a
shape and a dtype and note where their elements come from. A rank then reads or writes those of its
shard alone.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.comm.ring import collective
from gyre_trainer.errors import CheckpointFailed, CheckpointRejected, TrainError
from gyre_trainer.shards.layout import local_of, place_of
from gyre_trainer.shards.sharded_parameters import note_rewritten
from gyre_trainer.shards.tensor_files import StoredTensor, open_regular, read_header, transfer

Ranges = Sequence[tuple[int, int]]
"""Of each dim, a half-open range."""


class Joined(Tensor):
    """A tensor without memory, which knows where its elements come from.

    It is a view of a source, or of others side by side. It can be joined, cut and transposed: torch
    does so with tensors on `meta`. Other operators need values and raise TypeError.
    """

    @staticmethod
    def __new__(cls, view: Tensor, *_: object) -> "Joined":
        """Make a tensor without memory of the shape and dtype of ``view``."""
        made = cast("Any", Tensor)._make_wrapper_subclass(cls, view.shape, dtype=view.dtype)
        return cast("Joined", made)

    def __init__(
        self, view: Tensor, whole: Tensor, source: Any, joined_along: int | None = None
    ) -> None:
        """A view of one source, or of several tensors joined along a dim.

        Args:
            view: of ``whole``, on `meta`.
            whole: contiguous, on `meta`.
            source: any object, or the tensors of this class that are joined.
            joined_along: the dim; None for one source.
        """
        super().__init__()
        self._view, self._whole, self._source, self._dim = view, whole, source, joined_along

    @classmethod
    def whole(cls, source: Any, shape: Sequence[int], dtype: torch.dtype) -> "Joined":
        """One source as it is."""
        whole = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return cls(whole, whole, source)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Joined({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note an operator's effect on the places of elements."""
        packet, (first, *others) = op.overloadpacket, args
        if packet is _aten.cat:
            return _cat(first, *others)
        if packet is _aten.stack:
            return _cat([each.unsqueeze(*others or [0]) for each in first], *others)
        if packet is _aten.clone:
            return first
        if packet not in _VIEWS:
            raise TypeError(f"{packet} needs values")
        result = op(first._view, *others, **(kwargs or {}))
        return first._as(result) if isinstance(result, Tensor) else [*map(first._as, result)]

    def _as(self, view: Tensor) -> "Joined":
        known = self._whole.stride()
        if any(view.shape[dim] > 1 and view.stride(dim) not in known for dim in range(view.dim())):
            raise TypeError("a slice with steps needs values")
        return Joined(view, self._whole, self._source, self._dim)

    def box(self, ranges: Ranges) -> "Joined":
        """The elements in these ranges."""
        return self._as(box_of(self._view, ranges))

    def sources(self, place: Tensor) -> Iterator[tuple[Any, Ranges, Tensor]]:
        """The sources that the elements come from.

        Args:
            place: a tensor of this shape.

        Yields:
            A source; the ranges of its elements; and their part of ``place``, a view with the
            source's dims.
        """
        if not self.numel():
            return
        sizes, strides = self._view.shape, self._view.stride()
        # dims with several elements differ in their strides, which are those of the whole's dims
        of_stride = {strides[dim]: size for dim, size in enumerate(sizes) if size > 1}
        ranges, rest = list[tuple[int, int]](), int(self._view.storage_offset())
        for size, stride in zip(self._whole.shape, self._whole.stride(), strict=True):
            start, rest = divmod(rest, stride)
            ranges.append((start, start + (of_stride.get(stride, 1) if size > 1 else 1)))
        order = sorted(range(self.dim()), key=lambda dim: (sizes[dim] == 1, -strides[dim]))
        place = place.permute(order).view([stop - start for start, stop in ranges])
        if self._dim is None:
            yield self._source, ranges, place
            return
        end, (start, stop) = 0, ranges[self._dim]
        for part in self._source:
            begin, end = end, end + part.shape[self._dim]
            low, high = max(start, begin), min(stop, end)
            if low < high:
                ranges[self._dim] = low - begin, high - begin
                there = place.narrow(self._dim, low - start, high - low)
                yield from part.box(ranges).sources(there)


def box_of(tensor: Tensor, ranges: Ranges) -> Tensor:
    """A view of the elements in these ranges."""
    return tensor[tuple(slice(*each) for each in ranges)]


def _cat(tensors: Sequence[Joined], dim: int = 0) -> Joined:
    like = torch.cat([each._view for each in tensors], dim)
    whole = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return Joined(whole, whole, tensors, dim % whole.dim())


_aten = torch.ops.aten
_VIEWS = {
    _aten.detach,
    _aten.permute,
    _aten.select,
    _aten.slice,
    _aten.split,
    _aten.split_with_sizes,
    _aten.squeeze,
    _aten.t,
    _aten.transpose,
    _aten.unsqueeze,
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


def tensors_in(path: Path) -> dict[str, Joined]:
    """The tensors of a safetensors file, by name.

    Raises:
        CheckpointRejected: as `read_header`.
    """
    return {
        name: Joined.whole(each, each.shape, each.dtype) for name, each in read_header(path).items()
    }


def joined(targets: Iterable[Target]) -> dict[str, Joined]:
    """The targets as they are, by the names that they are saved under."""
    return {
        each.names[0]: Joined.whole(each, each.whole.shape, each.whole.dtype) for each in targets
    }


def read_targets(targets: list[Target], stored: Mapping[str, Joined], path: object) -> None:
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
            for source, ranges, place in found.box(target.ranges).sources(local):
                if source.path not in fds:
                    fds[source.path] = files.enter_context(open_regular(source.path)).fileno()
                is_same = (place.dtype, place.device.type) == (source.dtype, "cpu")
                is_direct = is_same and place.is_contiguous()
                values = place if is_direct else torch.empty(place.shape, dtype=source.dtype)
                box = box_of(torch.empty(source.shape, device="meta"), ranges)
                transfer(os.preadv, fds[source.path], source, box, values)
                if not is_direct:
                    place.copy_(values)

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
        tensors: of the files, by name; their sources are `Target`s.
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
                    num_bytes = len(header) + sum(each.num_bytes for each in places.values())
                    with temporary[name].open("wb") as file:
                        file.write(header)
                        file.truncate(num_bytes)  # other ranks write to it
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


def _found(target: Target, stored: Mapping[str, Joined], path: object) -> list[Joined]:
    """A target's values under each of its names that is in the files."""
    names = [name for name in target.names if name in stored]
    if not names:
        raise CheckpointRejected(f"{path} has no {target.names[0]}")
    whole = target.whole
    for name in names:
        found = stored[name]
        sources = [source for source, *_ in found.sources(torch.empty(found.shape, device="meta"))]
        where = f"{name} in {sources[0].path if sources else path}"
        if found.shape != whole.shape:
            raise CheckpointRejected(
                f"{where} has the shape {list(found.shape)}, but {list(whole.shape)} in the model"
            )
        for each in sources:
            if each.dtype.is_floating_point != whole.dtype.is_floating_point:
                raise CheckpointRejected(f"{where} is {each.dtype}, but {whole.dtype} in the model")
    return [stored[name] for name in names]


def _write(path: Path, tensors: Mapping[str, Joined], places: Mapping[str, StoredTensor]) -> None:
    """Write this rank's parts of the tensors in one file, and wait until they are stored."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for name, stored in places.items():
            whole = torch.empty(stored.shape, device="meta")
            for target, ranges, place in tensors[name].sources(whole):
                if target.is_written_here:
                    _write_own(fd, stored, target, ranges, place)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_own(
    fd: int, stored: StoredTensor, target: Target, ranges: Ranges, place: Tensor
) -> None:
    """Write this rank's part of the box of a target that ``place`` is for."""
    values = target.local
    for dim, ((start, stop), (first, end)) in enumerate(zip(ranges, target.ranges, strict=True)):
        low, high = max(start, first), min(stop, end)
        if low >= high:
            return
        place = place.narrow(dim, low - start, high - low)
        values = values.narrow(dim, low - first, high - low)
    order = sorted(range(place.dim()), key=place.stride, reverse=True)
    values = values.cpu().to(stored.dtype).permute(order).contiguous()
    transfer(os.pwritev, fd, stored, place.permute(order), values)


def stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor has in a file; ``dtype`` is for floating-point ones."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
