"""A sample is a window of `sequence_length` ids; a window starts every `stride` ids of a shard.

Of Megatron's files it may be a document.

A shard is flat little-endian ids, or has one of the headers in `headers`. Its first bytes tell
which, and a shard recognised as another type of file is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    CodecName,
    FieldSpec,
    Probe,
    SampleIndex,
)
from gyre_daemon.datasets.formats.indexes.strided import StridedIndex
from gyre_daemon.datasets.formats.indexes.table import SampleTable
from gyre_daemon.datasets.formats.tokens.documents import (
    DOCUMENTS_VERSION,
    check_documents,
    headers_of,
    probe_documents,
)
from gyre_daemon.datasets.formats.tokens.headers import (
    DTYPES,
    HEADER_BYTES_HINT,
    TEXT,
    WIDER_THAN_2,
    WIDER_THAN_4,
    TokenHeader,
    not_ids,
)
from gyre_daemon.datasets.formats.tokens.probe import (
    PROBE_VERSION,
    check_headers,
    probe_headers,
    to_headers,
)
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

_MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class TokensOptions:
    """The keys of a `tokens` dataset.

    Attributes:
        sequence_length: ids in a window.
        dtype: numpy's name of the type of an id, little-endian; empty if the shards have headers.
        stride: ids from the start of one sample to the start of the next; 0 for the sequence
            length, so that samples do not overlap.
        header_bytes: bytes before the first id of each shard. If it is given, the shards' contents
            are not checked.
        vocabulary: every id must be below this number; 0 for no check.
        samples: `windows`, or `documents`, as a Megatron index next to each shard has them.
    """

    sequence_length: int = 0
    dtype: str = ""
    stride: int = 0
    header_bytes: int | None = None
    vocabulary: int = 0
    samples: str = "windows"

    def __post_init__(self) -> None:
        """Refuse values that no file can satisfy."""
        if self.dtype and self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype of a tokens dataset is `{self.dtype}`; it must be one of "
                f"{', '.join(DTYPES)}"
            )
        if self.samples not in ("windows", "documents"):
            raise ConfigError(
                f"`samples` of a tokens dataset is {self.samples!r:.100}; it must be windows or "
                "documents"
            )
        if self.samples == "documents":
            if self.sequence_length or self.stride or self.header_bytes is not None:
                raise ConfigError(
                    "documents of a tokens dataset have no `sequence_length`, `stride` or "
                    "`header_bytes`; leave these out, or `samples`"
                )
        elif not self.sequence_length:
            raise ConfigError(
                "`sequence_length` of a tokens dataset is missing: the number of ids in a sample, "
                "1 to 2**40"
            )
        elif not 1 <= self.sequence_length <= _MAX_TOKENS or not 0 <= self.stride <= _MAX_TOKENS:
            raise ConfigError(
                "sequence_length of a tokens dataset must be 1 to 2**40, and stride 0 to 2**40"
            )
        if not 0 <= (self.header_bytes or 0) <= _MAX_TOKENS or not 0 <= self.vocabulary <= 1 << 63:
            raise ConfigError(
                "header_bytes of a tokens dataset must be 0 to 2**40, and vocabulary 0 to 2**63"
            )


class TokensFormat:
    """A `Format` that probes the head of each shard, unless the options say where ids begin."""

    pattern = "*.bin"
    unpacks_gzip = False

    def __init__(self, options: TokensOptions) -> None:
        self._options = options

    @property
    def inspection(self) -> Probe | None:
        """See `Format.inspection`."""
        if self._options.samples == "documents":
            return Probe(DOCUMENTS_VERSION, probe_documents, check_documents)
        if self._options.header_bytes is not None:
            return None
        return Probe(PROBE_VERSION, probe_headers, check_headers)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        if self._options.samples == "documents":
            return _documents(self._options, shards, inspected[0])
        if inspected:
            return _index(self._options, shards, to_headers(inspected[0]))
        start = self._options.header_bytes or 0
        headers = [TokenHeader("", "", start, max(start, shard.size_bytes), 0) for shard in shards]
        return _index(self._options, shards, headers)


def _index(
    options: TokensOptions, shards: Sequence[Shard], headers: Sequence[TokenHeader]
) -> StridedIndex:
    """The windows of all shards; no window spans two shards."""
    dtype = np.dtype(_common_dtype(options, shards, headers)).newbyteorder("<")
    sample_bytes = options.sequence_length * dtype.itemsize
    stride_bytes = (options.stride or options.sequence_length) * dtype.itemsize
    for shard, header in zip(shards, headers, strict=True):
        _check_shard(shard, header, dtype)
    sizes = np.array([header.stop - header.start for header in headers], np.int64)
    return StridedIndex(
        _field(options, dtype),
        [header.start for header in headers],
        np.maximum((sizes - sample_bytes) // stride_bytes + 1, 0),
        stride_bytes=stride_bytes,
        identity=f"tokens {dtype.str} {sample_bytes} {stride_bytes}".encode(),
    )


def _documents(options: TokensOptions, shards: Sequence[Shard], found: Arrays) -> SampleTable:
    """The documents of all shards."""
    headers = headers_of(found, shards)
    dtype = np.dtype(_common_dtype(options, shards, headers)).newbyteorder("<")
    return SampleTable(
        [_field(options, dtype)],
        found["num_documents"].tolist(),
        found["start"][:, None],
        found["size"][:, None],
        identity=f"documents {dtype.str}".encode(),
    )


def _field(options: TokensOptions, dtype: np.dtype[np.generic]) -> FieldSpec:
    """The one field; ids are checked only if their type has values outside the vocabulary."""
    largest = int(np.iinfo(dtype.name).max)
    if options.vocabulary > largest + 1:
        raise ConfigError(
            f"the ids of a vocabulary of {options.vocabulary} do not fit into the {dtype.name} of "
            "this tokens dataset; correct `dtype` or `vocabulary`"
        )
    is_checked = options.vocabulary > 0 and (dtype.kind == "i" or options.vocabulary <= largest)
    codec: CodecName = "ids" if is_checked else "bytes"
    return FieldSpec(
        "tokens",
        dtype,
        (options.sequence_length,) if options.sequence_length else (),
        ragged=not options.sequence_length,
        codec=codec,
        token_ids=True,
        vocabulary=options.vocabulary if is_checked else 0,
    )


def _common_dtype(
    options: TokensOptions, shards: Sequence[Shard], headers: Sequence[TokenHeader]
) -> str:
    """The type of all ids, from the headers or the options, which must agree.

    Raises:
        ConfigError: neither says the type, or the options contradict a header.
        CorruptSample: a shard has another header than the first one.
    """
    pairs = list(zip(shards, headers, strict=True))
    pairs = [pair for pair in pairs if pair[0].size_bytes] or pairs[:1]
    first, declared = pairs[0]
    for shard, header in pairs:
        if (header.kind, header.dtype) != (declared.kind, declared.dtype):
            reason = (
                f"it has {_describe(header)}, and shard {first.name} has {_describe(declared)}; "
                "serve them as two datasets"
            )
            raise CorruptSample(
                f"shard {shard.name} does not fit: {reason}",
                {"shard": shard.name, "reason": reason},
            )
    if not (declared.dtype or options.dtype):
        raise ConfigError(
            f"`dtype` is missing: shard {first.name} of this tokens dataset has no header that "
            f"says how its ids are stored. Set it to one of {', '.join(DTYPES)}"
        )
    if declared.dtype and options.dtype and declared.dtype != options.dtype:
        raise ConfigError(
            f"`dtype` is {options.dtype}, but shard {first.name} has {_describe(declared)}; remove "
            "`dtype`, or correct it"
        )
    return declared.dtype or options.dtype


def _describe(header: TokenHeader) -> str:
    return f"a {header.kind} header of {header.dtype} ids" if header.kind else "no header"


def _check_shard(shard: Shard, header: TokenHeader, dtype: np.dtype[np.generic]) -> None:
    """Refuse a shard whose bytes are not ids of this type, as far as its head tells."""
    if header.hints & TEXT and dtype.itemsize > 1:
        raise not_ids(
            shard,
            "it looks like text; tokenise it first, or serve its bytes as uint8; "
            f"{HEADER_BYTES_HINT}",
        )
    if header.hints & {2: WIDER_THAN_2, 4: WIDER_THAN_4}.get(dtype.itemsize, 0):
        wider = "int32, uint32 or int64" if dtype.itemsize == 2 else "int64 or uint64"
        raise not_ids(
            shard,
            f"every second {dtype.name} at its beginning is next to 0, as where ids are {wider}. "
            f"Correct `dtype`, or set `header_bytes` to 0 if they really are {dtype.name}",
        )
    num_bytes = header.stop - header.start
    if num_bytes % dtype.itemsize:
        where = f" behind its {header.start} header bytes" if header.start else ""
        raise CorruptSample(
            f"shard {shard.name} has {num_bytes} bytes{where}, no multiple of the "
            f"{dtype.itemsize} bytes of a {dtype.name} token. Correct the dataset's dtype or "
            "restore the shard.",
            {"shard": shard.name},
        )
