"""The format `arrow`: each row of an Arrow IPC file or stream is one sample.

`arrow_rows` finds the rows in record batches, where the bytes of a column are a range of the file.
Record batches are chunks and decoded if they are compressed, or a column is no range of bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from gyre_daemon.datasets.formats.base import Arrays, DamagedSample, SampleIndex, Scan
from gyre_daemon.datasets.formats.chunk_index import (
    ChunkIndex,
    Column,
    StoredChunk,
    check_chunks,
    num_rows,
    refuse_damaged,
)
from gyre_daemon.datasets.formats.schemas import (
    ColumnOptions,
    Wanted,
    are_compressed,
    require_pyarrow,
    scan_version,
)
from gyre_daemon.datasets.formats.union_index import assemble_union
from gyre_daemon.storage.shard import Shard

_NOUN = "record batch"


class ArrowFormat:
    """A `Format` that reads the metadata of record batches, and where their rows begin."""

    pattern = "*.{arrow,arrows,ipc,feather}"
    unpacks_gzip = False

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: a file's magic; streams have none."""
        return head.startswith(b"ARROW1\0\0")

    def __init__(self, options: ColumnOptions) -> None:
        """Refuse to start without the library that reads schemas.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        require_pyarrow("arrow")
        self._options, self._columns = options, options.wanted

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        return Scan(
            scan_version("arrow/3", self._columns),
            RecordBatchScan(self._columns),
            num_rows,
            check_chunks,
            ragged=self._options.ragged,
        )

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        refuse_damaged(shards, inspected, _NOUN)
        return self.assemble_tolerantly(shards, inspected)[0]

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleIndex, Sequence[DamagedSample]]:
        """See `TolerantFormat`: all samples of compressed record batches that cannot be decoded.

        They are found when all record batches are tried.
        """
        index = assemble_union(
            self._options,
            [field for field, _ in self._columns.pairs],
            shards,
            inspected,
            lambda scan: scan["fields"].tobytes(),
            num_rows,
            self._assemble,
        )
        return index, ()

    def _assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> ChunkIndex:
        """The index of shards that have the same columns."""
        pairs = [pair for pair in zip(shards, inspected, strict=True) if num_rows(pair[1])]
        decoded = are_compressed([shard for shard, _ in pairs], ["base" not in s for _, s in pairs])
        identity = f"arrow {self._columns.pairs}".encode()
        if pairs and not decoded:
            identity = b"arrow " + pairs[0][1]["fields"].tobytes()
        return ChunkIndex(shards, inspected, RecordBatchDecoder(self._columns), _NOUN, identity)


@dataclass(frozen=True, slots=True)
class RecordBatchScan:
    """Scans a file; the `run` of a `Scan`.

    Attributes:
        wanted: which columns.
    """

    wanted: Wanted

    def __call__(self, shard: str, file: BinaryIO) -> Arrays:
        """See `scan_arrow`, which needs pyarrow and is imported when a file is read."""
        from gyre_daemon.datasets.formats.arrow_rows import scan_arrow  # noqa: PLC0415

        return scan_arrow(self.wanted, shard, file)


@dataclass(frozen=True, slots=True)
class RecordBatchDecoder:
    """Decodes compressed record batches; a `Decode`.

    Attributes:
        wanted: which columns.
    """

    wanted: Wanted

    def __call__(self, chunk: StoredChunk) -> Sequence[Column]:
        """See `decode_batch`, which needs pyarrow."""
        from gyre_daemon.datasets.formats.arrow_rows import decode_batch  # noqa: PLC0415

        return decode_batch(self.wanted, chunk)
