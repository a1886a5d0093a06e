"""The format `arrow`: each row of an Arrow IPC file or stream is one sample.

`arrow_rows` finds the rows in record batches, where the bytes of a column are a range of the file.
Record batches are chunks and decoded if they are compressed, or a column is no range of bytes.
"""

from collections.abc import Sequence
from functools import partial
from typing import BinaryIO

from gyre_daemon.datasets.formats.base import Arrays, SampleIndex, Scan, require_library
from gyre_daemon.datasets.formats.chunk_index import (
    ChunkFormat,
    ChunkIndex,
    Column,
    StoredChunk,
    check_chunks,
    num_rows,
)
from gyre_daemon.datasets.formats.concat import assemble_union
from gyre_daemon.datasets.formats.schemas import (
    ColumnOptions,
    Wanted,
    are_compressed,
    scan_version,
)
from gyre_daemon.storage.shard import Shard


class ArrowFormat(ChunkFormat):
    """A `Format` that reads the metadata of record batches, and where their rows begin."""

    pattern = "*.{arrow,arrows,ipc,feather}"
    unpacks_gzip = False
    noun = "record batch"

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: a file's magic; streams have none."""
        return head.startswith(b"ARROW1\0\0")

    def __init__(self, options: ColumnOptions) -> None:
        """Refuse to start without the library that reads schemas.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        require_library("pyarrow", "the format arrow needs", "arrow")
        self._options, self._columns = options, options.wanted

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        version, run = scan_version("arrow/3", self._columns), partial(_scan, self._columns)
        return Scan(version, run, num_rows, check_chunks, ragged=self._options.ragged)

    def index_of(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `ChunkFormat.index_of`."""
        return assemble_union(self._options, shards, inspected, "fields", self._index_of_equal)

    def _index_of_equal(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> ChunkIndex:
        """The index of shards that have the same columns."""
        pairs = [pair for pair in zip(shards, inspected, strict=True) if num_rows(pair[1])]
        decoded = are_compressed([shard for shard, _ in pairs], ["base" not in s for _, s in pairs])
        identity = f"arrow {self._columns.pairs}".encode()
        if pairs and not decoded:
            identity = b"arrow " + pairs[0][1]["fields"].tobytes()
        decode = partial(_decode, self._columns)
        return ChunkIndex(shards, inspected, decode, self.noun, identity)


def _scan(wanted: Wanted, shard: str, file: BinaryIO) -> Arrays:
    """See `scan_arrow`, which needs pyarrow: only compute workers import it."""
    from gyre_daemon.datasets.formats.arrow_rows import scan_arrow  # noqa: PLC0415

    return scan_arrow(wanted, shard, file)


def _decode(wanted: Wanted, chunk: StoredChunk) -> Sequence[Column]:
    """See `decode_batch`; a `Decode`."""
    from gyre_daemon.datasets.formats.arrow_rows import decode_batch  # noqa: PLC0415

    return decode_batch(wanted, chunk)
