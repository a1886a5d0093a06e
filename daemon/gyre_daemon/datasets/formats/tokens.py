"""`tokens`: files of token ids. A sample is a window of `sequence_length` ids; windows start every `stride` ids.

A shard is flat, little-endian ids, or has a header that is known (see `headers`). What a shard is, its first bytes tell; where
they tell something that is not ids, nothing is served.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import Arrays, Codec, Extents, FieldSpec, Probe
from gyre_daemon.datasets.formats.headers import DTYPES, TEXT, WAY_OUT, WIDER_THAN_2, WIDER_THAN_4, Header, refused
from gyre_daemon.datasets.formats.probe import probe_headers, read_probe
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.order.blocks import BlockTable, BlockTables, blocks_of_equal_samples
from gyre_daemon.storage.shard import Shard

_MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class TokensOptions:
    """Keys of a `tokens` dataset.

    Attributes:
        sequence_length: ids in a sample.
        dtype: numpy's name of an id's type, little-endian; empty where the shards' headers tell it.
        stride: ids from the start of one sample to that of the next; 0 for the sequence length, so that none overlap.
        header_bytes: before the first id of each shard; where it is given, shards are taken as told and not looked at.
        vocabulary: every id must be below it; 0 for no check.
    """

    sequence_length: int
    dtype: str = ""
    stride: int = 0
    header_bytes: int | None = None
    vocabulary: int = 0

    def __post_init__(self) -> None:
        """Refuse what no file can satisfy."""
        if self.dtype and self.dtype not in DTYPES:
            raise ConfigError(f"dtype of a tokens dataset is `{self.dtype}`; it must be one of {', '.join(DTYPES)}")
        if not 1 <= self.sequence_length <= _MAX_TOKENS or not 0 <= self.stride <= _MAX_TOKENS:
            raise ConfigError("sequence_length of a tokens dataset must be 1 to 2**40, and stride 0 to 2**40")
        if not 0 <= (self.header_bytes or 0) <= _MAX_TOKENS or not 0 <= self.vocabulary <= 1 << 63:
            raise ConfigError("header_bytes of a tokens dataset must be 0 to 2**40, and vocabulary 0 to 2**63")


class TokensFormat:
    """Offsets are arithmetic: nothing is scanned, and the index takes a few bytes per shard."""

    pattern = "*.bin"
    scanner = None

    def __init__(self, options: TokensOptions) -> None:
        self._options = options

    @property
    def probe(self) -> Callable[[Sequence[Shard]], Probe] | None:
        """See `Format.probe`: one look at the head of each shard, unless the options say where the ids begin."""
        return probe_headers if self._options.header_bytes is None else None

    def scan(self, shard: str, file: BinaryIO) -> Arrays:
        """See `Format.scan`: there is nothing to find out."""
        return {}

    def assemble(self, shards: Sequence[Shard], scans: Sequence[Arrays]) -> "TokensIndex":
        """See `Format.assemble`."""
        first = self._options.header_bytes or 0
        plain = [Header("", "", first, max(first, shard.size_bytes), 0) for shard in shards]
        return TokensIndex(self._options, shards, read_probe(scans[0]) if scans else plain)


class TokensIndex:
    """The windows of all shards in order; a window never spans two shards."""

    def __init__(self, options: TokensOptions, shards: Sequence[Shard], headers: Sequence[Header]) -> None:
        dtype = np.dtype(_dtype(options, shards, headers)).newbyteorder("<")
        self._sample_bytes = options.sequence_length * dtype.itemsize
        self._stride_bytes = (options.stride or options.sequence_length) * dtype.itemsize
        for shard, header in zip(shards, headers, strict=True):
            _check(shard, header, dtype)
        self._start = np.array([header.start for header in headers], np.int64)
        sizes = np.array([header.stop for header in headers], np.int64) - self._start
        counts = np.maximum((sizes - self._sample_bytes) // self._stride_bytes + 1, 0)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        self.num_samples = int(self._first[-1])
        self._blocks = BlockTables(lambda io_block_bytes: blocks_of_equal_samples(counts, self._stride_bytes, io_block_bytes))
        self.fields = (_field(options, dtype),)

    def locate(self, sample_ids: npt.NDArray[np.int64]) -> Extents:
        """See `SampleIndex.locate`."""
        if len(self._first) > 2:
            shard = np.searchsorted(self._first, sample_ids, side="right") - 1
            start = (sample_ids - self._first[shard]) * self._stride_bytes + self._start[shard]
        else:
            shard, start = np.broadcast_to(np.int64(0), len(sample_ids)), sample_ids * self._stride_bytes + self._start[0]
        return Extents(shard, start[:, None], np.broadcast_to(np.int64(self._sample_bytes), (len(sample_ids), 1)))

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`: no field is ragged."""
        return 0

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: arithmetic, a few bytes per shard."""
        return self._blocks.of(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        told = f"tokens {self.fields[0].dtype.str} {self._sample_bytes} {self._stride_bytes}".encode()
        return told + (b" " + self._start.astype("<i8").tobytes() if self._start.any() else b"")


def _field(options: TokensOptions, dtype: np.dtype[np.generic]) -> FieldSpec:
    """Ids that cannot be outside the vocabulary are not checked."""
    largest = int(np.iinfo(dtype.name).max)
    if options.vocabulary > largest + 1:
        raise ConfigError(
            f"the ids of a vocabulary of {options.vocabulary} do not fit into the {dtype.name} of this tokens dataset; correct "
            "`dtype` or `vocabulary`"
        )
    is_checked = options.vocabulary > 0 and (dtype.kind == "i" or options.vocabulary <= largest)
    shape, vocabulary = (options.sequence_length,), options.vocabulary if is_checked else 0
    codec: Codec = "ids" if is_checked else "bytes"
    return FieldSpec("tokens", dtype, shape, ragged=False, codec=codec, token_ids=True, vocabulary=vocabulary)


def _dtype(options: TokensOptions, shards: Sequence[Shard], headers: Sequence[Header]) -> str:
    """Of all shards: as their headers or the options say, which must agree.

    Raises:
        ConfigError: nothing tells it, or the options contradict a header.
        CorruptSample: a shard has another header than the first one.
    """
    pairs = [pair for pair in zip(shards, headers, strict=True) if pair[0].size_bytes] or [(shards[0], headers[0])]
    first, told = pairs[0]
    for shard, header in pairs:
        if (header.kind, header.dtype) != (told.kind, told.dtype):
            reason = f"it has {_about(header)}, and shard {first.name} has {_about(told)}; serve them as two datasets"
            raise CorruptSample(f"shard {shard.name} does not fit: {reason}", {"shard": shard.name, "reason": reason})
    if not (told.dtype or options.dtype):
        raise ConfigError(
            f"`dtype` is missing: shard {first.name} of this tokens dataset has no header that says how its ids are stored; "
            f"set it to one of {', '.join(DTYPES)}"
        )
    if told.dtype and options.dtype and told.dtype != options.dtype:
        raise ConfigError(
            f"`dtype` is {options.dtype}, but shard {first.name} has {_about(told)}; remove `dtype`, or correct it"
        )
    return told.dtype or options.dtype


def _about(header: Header) -> str:
    return f"a {header.kind} header of {header.dtype} ids" if header.kind else "no header"


def _check(shard: Shard, header: Header, dtype: np.dtype[np.generic]) -> None:
    """Refuse a shard whose bytes are not ids of this dtype, as far as can be told."""
    if header.hints & TEXT and dtype.itemsize > 1:
        raise refused(shard, f"it looks like text; tokenise it first, or serve its bytes as uint8; {WAY_OUT}")
    wider = {2: WIDER_THAN_2, 4: WIDER_THAN_4}.get(dtype.itemsize, 0)
    if header.hints & wider:
        names = "int32, uint32 or int64" if dtype.itemsize == 2 else "int64 or uint64"
        reason = f"every second {dtype.name} at its beginning is next to 0, as where ids are {names}"
        raise refused(shard, f"{reason}; correct `dtype`, or set `header_bytes` to 0 if they are {dtype.name} indeed")
    num_bytes = header.stop - header.start
    if num_bytes % dtype.itemsize:
        where = f" behind its {header.start} header bytes" if header.start else ""
        raise CorruptSample(
            f"shard {shard.name} has {num_bytes} bytes{where}, no multiple of the {dtype.itemsize} bytes of a "
            f"{dtype.name} token; correct the dataset's dtype or restore the shard",
            {"shard": shard.name},
        )
