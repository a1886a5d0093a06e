"""The headers that files of token ids come with, and what the bytes of a file without one tell.

npy        numpy's own, of one dimension
llm.c      256 int32, also of modded-nanogpt: magic, version, number of ids
Megatron   no header: the `.idx` file beside the `.bin` has the dtype and where each sequence lies
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gyre_daemon.datasets.formats.foreign import foreign_kind, is_text
from gyre_daemon.datasets.formats.npy import NPY_MAGIC, parse_npy_header
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.shard import Shard

HEAD_BYTES = 4096
DTYPES = ("uint8", "uint16", "int16", "int32", "int64", "uint32", "uint64")
WAY_OUT = "if these are ids indeed, say where they begin with `header_bytes` (0: at once) and of which `dtype` they are"

# What the first ids of a file without a header look like.
TEXT, WIDER_THAN_2, WIDER_THAN_4 = 1, 2, 4
_MIN_PAIRS = 256  # fewer say too little
_MAX_HIGH = 15  # the upper halves of ids below 2^20, or below 2^36

_LLM_C_BYTES = 1024
_LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
_LLM_C_MAGICS = {magic for magic, _ in _LLM_C}

IDX_MAGIC = b"MMIDIDX\0\0"
_IDX_HEAD = struct.Struct("<9sQBQQ")
IDX_HEAD_BYTES = _IDX_HEAD.size
_IDX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}


class Header(NamedTuple):
    """What a shard says of its ids.

    Attributes:
        kind: `npy`, `llm.c`, `Megatron`, or empty where it has no header.
        dtype: numpy's name; empty where nothing tells it.
        start: first byte of the ids.
        stop: the byte after the last one.
        hints: bits of `TEXT`, `WIDER_THAN_2` and `WIDER_THAN_4`.
    """

    kind: str
    dtype: str
    start: int
    stop: int
    hints: int


def read_head(shard: Shard, head: bytes) -> Header:
    """What the first `HEAD_BYTES` of a shard tell.

    Raises:
        CorruptSample: it is no file of token ids, or its header contradicts its size.
    """
    if head.startswith(NPY_MAGIC):
        return _read_npy(shard, head)
    if _has_llm_c(head):
        return _read_llm_c(shard, head)
    kind = foreign_kind(head, shard.name)
    if kind:
        raise refused(shard, f"it looks like {kind.what}; {kind.advice}; {WAY_OUT}")
    return Header("", "", 0, shard.size_bytes, _hints(head))


def refused(shard: Shard, reason: str) -> CorruptSample:
    """The error for a shard that cannot be served as token ids."""
    return CorruptSample(f"shard {shard.name} holds no token ids: {reason}", {"shard": shard.name, "reason": reason})


def _contradicts(shard: Shard, reason: str) -> CorruptSample:
    return CorruptSample(f"shard {shard.name} is not whole: {reason}; restore it", {"shard": shard.name, "reason": reason})


def _read_npy(shard: Shard, head: bytes) -> Header:
    try:
        found = parse_npy_header(head)
    except ValueError as error:
        raise refused(shard, f"it is an npy file, and {error}") from error
    if len(found.shape) != 1 or found.dtype.name not in DTYPES:
        reason = f"its npy array is of {found.dtype.name} and has shape {list(found.shape)}; store integers of one dimension"
        raise refused(shard, reason)
    if found.dtype != found.dtype.newbyteorder("<"):
        raise refused(shard, "its npy array is big-endian; store it little-endian")
    stop = found.num_bytes + found.shape[0] * found.dtype.itemsize
    if stop != shard.size_bytes:
        raise _contradicts(shard, f"it has {shard.size_bytes} bytes, and {stop} by its npy header")
    return Header("npy", found.dtype.name, found.num_bytes, stop, 0)


def _has_llm_c(head: bytes) -> bool:
    """A magic number, and a version that is one: eight bytes, which as ids would be four that no text begins with."""
    magic, version = struct.unpack_from("<ii", head.ljust(8, b"\0"))
    return magic in _LLM_C_MAGICS and 0 < version < 256


def _read_llm_c(shard: Shard, head: bytes) -> Header:
    magic, version, num_tokens = struct.unpack_from("<iii", head.ljust(12, b"\0"))
    dtype = _LLM_C.get((magic, version))
    if dtype is None:
        raise refused(shard, f"its header is llm.c's {magic} in version {version}, which is not known; {WAY_OUT}")
    stop = _LLM_C_BYTES + num_tokens * np.dtype(dtype).itemsize
    if stop != shard.size_bytes:
        reason = f"it has {shard.size_bytes} bytes, and {stop} by its llm.c header of {num_tokens} {dtype} ids"
        raise _contradicts(shard, reason)
    return Header("llm.c", dtype, _LLM_C_BYTES, stop, 0)


def _hints(head: bytes) -> int:
    wider = (_is_wider(head, "<u2") and WIDER_THAN_2) | (_is_wider(head, "<u4") and WIDER_THAN_4)
    return wider | (is_text(head) and TEXT)


def _is_wider(head: bytes, dtype: str) -> bool:
    """Whether every second number is as small as the upper half of an id, and the others are not."""
    values = np.frombuffer(head, dtype, len(head) // np.dtype(dtype).itemsize)
    low, high = values[: len(values) // 2 * 2 : 2], values[1::2]
    if len(high) < _MIN_PAIRS or (most := int(high.max())) > _MAX_HIGH:
        return False
    return bool(np.count_nonzero(low > most) * 8 >= len(low))


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """The head of an `.idx` file.

    Attributes:
        dtype: numpy's name.
        num_sequences: in the `.bin`.
        num_bytes: what the whole `.idx` has at least.
    """

    dtype: str
    num_sequences: int
    num_bytes: int

    @property
    def last_length(self) -> int:
        """Where the last sequence's number of ids stands, as int32; there must be a sequence."""
        return IDX_HEAD_BYTES + 4 * (self.num_sequences - 1)

    @property
    def last_place(self) -> int:
        """Where the last sequence's first byte stands, as int64."""
        return IDX_HEAD_BYTES + 4 * self.num_sequences + 8 * (self.num_sequences - 1)


def read_megatron_head(shard: Shard, head: bytes, file_bytes: int) -> MegatronIndex:
    """What the first `IDX_HEAD_BYTES` of the index beside a shard tell.

    Raises:
        CorruptSample: it is none, is of another version or dtype, or shorter than it says.
    """
    if len(head) < IDX_HEAD_BYTES or not head.startswith(IDX_MAGIC):
        raise refused(shard, "the .idx file beside it is no index of Megatron's, unlike the first shard's")
    _, version, code, num_sequences, num_documents = _IDX_HEAD.unpack_from(head)
    dtype = _IDX_DTYPES.get(code, f"code {code}")
    if version != 1 or dtype not in DTYPES:
        raise refused(shard, f"its Megatron index has version {version} and dtype {dtype}; version 1 and integers are served")
    num_bytes = IDX_HEAD_BYTES + 12 * num_sequences + 8 * num_documents
    if file_bytes not in (num_bytes, num_bytes + num_sequences):  # with a byte of each sequence's mode
        raise _contradicts(shard, f"its Megatron index has {file_bytes} bytes, and {num_bytes} by its own count")
    return MegatronIndex(dtype, num_sequences, num_bytes)


def megatron_header(shard: Shard, index: MegatronIndex, last_length: bytes, last_place: bytes) -> Header:
    """The whole shard as one stream of ids.

    Args:
        shard: the `.bin`.
        index: of it.
        last_length: 4 bytes from `index.last_length` on; empty where there is no sequence.
        last_place: 8 bytes from `index.last_place` on; as that.

    Raises:
        CorruptSample: the sequences do not end where the shard does.
    """
    length, place = int.from_bytes(last_length, "little"), int.from_bytes(last_place, "little")
    stop = place + length * np.dtype(index.dtype).itemsize
    if stop != shard.size_bytes:
        raise _contradicts(shard, f"it has {shard.size_bytes} bytes, and {stop} by the Megatron index beside it")
    return Header("Megatron", index.dtype, 0, stop, 0)
