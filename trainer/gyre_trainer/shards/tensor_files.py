"""Safetensors files, read and written range by range.

Such a file is the length of its header (8 bytes, little-endian), the header in JSON, and the
tensors' bytes, row-major and without gaps. See https://github.com/huggingface/safetensors.

Files that others wrote are opened only where they are regular: opening a pipe waits for its other
end, and a device may never end.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import prod
from operator import mul
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
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
_LENGTH_BYTES = 8
_MAX_NUMEL = 2**63 - 1  # of torch


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


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name, in the order of their bytes.

    Raises:
        CheckpointRejected: it is no such file, or it is cut off; the message names it.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        # the library refuses gaps, overlaps, and sizes that do not add up to the file's
        with open_regular(path) as file, safe_open(f"/proc/self/fd/{file.fileno()}", "np") as known:
            offset = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
            for name in known.offset_keys():
                about = known.get_slice(name)
                shape, dtype = tuple(about.get_shape()), about.get_dtype()
                if dtype not in _DTYPES or prod(filter(None, shape)) > _MAX_NUMEL:
                    raise CheckpointRejected(
                        f"{path}: torch cannot hold {name}, {dtype} of shape {list(shape)}; "
                        f"it holds {', '.join(_DTYPES)}"
                    )
                tensors[name] = StoredTensor(path, offset, shape, _DTYPES[dtype])
                offset += tensors[name].num_bytes
    except OSError as error:
        raise CheckpointRejected(f"{path} cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise CheckpointRejected(f"{path} is no whole safetensors file: {error}") from error
    return tensors


def transfer(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    stored: StoredTensor,
    box: Tensor,
    values: Tensor,
) -> None:
    """Move elements of a stored tensor, and no other bytes, between its file and memory.

    The library would map the file: where a mapped file becomes shorter, or is gone from its server,
    SIGBUS ends the process, without an error that names the file.

    Args:
        call: `os.preadv` or `os.pwritev`.
        fd: the open file.
        stored: the tensor.
        box: the elements: a view, on `meta`, of a contiguous tensor of its shape.
        values: on the CPU, contiguous, of the stored dtype, as many as ``box`` has.

    Raises:
        CheckpointRejected: the file ends before the elements do.
    """
    memory = memoryview(values.reshape(-1).view(torch.uint8).numpy().data)
    box, itemsize = box.squeeze(), stored.dtype.itemsize
    num_outer, run = box.dim(), itemsize  # the dims behind the outer ones have no gaps
    while num_outer and box.stride(num_outer - 1) * itemsize == run:
        num_outer -= 1
        run *= box.shape[num_outer]
    begin, strides, done = box.storage_offset(), box.stride()[:num_outer], 0
    for indices in product(*map(range, box.shape[:num_outer])):
        start = stored.offset + (begin + sum(map(mul, indices, strides))) * itemsize
        stop = done + run
        while done < stop:
            num_moved = call(fd, [memory[done:stop]], start + run - (stop - done))
            if not num_moved:
                raise CheckpointRejected(f"{stored.path} became shorter while it was read")
            done += num_moved


def layout_of(
    path: Path, tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
) -> tuple[bytes, dict[str, StoredTensor]]:
    """The header of a file with these tensors, and the place of each.

    Wider dtypes come first, as the reference writer has it, so that all are aligned.
    """
    ordered = sorted(tensors, key=lambda each: -each[2].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0, *accumulate(prod(shape) * dtype.itemsize for _, shape, dtype in ordered)]
    for (name, shape, dtype), offsets in zip(ordered, pairwise(ends), strict=True):
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return text, {
        name: StoredTensor(path, len(text) + start, shape, dtype)
        for (name, shape, dtype), start in zip(ordered, ends, strict=False)
    }
