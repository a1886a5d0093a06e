"""Safetensors files, read and written range by range.

Such a file is the length of its header (8 bytes, little-endian), the header in JSON, and the
tensors' bytes, row-major and without gaps. See https://github.com/huggingface/safetensors.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre_trainer.errors import CheckpointRejected

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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies.

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
    """The half-open range [start, stop) of one dim of a tensor of ``shape``."""

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    def runs(self, itemsize: int) -> Iterator[tuple[int, int]]:
        """Offset and length in bytes of each contiguous run in the whole tensor, in order."""
        inner = prod(self.shape[self.dim + 1 :]) * itemsize
        length, stride = (self.stop - self.start) * inner, self.shape[self.dim] * inner
        if length == stride:  # the whole tensor
            yield 0, prod(self.shape) * itemsize
        elif length:
            for outer in range(prod(self.shape[: self.dim])):
                yield outer * stride + self.start * inner, length


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name.

    Raises:
        CheckpointRejected: it is no such file, or it is cut off; the message names it.
    """
    try:
        # a pipe in its place must not make this rank wait for who writes there
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise CheckpointRejected(f"{path} is no regular file")
            size = about.st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise CheckpointRejected(f"{path} is no safetensors file, or it is cut off")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointRejected(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointRejected(f"{path} has a header that is no JSON") from error
    try:
        header.pop("__metadata__", None)
        begin = _LENGTH_BYTES + length
        tensors = {name: _stored(path, begin, entry) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointRejected(f"{path} has a header that is no safetensors header") from error
    end = begin
    for name, tensor in sorted(tensors.items(), key=lambda each: each[1].offset):
        if tensor.offset != end:
            raise CheckpointRejected(f"{path}: the bytes of {name} overlap others, or leave a gap")
        end += tensor.num_bytes
    if end != size:
        raise CheckpointRejected(f"{path} has {size} bytes where its header says {end}")
    return tensors


def _stored(path: Path, begin: int, entry: Mapping[str, Any]) -> StoredTensor:
    start, stop = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    tensor = StoredTensor(path, begin + start, shape, _DTYPES[entry["dtype"]])
    if min((start, *shape), default=0) < 0 or stop - start != tensor.num_bytes:
        raise ValueError(entry)
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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
