"""The options of `parquet`, and the index of all its shards."""

from collections.abc import Sequence

from gyre_daemon.datasets.formats.arrow_columns import ColumnOptions, require_pyarrow, scan_version
from gyre_daemon.datasets.formats.base import Arrays, DamagedSample, SampleIndex, Scan
from gyre_daemon.datasets.formats.chunks import check_chunks, num_rows, refuse_damaged
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkIndex
from gyre_daemon.datasets.formats.indexes.union_index import assemble_union
from gyre_daemon.datasets.formats.parquet.reading import RowGroupDecoder, RowGroupScan
from gyre_daemon.storage.shard import Shard


class ParquetFormat:
    """A `Format` whose chunks are row groups.

    Files are asked for their footers, and for those columns whose lengths or nulls are
    not known from there.
    """

    pattern = "*.{parquet,parq}"
    unpacks_gzip = False

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: its magic."""
        return head.startswith(b"PAR1")

    def __init__(self, options: ColumnOptions) -> None:
        """Refuse to start without the library that reads such files.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        require_pyarrow("parquet")
        self._options, self._columns = options, options.wanted

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        return Scan(
            scan_version("parquet/3", self._columns),
            RowGroupScan(self._columns),
            num_rows,
            check_chunks,
            seeks=True,
            ragged=self._options.ragged,
        )

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        refuse_damaged(shards, inspected, "row group")
        return self.assemble_tolerantly(shards, inspected)[0]

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleIndex, Sequence[DamagedSample]]:
        """See `TolerantFormat`: all samples of row groups that cannot be decoded.

        They are found when all row groups are tried.
        """
        identity = f"parquet {self._columns.pairs}".encode()
        decode = RowGroupDecoder(self._columns)
        index = assemble_union(
            self._options,
            [field for field, _ in self._columns.pairs],
            shards,
            inspected,
            lambda scan: scan["fields"].tobytes(),
            num_rows,
            lambda some, scans: ChunkIndex(some, scans, decode, "row group", identity),
        )
        return index, ()
