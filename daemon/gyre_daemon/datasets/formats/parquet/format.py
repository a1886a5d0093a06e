"""The options of `parquet`, and the index of all its shards."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from gyre_daemon.datasets.formats.base import Arrays, Scan
from gyre_daemon.datasets.formats.chunk_index import ChunkIndex
from gyre_daemon.datasets.formats.chunks import check_chunks, num_rows
from gyre_daemon.datasets.formats.names import renamed
from gyre_daemon.datasets.formats.parquet.reading import RowGroupDecoder, RowGroupScan
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.shard import Shard


@dataclass(frozen=True, slots=True)
class ParquetOptions:
    """The keys of a `parquet` dataset.

    Attributes:
        columns: names of the columns to serve, such as `text`, or `label=class` to serve the column
            `class` under the name `label`; empty for all.
    """

    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse fields that no batch can have."""
        renamed(self.columns, "columns")


class ParquetFormat:
    """A `Format` whose chunks are row groups.

    Files are asked for their footers, and for those columns of which the lengths or the nulls are
    not known from there.
    """

    pattern = "*.{parquet,parq}"
    unpacks_gzip = False

    def __init__(self, options: ParquetOptions) -> None:
        """Refuse to start without what reads such files.

        Raises:
            ConfigError: the extra `parquet` is not installed.
        """
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(
                'the format parquet needs the extra of that name: pip install "gyre-ml[parquet]"'
            )
        self._columns = tuple(renamed(options.columns, "columns"))

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        wanted = " ".join(f"{field}={column}" for field, column in self._columns)
        return Scan(
            f"parquet/2 {wanted}".strip(),
            RowGroupScan(self._columns),
            num_rows,
            check_chunks,
            seeks=True,
        )

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> ChunkIndex:
        """See `Format.assemble`."""
        identity = f"parquet {self._columns}".encode()
        decode = RowGroupDecoder(self._columns)
        return ChunkIndex(shards, inspected, decode, "row group", identity)
