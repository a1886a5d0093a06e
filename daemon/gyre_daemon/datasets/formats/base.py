"""The seam between the formats and the rest of the daemon."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol

import numpy as np
import numpy.typing as npt

from gyre_daemon.order.blocks import BlockTable
from gyre_daemon.storage.shard import Shard

SAMPLE_ID = "sample_id"  # names of a batch's own tensors, which no field can have
MASK = "mask"
OFFSETS_SUFFIX = ".offsets"
PRESENT_SUFFIX = ".present"  # of an optional field: which samples have it
SHAPE_SUFFIX = ".shape"  # of a field whose samples are flattened arrays

Arrays = Mapping[str, np.ndarray]  # the index of one shard, by name

Codec = Literal["bytes", "ids", "text", "json", "integer", "npy", "known"]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One named tensor of a sample.

    Attributes:
        name: key in the batch.
        dtype: of the tensor.
        shape: of one sample; of one element where ragged.
        ragged: samples differ in length along the first dim.
        codec: how the stored bytes become the tensor; `bytes` are stored as the tensor lies in memory, and what is `known` is
            in the index and is not read at all.
        token_ids: its elements are token ids; clients may widen those of an unsigned dtype.
        vocabulary: with the codec `ids`, each id must be at least 0 and below it.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    ragged: bool
    codec: Codec
    token_ids: bool = False
    vocabulary: int = 0

    @property
    def element_bytes(self) -> int:
        """Of a sample, or of one element where ragged."""
        return math.prod(self.shape) * self.dtype.itemsize


def stored_fields(fields: Sequence[FieldSpec]) -> Sequence[FieldSpec]:
    """Those that are read; they come before those that are known."""
    return [spec for spec in fields if spec.codec != "known"]


def known_fields(fields: Sequence[FieldSpec]) -> Sequence[FieldSpec]:
    """Those that the index knows."""
    return [spec for spec in fields if spec.codec == "known"]


@dataclass(frozen=True, slots=True)
class Extents:
    """Where the stored bytes of n samples with F stored fields lie, and the values of those that are known.

    Attributes:
        shard: int64 [n], index of the shard.
        start: int64 [n, F], first byte in the shard.
        size: int64 [n, F], in bytes; 0 where a sample lacks a field.
        lengths: int64 [n, F], bytes that each takes in a ragged tensor; None where that is its size.
        absent: bool [n, F], which samples lack which fields; None where none may.
        known: of each known field the values, [n, *shape].
    """

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64] | None = None
    absent: npt.NDArray[np.bool_] | None = None
    known: tuple[npt.NDArray[np.generic], ...] = ()

    @property
    def served(self) -> npt.NDArray[np.int64]:
        """int64 [n, F], bytes that each takes in its tensor, if that is ragged."""
        return self.size if self.lengths is None else self.lengths

    def part(self, some: slice) -> "Extents":
        """Some of the samples."""
        lengths = None if self.lengths is None else self.lengths[some]
        absent = None if self.absent is None else self.absent[some]
        known = tuple(values[some] for values in self.known)
        return Extents(self.shard[some], self.start[some], self.size[some], lengths, absent, known)


class SampleIndex(Protocol):
    """All samples of a dataset, by sample id in `[0, num_samples)`."""

    @property
    def num_samples(self) -> int:
        """N."""

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """The tensors of a sample, those that are stored before those that are known."""

    def locate(self, sample_ids: npt.NDArray[np.int64]) -> Extents:
        """Where the samples lie; vectorised, no I/O."""

    def max_ragged_bytes(self, num_samples: int) -> int:
        """An upper bound of the bytes that the ragged fields of samples at `num_samples` successive positions have together."""

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """Runs of successive samples of one shard, about `io_block_bytes` long; the last few tables are kept."""

    def digest(self) -> bytes:
        """Changes whenever a sample id would mean other bytes of the same shards."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes that a format wants to see of its shards, or of files beside them, before it assembles.

    Attributes:
        shard: n indices of shards.
        start: n first bytes.
        stop: n ends, exclusive; the end of a file cuts a range off.
        suffix: of the files beside the shards, in place of their own; empty for the shards themselves.
        is_optional: the files beside them need not be there.
    """

    shard: Sequence[int]
    start: Sequence[int]
    stop: Sequence[int]
    suffix: str = ""
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What was wanted.

    Attributes:
        pieces: n byte strings.
        file_bytes: n sizes of the whole files.
    """

    pieces: Sequence[bytes]
    file_bytes: Sequence[int]


# Asks for bytes and gets them, or None where an optional file is absent; returns what `assemble` needs to know.
Probe = Generator[Wanted, Found | None, Arrays]


class Format(Protocol):
    """One way to store samples in shards.

    Attributes:
        pattern: which files of a folder are shards; a brace list of several patterns, such as `*.{tar,tar.gz}`. Compressed
            ones among them are unpacked before the format sees them.
        scanner: name and version of the scan, or None where offsets are arithmetic and nothing is scanned.
        probe: where nothing is scanned, what looks at some bytes of the shards instead; None for none. Raises
            CorruptSample where they are nothing that this format stores.
    """

    @property
    def pattern(self) -> str:
        """See above."""

    @property
    def scanner(self) -> str | None:
        """See above."""

    @property
    def probe(self) -> Callable[[Sequence[Shard]], Probe] | None:
        """See above."""

    def scan(self, shard: str, file: BinaryIO) -> Arrays:
        """The index of one shard, in one pass over its bytes; seeks where the file can.

        Raises:
            CorruptSample: the shard is damaged; names it and the offset.
        """

    def assemble(self, shards: Sequence[Shard], scans: Sequence[Arrays]) -> SampleIndex:
        """The index of the dataset from those of its shards, in their order.

        Args:
            shards: of the dataset.
            scans: one a shard; where there is no scanner, what `probe` returned, or nothing.

        Raises:
            CorruptSample: the shards do not make one dataset; names the first that does not fit.
        """
