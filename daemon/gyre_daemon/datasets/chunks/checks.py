"""Decoded shards as a check reads them: chunk by chunk, past those that cannot be decoded."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from gyre_daemon.datasets.chunks.decoded import DecodedStorage
from gyre_daemon.datasets.formats.indexes.chunk_index import Chunks
from gyre_daemon.errors import CorruptSample, first_error
from gyre_daemon.storage.base import Reads
from gyre_daemon.storage.beneath import LocalFile

_PIECE_BYTES = 4 << 20


class DecodedShards:
    """See `ShardFiles`. Chunks that cannot be decoded are read as zeros.

    Attributes:
        failures: by chunk, why it cannot be decoded.
    """

    def __init__(self, decoded: DecodedStorage, chunks: Chunks) -> None:
        """Decode nothing yet."""
        self.shards = decoded.shards
        self.failures: dict[int, CorruptSample] = {}
        self._decoded = decoded
        self._chunks = chunks
        self._turn = asyncio.Lock()  # one chunk is in memory at a time

    def local_file(self, shard: int) -> LocalFile | None:
        """See `ShardFiles.local_file`: decoded shards are no files."""
        return None

    async def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `ShardFiles.stream`."""
        for chunk in np.flatnonzero(self._chunks.shard == shard).tolist():
            async with self._turn:
                memory = np.zeros(int(self._chunks.chunk_bytes[chunk]), np.uint8)
                try:
                    await self._decoded.read(
                        Reads.into([memory], [shard], [int(self._chunks.base[chunk])])
                    )
                except* CorruptSample as errors:
                    error = first_error(errors)
                    assert isinstance(error, CorruptSample)
                    self.failures[chunk] = error
                for begin in range(0, len(memory), _PIECE_BYTES):
                    yield memory[begin : begin + _PIECE_BYTES].tobytes()

    async def drain(self, shard: int) -> None:
        """Decode all chunks of a shard that were not read."""
        async for _ in self.stream(shard):
            pass

    def failures_of(self, shard: int) -> list[CorruptSample]:
        """Why chunks of a shard cannot be decoded, in their order."""
        return [
            self.failures[chunk]
            for chunk in sorted(self.failures)
            if int(self._chunks.shard[chunk]) == shard
        ]

    def has_failed_at(self, shard: int, offset: int) -> bool:
        """Whether a byte of a decoded shard is of a chunk that cannot be decoded."""
        return self._chunk_at(shard, offset) in self.failures

    def stored_offset(self, shard: int, offset: int) -> int:
        """Where the chunk of a byte of a decoded shard begins as it is stored."""
        return self._chunks.pieces(self._chunk_at(shard, offset))[-1][0]

    def _chunk_at(self, shard: int, offset: int) -> int:
        chunks = np.flatnonzero(self._chunks.shard == shard)
        return int(chunks[np.searchsorted(self._chunks.base[chunks], offset, side="right") - 1])
