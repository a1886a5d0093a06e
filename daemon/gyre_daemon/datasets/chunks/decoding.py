"""Decodes one chunk, in a separate process.

The process gets a memory file that it shares with the daemon. The pieces of the chunk are at its
beginning, and the decoded chunk goes behind them.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.formats.indexes.chunk_index import (
    DamagedPart,
    Decode,
    Expected,
    StoredChunk,
)
from gyre_daemon.errors import CorruptSample


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One chunk to be decoded; called with the shard's name and the memory file, as a `Scan.run`.

    Attributes:
        decode: the format's.
        noun: the format's name for a chunk.
        number: of the chunk in its shard.
        shard_bytes: the size of the shard.
        parameters: numbers of its scan that the decoder needs.
        pieces: bytes `[start, stop)` of the shard, back to back at the beginning of the file.
        expected: the size and checksums of each field.
        target: where the decoded chunk goes in the file.
        file_bytes: the size of the file.
    """

    decode: Decode
    noun: str
    number: int
    shard_bytes: int
    parameters: tuple[int, ...]
    pieces: Sequence[tuple[int, int]]
    expected: Sequence[Expected]
    target: int
    file_bytes: int

    def __call__(self, shard: str, file: BinaryIO) -> Arrays:
        """Write the decoded chunk.

        Raises:
            CorruptSample: it cannot be decoded, or has changed since it was indexed.
        """
        memory = memoryview(mmap.mmap(file.fileno(), self.file_bytes))
        pieces, begin = [], 0
        for start, stop in self.pieces:
            end = begin + stop - start
            pieces.append((start, memory[begin:end].toreadonly()))
            begin = end
        try:
            columns = self.decode(
                StoredChunk(shard, self.number, self.shard_bytes, pieces, self.parameters)
            )
        except CorruptSample:
            raise
        except DamagedPart as error:
            raise self._corrupt(shard, str(error), error.offset) from error
        except MemoryError as error:
            raise self._corrupt(shard, "it needs too much memory") from error
        except Exception as error:
            raise self._corrupt(shard, f"it cannot be decoded: {error!s:.500}") from error
        if [Expected.of(column) for column in columns] != list(self.expected):
            raise self._corrupt(shard, "its rows are not those that were indexed")
        begin = self.target
        for column in columns:
            end = begin + column.data.nbytes
            np.frombuffer(memory[begin:end], np.uint8)[:] = column.data
            begin = end
        return {}

    def _corrupt(self, shard: str, reason: str, offset: int | None = None) -> CorruptSample:
        offset = self.pieces[-1][0] if offset is None else offset
        return CorruptSample(
            f"{self.noun} {self.number} of shard {shard} (at byte {offset}): {reason}",
            {"shard": shard, "chunk": self.number, "offset": offset, "reason": reason},
        )
