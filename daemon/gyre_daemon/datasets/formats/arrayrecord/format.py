"""The format `arrayrecord`, and the index of all its shards."""

from collections.abc import Sequence
from dataclasses import dataclass

from gyre_daemon.datasets.formats.arrayrecord.reading import (
    decode_chunks,
    require_library,
    scan_file,
)
from gyre_daemon.datasets.formats.arrayrecord.riegeli import SIGNATURE
from gyre_daemon.datasets.formats.base import Arrays, DamagedSample, SampleIndex, Scan
from gyre_daemon.datasets.formats.chunks import check_chunks, num_rows, refuse_damaged
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkIndex
from gyre_daemon.storage.shard import Shard

_NOUN = "group of chunks"


@dataclass(frozen=True, slots=True)
class ArrayRecordOptions:
    """The keys of an `arrayrecord` dataset: none."""


class ArrayRecordFormat:
    """A `Format` whose chunks are one or several of Riegeli's."""

    pattern = "*.{array_record,arrayrecord,riegeli,array_record-*-of-*[0-9]}"
    unpacks_gzip = False
    inspection = Scan("arrayrecord/1", scan_file, num_rows, check_chunks, seeks=True)

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: Riegeli's signature."""
        return head.startswith(SIGNATURE)

    def __init__(self, options: ArrayRecordOptions) -> None:
        """Refuse to start without the library that reads such files.

        Raises:
            ConfigError: array_record is not installed.
        """
        require_library()

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        refuse_damaged(shards, inspected, _NOUN)
        return self.assemble_tolerantly(shards, inspected)[0]

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleIndex, Sequence[DamagedSample]]:
        """See `TolerantFormat`: all records of groups that cannot be decoded.

        They are found when all groups are tried.
        """
        return ChunkIndex(shards, inspected, decode_chunks, _NOUN, b"arrayrecord"), ()
