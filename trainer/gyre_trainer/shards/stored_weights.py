"""Tensors of a model in safetensors files: each rank reads and writes its own part of each.

In: tensors by the names that they have in the files. Which names those are, and what else lies in a
folder, is for the modules above.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.comm.ring_registry import collective
from gyre_trainer.errors import CheckpointFailed, CheckpointRejected, TrainError
from gyre_trainer.shards.joined import Joined, Piece
from gyre_trainer.shards.local_shards import local_of, place_of
from gyre_trainer.shards.regular_files import open_regular
from gyre_trainer.shards.sharded_parameters import note_rewritten
from gyre_trainer.shards.tensor_files import Part, StoredTensor, read_part, write_part

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
    """A context for what all ranks do; where it fails on one, every rank raises that error."""
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
    """Whether this rank writes what one rank alone writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def joined(targets: Iterable[Target]) -> dict[str, Joined]:
    """The targets as they are, by the names that they are saved under."""
    return {
        each.names[0]: Joined.whole(each, each.whole.shape, each.whole.dtype) for each in targets
    }


def read_targets(
    targets: list[Target], stored: Mapping[str, StoredTensor | Joined], path: object
) -> None:
    """Copy this rank's part of each tensor from the files, of which ``path`` is the folder.

    Raises:
        CheckpointRejected: a tensor is missing, or of another shape or kind; nothing was copied.
        OSError: a file cannot be opened or read.
    """
    sources = [_found(target, stored, path) for target in targets]
    with ExitStack() as files, torch.no_grad():
        fds: dict[Path, int] = {}
        for target, found in zip(targets, sources, strict=True):
            for piece in found.pieces:
                path_of = piece.source.path
                if path_of not in fds:
                    fds[path_of] = files.enter_context(open_regular(path_of)).fileno()
                cut = piece.within(target.ranges)
                if cut is not None:
                    _read(fds[path_of], cut, target.local)
    note_rewritten(each.whole for each in targets if isinstance(each.whole, nn.Parameter))


def write_targets(
    folder: Path, tensors: Mapping[str, Joined], files: Files, finish: Callable[[], None]
) -> None:
    """Write this rank's part of each file; collective. The first rank calls ``finish`` at the end.

    Args:
        folder: where the files will be.
        tensors: of the files, by name; their pieces are of a `Target`.
        files: their headers, and where each tensor is.
        finish: what else the folder needs.

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


def _found(target: Target, stored: Mapping[str, StoredTensor | Joined], path: object) -> Joined:
    name = next((name for name in target.names if name in stored), None)
    if name is None:
        raise CheckpointRejected(f"{path} has no {target.names[0]}")
    found = stored[name]
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
