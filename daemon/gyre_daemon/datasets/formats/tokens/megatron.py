"""Megatron's `.idx` file, with the places of sequences and documents in the `.bin` next to it.

A document is one sequence or several. All numbers are little-endian.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.tokens.headers import DTYPES, TokenHeader, not_ids, not_whole
from gyre_daemon.storage.shard import Shard

INDEX_SUFFIX = ".idx"
IDX_MAGIC = b"MMIDIDX\0\0"
OLD_IDX_MAGIC = b"TNTIDX\0\0"  # its numbers have other places
_IDX_HEAD = struct.Struct("<9sQBQQ")
IDX_HEAD_BYTES = _IDX_HEAD.size
_IDX_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """The head of an `.idx` file.

    Attributes:
        dtype: numpy's name of the type of an id.
        num_sequences: in the `.bin` file.
        num_bounds: how many places of documents there are, one more than documents.
    """

    dtype: str
    num_sequences: int
    num_bounds: int

    @property
    def tables(self) -> tuple[range, range, range]:
        """The byte ranges of all lengths (int32), first bytes (int64) and documents (int64).

        Documents are numbers of sequences: where each begins, and where the last one ends.
        """
        lengths = range(IDX_HEAD_BYTES, IDX_HEAD_BYTES + 4 * self.num_sequences)
        begins = range(lengths.stop, lengths.stop + 8 * self.num_sequences)
        return lengths, begins, range(begins.stop, begins.stop + 8 * self.num_bounds)

    @property
    def last_entries(self) -> tuple[range, range]:
        """The byte ranges of the last sequence's length (int32) and first byte (int64).

        Both are empty if there is no sequence.
        """
        if not self.num_sequences:
            return range(0), range(0)
        length = IDX_HEAD_BYTES + 4 * (self.num_sequences - 1)
        begin = IDX_HEAD_BYTES + 4 * self.num_sequences + 8 * (self.num_sequences - 1)
        return range(length, length + 4), range(begin, begin + 8)


def read_megatron_head(shard: Shard, head: bytes, file_bytes: int) -> MegatronIndex:
    """The index whose first `IDX_HEAD_BYTES` these are.

    Raises:
        CorruptSample: the file is no such index, has another version or dtype, or is shorter than
            it says.
    """
    if len(head) < IDX_HEAD_BYTES or not head.startswith(IDX_MAGIC):
        raise not_ids(
            shard, "the .idx file next to it is no index of Megatron's, unlike the first shard's"
        )
    _, version, code, num_sequences, num_documents = _IDX_HEAD.unpack_from(head)
    dtype = _IDX_DTYPES.get(code, f"code {code}")
    if version != 1 or dtype not in DTYPES:
        raise not_ids(
            shard,
            f"its Megatron index has version {version} and dtype {dtype}; version 1 and integers "
            "are served",
        )
    num_bytes = IDX_HEAD_BYTES + 12 * num_sequences + 8 * num_documents
    if file_bytes not in (num_bytes, num_bytes + num_sequences):  # a byte of each sequence's mode
        raise not_whole(
            shard, f"its Megatron index has {file_bytes} bytes, and {num_bytes} by its own count"
        )
    return MegatronIndex(dtype, num_sequences, num_documents)


def megatron_header(
    shard: Shard, index: MegatronIndex, last_length: bytes, last_begin: bytes
) -> TokenHeader:
    """The whole shard as one stream of ids.

    Args:
        shard: the `.bin` file.
        index: the head of its index.
        last_length: the bytes of the first of `index.last_entries`.
        last_begin: the bytes of the second.

    Raises:
        CorruptSample: the sequences do not end where the shard does.
    """
    length, begin = int.from_bytes(last_length, "little"), int.from_bytes(last_begin, "little")
    stop = begin + length * np.dtype(index.dtype).itemsize
    if stop != shard.size_bytes:
        raise not_whole(
            shard, f"it has {shard.size_bytes} bytes, and {stop} by the Megatron index next to it"
        )
    return TokenHeader("Megatron", index.dtype, 0, stop, 0)


def read_documents(
    shard: Shard, index: MegatronIndex, tables: Sequence[bytes]
) -> npt.NDArray[np.int64]:
    """Where each document begins, and where the last one ends.

    Args:
        shard: the `.bin` file.
        index: the head of its index.
        tables: the bytes of `index.tables`.

    Returns:
        int64 [documents + 1], in bytes of the shard.

    Raises:
        CorruptSample: sequences have gaps or overlap, or documents do not end where
            sequences do.
    """
    dtypes = ("<i4", "<i8", "<i8")
    lengths, begins, documents = map(np.frombuffer, tables, dtypes)
    sizes = lengths.astype(np.int64) * np.dtype(index.dtype).itemsize
    ends: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum(sizes)))
    if (sizes < 0).any() or (begins != ends[:-1]).any():
        raise not_whole(
            shard, "by the Megatron index next to it, its sequences do not follow each other"
        )
    if ends[-1] != shard.size_bytes:
        raise not_whole(
            shard,
            f"it has {shard.size_bytes} bytes, and {ends[-1]} by the Megatron index next to it",
        )
    is_whole = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths)
    if not is_whole or (np.diff(documents) < 0).any():
        raise not_ids(
            shard,
            "the Megatron index next to it does not say where its documents end; serve windows, "
            "with `sequence_length`",
        )
    found: npt.NDArray[np.int64] = ends[documents]
    return found
