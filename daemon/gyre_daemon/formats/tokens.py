"""`tokens`: flat files of token ids. A sample is a window of `sequence_length` tokens; windows start every `stride` tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.blocks import BlockTable, BlockTables, blocks_of_equal_samples
from gyre_daemon.cache import Arrays
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.formats.base import Extents, FieldSpec
from gyre_daemon.storage import Shard

_DTYPES = ("uint8", "uint16", "int16", "int32", "int64", "uint32", "uint64")
_MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class TokensOptions:
    """Keys of a `tokens` dataset.

    Attributes:
        sequence_length: tokens in a sample.
        dtype: numpy's name of a token's type, little-endian.
        stride: tokens from the start of one sample to that of the next; 0 for the sequence length, so that none overlap.
    """

    sequence_length: int
    dtype: str = "uint16"
    stride: int = 0

    def __post_init__(self) -> None:
        """Refuse what no file can satisfy."""
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype of a tokens dataset is `{self.dtype}`; it must be one of {', '.join(_DTYPES)}")
        if not 1 <= self.sequence_length <= _MAX_TOKENS or not 0 <= self.stride <= _MAX_TOKENS:
            raise ConfigError("sequence_length of a tokens dataset must be 1 to 2**40, and stride 0 to 2**40")


class TokensFormat:
    """Offsets are arithmetic: nothing is scanned, and the index takes a few bytes per shard."""

    pattern = "*.bin"
    scanner = None

    def __init__(self, options: TokensOptions) -> None:
        self._options = options

    def scan(self, shard: str, file: BinaryIO) -> Arrays:
        """See `Format.scan`: there is nothing to find out."""
        return {}

    def assemble(self, shards: Sequence[Shard], scans: Sequence[Arrays]) -> "TokensIndex":
        """See `Format.assemble`."""
        return TokensIndex(self._options, shards)


class TokensIndex:
    """The windows of all shards in order; a window never spans two shards."""

    def __init__(self, options: TokensOptions, shards: Sequence[Shard]) -> None:
        dtype = np.dtype(options.dtype).newbyteorder("<")
        self._sample_bytes = options.sequence_length * dtype.itemsize
        self._stride_bytes = (options.stride or options.sequence_length) * dtype.itemsize
        for shard in shards:
            if shard.size_bytes % dtype.itemsize:
                raise CorruptSample(
                    f"shard {shard.name} has {shard.size_bytes} bytes, no multiple of the {dtype.itemsize} bytes of a "
                    f"{options.dtype} token; correct the dataset's dtype or restore the shard",
                    {"shard": shard.name},
                )
        sizes = np.array([shard.size_bytes for shard in shards], np.int64)
        counts = np.maximum((sizes - self._sample_bytes) // self._stride_bytes + 1, 0)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        self.num_samples = int(self._first[-1])
        self._blocks = BlockTables(lambda io_block_bytes: blocks_of_equal_samples(counts, self._stride_bytes, io_block_bytes))
        self.fields = (FieldSpec("tokens", dtype, (options.sequence_length,), ragged=False, codec="bytes"),)

    def locate(self, sample_ids: npt.NDArray[np.int64]) -> Extents:
        """See `SampleIndex.locate`."""
        if len(self._first) > 2:
            shard = np.searchsorted(self._first, sample_ids, side="right") - 1
            start = (sample_ids - self._first[shard]) * self._stride_bytes
        else:
            shard, start = np.broadcast_to(np.int64(0), len(sample_ids)), sample_ids * self._stride_bytes
        return Extents(shard, start[:, None], np.broadcast_to(np.int64(self._sample_bytes), (len(sample_ids), 1)))

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`: no field is ragged."""
        return 0

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: arithmetic, a few bytes per shard."""
        return self._blocks.of(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        return f"tokens {self.fields[0].dtype.str} {self._sample_bytes} {self._stride_bytes}".encode()
