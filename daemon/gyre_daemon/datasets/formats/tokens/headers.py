"""The headers of files of token ids, and hints from the head of a file without one.

npy        numpy's own, of one dim
llm.c      256 int32, also of modded-nanogpt: magic number, version, number of ids
Megatron   no header: the `.idx` file next to the `.bin` has the dtype and each sequence's place
"""

import struct
from typing import NamedTuple

import numpy as np

from gyre_daemon.datasets.formats.npy import NPY_MAGIC, parse_npy_header
from gyre_daemon.datasets.formats.rows.arrayrecord import ArrayRecordFormat
from gyre_daemon.datasets.formats.rows.tfrecord import TfrecordFormat
from gyre_daemon.datasets.formats.tokens.foreign import foreign_type, is_text
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.shard import Shard

HEAD_BYTES = 4096
DTYPES = ("uint8", "uint16", "int16", "int32", "int64", "uint32", "uint64")
HEADER_BYTES_HINT = (
    "if these really are ids, say where they begin with `header_bytes` (0 for the first byte) and "
    "what their `dtype` is"
)

# Bits of `TokenHeader.hints`: the look of the head of a file without a header.
TEXT, WIDER_THAN_2, WIDER_THAN_4 = 1, 2, 4
MAX_HINTS = TEXT | WIDER_THAN_2 | WIDER_THAN_4
HEADER_KINDS = ("", "npy", "llm.c", "Megatron")
# Ids look wider than the dtype if every second number is as small as the upper half of an id. With
# fewer pairs, or with larger upper halves, ids of the right dtype would be refused by chance;
# smaller upper halves would miss vocabularies of up to 2**20 ids.
_MIN_PAIRS = 256
_MAX_UPPER_HALF = 15

_LLM_C_BYTES = 1024
_LLM_C_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
_LLM_C_MAGICS = {magic for magic, _ in _LLM_C_DTYPES}


class TokenHeader(NamedTuple):
    """The dtype and the range of a shard's ids.

    Attributes:
        kind: `npy`, `llm.c` or `Megatron`; empty if it has no header.
        dtype: numpy's name; empty if nothing says it.
        start: first byte of the ids.
        stop: the byte after the last id.
        hints: bits of `TEXT`, `WIDER_THAN_2` and `WIDER_THAN_4`.
    """

    kind: str
    dtype: str
    start: int
    stop: int
    hints: int


def read_head(shard: Shard, head: bytes) -> TokenHeader:
    """The header in the first `HEAD_BYTES` of a shard.

    Raises:
        CorruptSample: it is no file of token ids, or its header contradicts its size.
    """
    if head.startswith(NPY_MAGIC):
        return _read_npy(shard, head)
    magic, version, num_tokens = struct.unpack_from("<iii", head.ljust(12, b"\0"))
    if magic in _LLM_C_MAGICS and 0 < version < 256:
        return _read_llm_c(shard, magic, version, num_tokens)
    for name, records in (("tfrecord", TfrecordFormat), ("arrayrecord", ArrayRecordFormat)):
        if records.recognises(head):
            reason = f"it has records; serve it in the format {name}; {HEADER_BYTES_HINT}"
            raise not_ids(shard, reason)
    if packer := _offsets_of(shard, head):
        raise not_ids(shard, f"it looks like {packer}, which is not read here; {HEADER_BYTES_HINT}")
    foreign = foreign_type(head, shard.name)
    if foreign:
        reason = f"it looks like {foreign.description}; {foreign.advice}; {HEADER_BYTES_HINT}"
        raise not_ids(shard, reason)
    hints = (
        (_looks_wider(head, "<u2") and WIDER_THAN_2)
        | (_looks_wider(head, "<u4") and WIDER_THAN_4)
        | (is_text(head) and TEXT)
    )
    return TokenHeader("", "", 0, shard.size_bytes, hints)


def not_ids(shard: Shard, reason: str) -> CorruptSample:
    """The error for a shard that cannot be served as token ids."""
    return CorruptSample(
        f"shard {shard.name} holds no token ids: {reason}", {"shard": shard.name, "reason": reason}
    )


def not_whole(shard: Shard, reason: str) -> CorruptSample:
    """The error for a shard that contradicts its header or index."""
    return CorruptSample(
        f"shard {shard.name} is not whole: {reason}; restore it",
        {"shard": shard.name, "reason": reason},
    )


def _read_npy(shard: Shard, head: bytes) -> TokenHeader:
    try:
        header = parse_npy_header(head)
    except ValueError as error:
        raise not_ids(shard, f"it is an npy file, and {error}") from error
    name, shape = header.dtype.name, header.shape
    if len(shape) != 1 or name not in DTYPES:
        raise not_ids(
            shard,
            f"its npy array is of {name} and has shape {list(shape)}; store integers of one "
            "dimension",
        )
    if header.dtype != header.dtype.newbyteorder("<"):
        raise not_ids(shard, "its npy array is big-endian; store it little-endian")
    stop = header.num_bytes + shape[0] * header.dtype.itemsize
    if stop != shard.size_bytes:
        raise not_whole(shard, f"it has {shard.size_bytes} bytes, and {stop} by its npy header")
    return TokenHeader("npy", name, header.num_bytes, stop, 0)


def _read_llm_c(shard: Shard, magic: int, version: int, num_tokens: int) -> TokenHeader:
    """Magic number and version are eight bytes that hardly begin any other file of ids."""
    dtype = _LLM_C_DTYPES.get((magic, version))
    if dtype is None:
        raise not_ids(
            shard,
            f"its header is llm.c's {magic} in version {version}, which is not known; "
            f"{HEADER_BYTES_HINT}",
        )
    stop = _LLM_C_BYTES + num_tokens * np.dtype(dtype).itemsize
    if stop != shard.size_bytes:
        raise not_whole(
            shard,
            f"it has {shard.size_bytes} bytes, and {stop} by its llm.c header of {num_tokens} "
            f"{dtype} ids",
        )
    return TokenHeader("llm.c", dtype, _LLM_C_BYTES, stop, 0)


def _offsets_of(shard: Shard, head: bytes) -> str:
    """The table of offsets that a file begins with, in words: a count, then uint32; else empty."""
    values = np.frombuffer(head, "<u4", len(head) // 4).astype(np.int64)
    count = int(values[0]) if len(values) else 0
    offsets = values[1 : count + 2]
    first = 4 * (count + 2)
    is_table = len(offsets) > 1 and (np.diff(offsets) >= 0).all() and first <= offsets[0]
    if not is_table or offsets[-1] > shard.size_bytes:
        return ""
    if len(offsets) == count + 1 and offsets[-1] != shard.size_bytes:
        return ""
    if offsets[0] == first:
        return "a chunk of LitData"
    return "a shard of MDS" if head[first : first + 1] == b"{" else ""


def _looks_wider(head: bytes, dtype: str) -> bool:
    """Whether every second number looks like the upper half of an id, and the others do not."""
    values = np.frombuffer(head, dtype, len(head) // np.dtype(dtype).itemsize)
    lower, upper = values[: len(values) // 2 * 2 : 2], values[1::2]
    if len(upper) < _MIN_PAIRS or (largest := int(upper.max())) > _MAX_UPPER_HALF:
        return False
    return bool(np.count_nonzero(lower > largest) * 8 >= len(lower))
