"""Safetensors files, read and written range by range.

Such a file is the length of its header (8 bytes, little-endian), the header in JSON, and the
tensors' bytes, row-major and without gaps. See https://github.com/huggingface/safetensors.

Files that others wrote, opened only where they are regular.

To open a pipe waits for its other end, and a device may never end. Nothing here waits.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import mul
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from gyre_trainer.errors import CheckpointRejected

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened, or is something else than a regular file, and `strerror` says
            what.
    """
    _require_regular(path, path.stat())  # a socket cannot be opened at all
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _require_regular(path, os.fstat(file.fileno()))  # another one may be there by now
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        return file.read()


def _require_regular(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The limit of the reference reader; a longer header is no header.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_MAX_DIMS = 64  # torch prints and copies no tensor with more


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor.

    Attributes:
        path: its file.
        offset: of its first byte in the file.
        shape: of the whole tensor.
        dtype: as it is stored.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """Half-open ranges [start, stop) of all dims of a tensor of ``shape``."""

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    def runs(self, itemsize: int) -> Iterator[tuple[int, int]]:
        """Offset and length in bytes of each contiguous run in the whole tensor, in order."""
        shape, ranges = self.shape or (1,), self.ranges or ((0, 1),)
        strides = [prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
        # the last cut dim: those after it are whole
        last = max((dim for dim, size in enumerate(shape) if ranges[dim] != (0, size)), default=0)
        start, stop = ranges[last]
        if stop > start:
            for indices in product(*(range(*each) for each in ranges[:last])):
                offset = sum(map(mul, indices, strides)) + start * strides[last]
                yield offset, (stop - start) * strides[last]


class _Entry(msgspec.Struct):
    """A header's entry of a tensor. Numbers are whole ones: neither 4.9 nor "4" is a size."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


_ENTRY_DECODER = msgspec.json.Decoder(_Entry)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name.

    Raises:
        CheckpointRejected: it is no such file, or it is cut off; the message names it.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise CheckpointRejected(f"{path} is no safetensors file, or it is cut off")
            text = file.read(length)
    except OSError as error:
        raise CheckpointRejected(f"{path} cannot be read: {error.strerror}") from error
    begin = _LENGTH_BYTES + length
    try:
        json.loads(text, object_pairs_hook=_check_unique)
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        msgspec.json.decode(header.pop(_METADATA, b"{}"), type=dict[str, str])
        tensors = {name: _stored(path, begin, entry) for name, entry in header.items()}
    except (ValueError, RecursionError) as error:
        raise CheckpointRejected(f"{path} has no header of a safetensors file: {error}") from error
    end = begin
    for name, tensor in sorted(
        tensors.items(), key=lambda each: (each[1].offset, each[1].num_bytes)
    ):
        if tensor.offset != end:
            raise CheckpointRejected(f"{path}: the bytes of {name} overlap others, or leave a gap")
        end += tensor.num_bytes
    if end != size:
        raise CheckpointRejected(f"{path} has {size} bytes where its header says {end}")
    return tensors


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a JSON object that has a name twice: readers differ in the one they take."""
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name occurs twice")


def _stored(path: Path, begin: int, text: msgspec.Raw) -> StoredTensor:
    entry = _ENTRY_DECODER.decode(text)
    if entry.dtype not in _DTYPES:
        raise ValueError(f"the dtype {entry.dtype!r:.40} is none of {', '.join(_DTYPES)}")
    start, stop = entry.data_offsets
    tensor = StoredTensor(path, begin + start, entry.shape, _DTYPES[entry.dtype])
    if stop - start != tensor.num_bytes:
        raise ValueError(
            f"{stop - start} bytes are not the {tensor.num_bytes} of {entry.dtype} {entry.shape}"
        )
    return tensor


def read_part(fd: int, stored: StoredTensor, part: Part, into: Tensor) -> None:
    """Read a part of a tensor, and no other bytes, into a contiguous CPU tensor of its dtype.

    Raises:
        CheckpointRejected: the file ends before the part does.
    """
    memory, done = _bytes(into), 0
    for offset, length in part.runs(stored.dtype.itemsize):
        stop = done + length
        while done < stop:
            at = stored.offset + offset + length - (stop - done)
            num_read = os.preadv(fd, [memory[done:stop]], at)
            if not num_read:
                raise CheckpointRejected(f"{stored.path} became shorter while it was read")
            done += num_read


def write_part(fd: int, stored: StoredTensor, part: Part, values: Tensor) -> None:
    """Write a contiguous CPU tensor of the stored dtype to the place of a part."""
    memory, done = _bytes(values), 0
    for offset, length in part.runs(stored.dtype.itemsize):
        stop = done + length
        while done < stop:
            at = stored.offset + offset + length - (stop - done)
            done += os.pwrite(fd, memory[done:stop], at)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def layout_of(
    path: Path, tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
) -> tuple[bytes, dict[str, StoredTensor]]:
    """The header of a file with these tensors, and where each of them lies.

    Wider dtypes come first, as the reference writer has it, so that all are aligned.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    places: dict[str, StoredTensor] = {}
    offset = 0
    for name, shape, dtype in sorted(tensors, key=lambda each: -each[2].itemsize):
        stored = places[name] = StoredTensor(path, offset, shape, dtype)
        stop = offset + stored.num_bytes
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = _LENGTH_BYTES + len(text)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, {
        name: StoredTensor(path, begin + each.offset, each.shape, each.dtype)
        for name, each in places.items()
    }
