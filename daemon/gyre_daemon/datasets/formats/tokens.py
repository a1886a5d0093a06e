"""The format `tokens`: files of token ids, with or without a header.

A sample is a window of `sequence_length` ids; a window starts every `stride` ids of a shard. Of
Megatron's files it may be a document. A shard is flat little-endian ids, or has a header:

npy        numpy's own, of one dim
llm.c      256 int32, also of modded-nanogpt: magic number, version, number of ids
Megatron   no header: the `.idx` file next to the `.bin` has the dtype and each sequence's place,
           and which sequences a document has

Each shard is asked for its head once. If none has a header, the first one is asked for a Megatron
index next to it. Only if that exists are the other indexes read.
"""

import re
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    Arrays,
    CodecName,
    FieldSpec,
    Probe,
    ProbeRequest,
    ProbeResponse,
    ProbeSteps,
    SampleIndex,
    array_of,
    probe_heads,
    require,
)
from gyre_daemon.datasets.formats.npy import NPY_MAGIC, parse_npy_header
from gyre_daemon.datasets.formats.sample_table import SampleTable, StridedIndex, common_schema
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

HEAD_BYTES = 4096
DTYPES = ("uint8", "uint16", "int16", "int32", "int64", "uint32", "uint64")
HEADER_BYTES_HINT = (
    "if these really are ids, say where they begin with `header_bytes` (0 for the first byte), and "
    "name their `dtype`"
)

# Bits of `TokenHeader.hints`: the look of the head of a file without a header.
TEXT, WIDER_THAN_2, WIDER_THAN_4 = 1, 2, 4
MAX_HINTS = TEXT | WIDER_THAN_2 | WIDER_THAN_4
HEADER_KINDS = ("", "npy", "llm.c", "Megatron")
# Ids look wider than the dtype if every second number is as small as the upper half of an id. With
# fewer pairs, or with larger upper halves, ids of the right dtype would be refused by chance;
# smaller upper halves would miss vocabularies of up to 2**20 ids.
_MIN_PAIRS = 256
_MAX_UPPER_HALF = 15

_LLM_C_BYTES = 1024
_LLM_C_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
_LLM_C_MAGICS = {magic for magic, _ in _LLM_C_DTYPES}

# The first bytes of files served as ids by mistake. Hardly any true ids begin with them.
_FOREIGN = {
    "a Parquet file": rb"PAR1",
    "an Arrow file": rb"ARROW1\0\0",
    "an HDF5 file": rb"\x89HDF\r\n\x1a\n",
    "an SQLite database": rb"SQLite format 3\0",
    "an image": rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff[\xe0\xe1\xe2\xee\xdb]",
    "sound": rb"RIFF.{4}WAVE|fLaC|OggS",
    "compressed data": rb"\x1f\x8b\x08[\0\x08]|\x28\xb5\x2f\xfd|\xfd7zXZ\0|BZh[1-9]1AY",
    "a zip archive, as npz files and torch's are": rb"PK\x03\x04",
    "a tar archive": rb".{257}ustar",
    "a pickle": rb"\x80[\x04\x05]\x95.{4}\0|\x80[\x02\x03][c\]\x8a].{2}",
    "a model": rb"GGUF|.{4}\0{4}\{\"[\w.]" + rb"|" + re.escape(struct.pack("<i", 20240326)),
    # version 2, fields, a page of 2 MiB to 2 GiB, less than 2^40 samples, a table below 2^48
    "a dataset of ffcv": rb"\x02\0[\x01-\x40]\0\0\0"
    rb"([\x20\x40\x80]\0|\0[\x01\x02\x04\x08\x10\x20\x40\x80])"
    rb".{5}\0{3}.{6}\0\0",
    "a chunk of lit-gpt": rb"LITPKDS",
    "the index of a Megatron dataset": rb"MMIDIDX\0\0|TNTIDX\0\0",
}
# 32 random ids of 16 bits are all printable in one file of 10^17.
_MIN_TEXT_BYTES = 64
_CONTROL = bytes({*range(32), 127} - set(b"\t\n\r\f"))


class TokenHeader(NamedTuple):
    """The dtype and the range of a shard's ids.

    Attributes:
        kind: `npy`, `llm.c` or `Megatron`; empty if it has no header.
        dtype: numpy's name; empty if nothing says it.
        start: first byte of the ids.
        stop: the byte after the last id.
        hints: bits of `TEXT`, `WIDER_THAN_2` and `WIDER_THAN_4`.
    """

    kind: str
    dtype: str
    start: int
    stop: int
    hints: int


def read_head(shard: Shard, head: bytes, _file_bytes: int = 0) -> TokenHeader:
    """The header in the first `HEAD_BYTES` of a shard.

    Raises:
        CorruptSample: it is no file of token ids, or its header contradicts its size.
    """
    if head.startswith(NPY_MAGIC):
        return _read_npy(shard, head)
    magic, version, num_tokens = struct.unpack_from("<iii", head.ljust(12, b"\0"))
    if magic in _LLM_C_MAGICS and 0 < version < 256:
        return _read_llm_c(shard, magic, version, num_tokens)
    signs = (what for what, signature in _FOREIGN.items() if re.match(signature, head, re.DOTALL))
    if what := next(signs, "") or _offsets_of(shard, head):
        advice = "name its format, or write its ids as a flat file or with numpy.save"
        raise not_ids(shard, f"it looks like {what}; {advice}; {HEADER_BYTES_HINT}")
    hints = (
        (_looks_wider(head, "<u2") and WIDER_THAN_2)
        | (_looks_wider(head, "<u4") and WIDER_THAN_4)
        | (_is_text(head) and TEXT)
    )
    return TokenHeader("", "", 0, shard.size_bytes, hints)


def not_ids(shard: Shard, reason: str) -> CorruptSample:
    """The error for a shard that cannot be served as token ids."""
    return CorruptSample(
        f"shard {shard.name} holds no token ids: {reason}", {"shard": shard.name, "reason": reason}
    )


def not_whole(shard: Shard, reason: str) -> CorruptSample:
    """The error for a shard that contradicts its header or index."""
    return CorruptSample(
        f"shard {shard.name} is not whole: {reason}; restore it",
        {"shard": shard.name, "reason": reason},
    )


def _offsets_of(shard: Shard, head: bytes) -> str:
    """The table of offsets that a file begins with, in words: a count, then uint32; else empty."""
    values = np.frombuffer(head, "<u4", len(head) // 4).astype(np.int64)
    count = int(values[0]) if len(values) else 0
    offsets = values[1 : count + 2]
    first = 4 * (count + 2)
    is_table = len(offsets) > 1 and (np.diff(offsets) >= 0).all() and first <= offsets[0]
    if not is_table or offsets[-1] > shard.size_bytes:
        return ""
    if len(offsets) == count + 1 and offsets[-1] != shard.size_bytes:
        return ""
    if offsets[0] == first:
        return "a chunk of LitData"
    return "a shard of MDS" if head[first : first + 1] == b"{" else ""


def _read_npy(shard: Shard, head: bytes) -> TokenHeader:
    try:
        header = parse_npy_header(head)
    except ValueError as error:
        raise not_ids(shard, f"it is an npy file, and {error}") from error
    name, shape = header.dtype.name, header.shape
    if len(shape) != 1 or name not in DTYPES:
        raise not_ids(
            shard,
            f"its npy array is of {name} and has shape {list(shape)}; store integers of one "
            "dimension",
        )
    if header.dtype != header.dtype.newbyteorder("<"):
        raise not_ids(shard, "its npy array is big-endian; store it little-endian")
    stop = header.num_bytes + shape[0] * header.dtype.itemsize
    if stop != shard.size_bytes:
        raise not_whole(shard, f"it has {shard.size_bytes} bytes, and {stop} by its npy header")
    return TokenHeader("npy", name, header.num_bytes, stop, 0)


def _read_llm_c(shard: Shard, magic: int, version: int, num_tokens: int) -> TokenHeader:
    """Magic number and version are eight bytes that hardly begin any other file of ids."""
    dtype = _LLM_C_DTYPES.get((magic, version))
    if dtype is None:
        raise not_ids(
            shard,
            f"its header is llm.c's {magic} in version {version}, which is not known; "
            f"{HEADER_BYTES_HINT}",
        )
    stop = _LLM_C_BYTES + num_tokens * np.dtype(dtype).itemsize
    if stop != shard.size_bytes:
        raise not_whole(
            shard,
            f"it has {shard.size_bytes} bytes, and {stop} by its llm.c header of {num_tokens} "
            f"{dtype} ids",
        )
    return TokenHeader("llm.c", dtype, _LLM_C_BYTES, stop, 0)


def _is_text(head: bytes) -> bool:
    """Whether the head is printable UTF-8, too long to be ids of two bytes or more."""
    if len(head) < _MIN_TEXT_BYTES or len(head.translate(None, _CONTROL)) != len(head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def _looks_wider(head: bytes, dtype: str) -> bool:
    """Whether every second number looks like the upper half of an id, and the others do not."""
    values = np.frombuffer(head, dtype, len(head) // np.dtype(dtype).itemsize)
    lower, upper = values[: len(values) // 2 * 2 : 2], values[1::2]
    if len(upper) < _MIN_PAIRS or (largest := int(upper.max())) > _MAX_UPPER_HALF:
        return False
    return bool(np.count_nonzero(lower > largest) * 8 >= len(lower))


INDEX_SUFFIX = ".idx"
IDX_MAGIC = b"MMIDIDX\0\0"
OLD_IDX_MAGIC = b"TNTIDX\0\0"  # its numbers have other places
_IDX_HEAD = struct.Struct("<9sQBQQ")
IDX_HEAD_BYTES = _IDX_HEAD.size
_IDX_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """The head of an `.idx` file."""

    dtype: str  # numpy's name
    num_sequences: int  # in the `.bin` file
    num_bounds: int  # how many places of documents there are, one more than documents

    @property
    def tables(self) -> tuple[range, range, range]:
        """The byte ranges of all lengths (int32), first bytes (int64) and documents (int64).

        Documents are numbers of sequences: where each begins, and where the last one ends.
        """
        lengths = range(IDX_HEAD_BYTES, IDX_HEAD_BYTES + 4 * self.num_sequences)
        begins = range(lengths.stop, lengths.stop + 8 * self.num_sequences)
        return lengths, begins, range(begins.stop, begins.stop + 8 * self.num_bounds)

    @property
    def last_entries(self) -> tuple[range, range]:
        """The last one of `tables` for lengths and first bytes; empty if there is no sequence."""
        lengths, begins, _ = self.tables
        return lengths[-4:], begins[-8:]


def read_megatron_head(shard: Shard, head: bytes, file_bytes: int) -> MegatronIndex:
    """The index whose first `IDX_HEAD_BYTES` these are, if it is one and as long as it says."""
    if len(head) < IDX_HEAD_BYTES or not head.startswith(IDX_MAGIC):
        raise not_ids(
            shard, "the .idx file next to it is no index of Megatron's, unlike the first shard's"
        )
    _, version, code, num_sequences, num_documents = _IDX_HEAD.unpack_from(head)
    dtype = _IDX_DTYPES.get(code, f"code {code}")
    if version != 1 or dtype not in DTYPES:
        raise not_ids(
            shard,
            f"its Megatron index has version {version} and dtype {dtype}; version 1 and integers "
            "are served",
        )
    num_bytes = IDX_HEAD_BYTES + 12 * num_sequences + 8 * num_documents
    if file_bytes not in (num_bytes, num_bytes + num_sequences):  # a byte of each sequence's mode
        raise not_whole(
            shard, f"its Megatron index has {file_bytes} bytes, and {num_bytes} by its own count"
        )
    return MegatronIndex(dtype, num_sequences, num_documents)


def megatron_header(
    shard: Shard, index: MegatronIndex, last_length: bytes, last_begin: bytes
) -> TokenHeader:
    """The whole shard as one stream of ids, by the bytes of the index's `last_entries`.

    Raises:
        CorruptSample: the sequences do not end where the shard does.
    """
    length, begin = int.from_bytes(last_length, "little"), int.from_bytes(last_begin, "little")
    stop = begin + length * np.dtype(index.dtype).itemsize
    if stop != shard.size_bytes:
        raise not_whole(
            shard, f"it has {shard.size_bytes} bytes, and {stop} by the Megatron index next to it"
        )
    return TokenHeader("Megatron", index.dtype, 0, stop, 0)


def read_documents(
    shard: Shard, index: MegatronIndex, tables: Sequence[bytes]
) -> npt.NDArray[np.int64]:
    """Where each document begins, and where the last one ends, by the bytes of `index.tables`.

    Returns:
        int64 [documents + 1], in bytes of the shard.

    Raises:
        CorruptSample: sequences have gaps or overlap, or documents do not end where
            sequences do.
    """
    dtypes = ("<i4", "<i8", "<i8")
    lengths, begins, documents = map(np.frombuffer, tables, dtypes)
    sizes = lengths.astype(np.int64) * np.dtype(index.dtype).itemsize
    ends: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum(sizes)))
    if (sizes < 0).any() or (begins != ends[:-1]).any():
        raise not_whole(
            shard, "by the Megatron index next to it, its sequences do not follow each other"
        )
    if ends[-1] != shard.size_bytes:
        raise not_whole(
            shard,
            f"it has {shard.size_bytes} bytes, and {ends[-1]} by the Megatron index next to it",
        )
    is_whole = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths)
    if not is_whole or (np.diff(documents) < 0).any():
        raise not_ids(
            shard,
            "the Megatron index next to it does not say where its documents end; serve windows, "
            "with `sequence_length`",
        )
    found: npt.NDArray[np.int64] = ends[documents]
    return found


def probe_headers(shards: Sequence[Shard]) -> ProbeSteps:
    """The headers of the shards, or of the Megatron indexes next to them."""
    headers = yield from probe_heads(shards, HEAD_BYTES, read_head)
    if not any(header.kind for header in headers) and shards[0].name.endswith(".bin"):
        first = yield ProbeRequest([0], [0], [IDX_HEAD_BYTES], INDEX_SUFFIX, is_optional=True)
        if first and first.pieces[0].startswith(OLD_IDX_MAGIC):
            raise not_ids(
                shards[0],
                f"the {INDEX_SUFFIX} file next to it is an old index of Megatron-LM or fairseq "
                "(TNTIDX), which is not read. Write the dataset again with Megatron-LM's "
                f"preprocess_data.py, or serve all ids back to back: {HEADER_BYTES_HINT}",
            )
        if first and first.pieces[0].startswith(IDX_MAGIC):
            headers = yield from _probe_megatron(shards)
    kinds, dtypes, *numbers = zip(*headers, strict=True)
    return {
        "kind": np.array(kinds, np.str_),
        "dtype": np.array(dtypes, np.str_),
        "numbers": np.array(numbers, np.int64),
    }


def _headers_of(arrays: Arrays) -> list[TokenHeader]:
    kinds, dtypes = arrays["kind"].tolist(), arrays["dtype"].tolist()
    numbers = arrays["numbers"].tolist()
    return [TokenHeader(*each) for each in zip(kinds, dtypes, *numbers, strict=True)]


def check_headers(arrays: Arrays, shards: Sequence[Shard]) -> None:
    """See `Probe.check`, of `probe_headers`."""
    names = [arrays.get(name) for name in ("kind", "dtype")]
    numbers = array_of(arrays, "numbers", np.int64, num_dims=2)
    require(numbers.shape == (3, len(shards)), "its numbers are not those of the shards")
    for array, allowed in zip(names, (HEADER_KINDS, ("", *DTYPES)), strict=True):
        if array is None or array.dtype.kind != "U" or array.shape != (len(shards),):
            raise ValueError("its headers are not those of the shards")
        require(np.isin(array, allowed).all(), "it has a header of an unknown kind")
    sizes = np.array([shard.size_bytes for shard in shards], np.int64)
    start, stop, hints = numbers
    is_outside = (start < 0) | (start > stop) | (stop > sizes) | (hints < 0) | (hints > MAX_HINTS)
    require(not is_outside.any(), "its headers point outside the shards")


def _probe_megatron(
    shards: Sequence[Shard],
) -> Generator[ProbeRequest, ProbeResponse | None, list[TokenHeader]]:
    """Read the heads of the indexes first, then the entries of their last sequences."""
    indexes = yield from probe_heads(shards, IDX_HEAD_BYTES, read_megatron_head, INDEX_SUFFIX)
    ranges = [each for index in indexes for each in index.last_entries]
    starts, stops = [each.start for each in ranges], [each.stop for each in ranges]
    twice = [shard for shard in range(len(shards)) for _ in range(2)]
    response = yield ProbeRequest(twice, starts, stops, INDEX_SUFFIX)
    assert response is not None
    entries = response.pieces
    return list(map(megatron_header, shards, indexes, entries[::2], entries[1::2]))


def probe_documents(shards: Sequence[Shard]) -> ProbeSteps:
    """The places of the documents of all shards, by the Megatron indexes next to them."""
    first = yield ProbeRequest([0], [0], [IDX_HEAD_BYTES], INDEX_SUFFIX, is_optional=True)
    if not first or not first.pieces[0].startswith(IDX_MAGIC):
        raise ConfigError(
            f"`samples` is documents, and shard {shards[0].name} has no Megatron index (.idx) "
            "next to it; serve windows, with `sequence_length`"
        )
    indexes = yield from probe_heads(shards, IDX_HEAD_BYTES, read_megatron_head, INDEX_SUFFIX)
    places: list[npt.NDArray[np.int64]] = []
    for number, index in enumerate(indexes):
        starts, stops = zip(*((each.start, each.stop) for each in index.tables), strict=True)
        response = yield ProbeRequest([number] * len(starts), starts, stops, INDEX_SUFFIX)
        assert response is not None
        places.append(read_documents(shards[number], index, response.pieces))
    return {
        "dtype": np.array([index.dtype for index in indexes], np.str_),
        "num_documents": np.array([len(each) - 1 for each in places], np.int64),
        "start": np.concatenate([each[:-1] for each in places]),
        "size": np.concatenate([np.diff(each) for each in places]),
    }


def check_documents(arrays: Arrays, shards: Sequence[Shard]) -> None:
    """See `Probe.check`, of `probe_documents`."""
    dtypes, num_documents = arrays.get("dtype"), array_of(arrays, "num_documents", np.int64)
    start, size = array_of(arrays, "start", np.int64), array_of(arrays, "size", np.int64)
    if dtypes is None or dtypes.dtype.kind != "U" or dtypes.shape != (len(shards),):
        raise ValueError("its dtypes are not those of the shards")
    require(np.isin(dtypes, DTYPES).all(), "it has an unknown dtype")
    counts_fit = num_documents.shape == (len(shards),) and (num_documents >= 0).all()
    counts_fit = counts_fit and num_documents.sum() == len(start) == len(size)
    require(counts_fit, "its documents are not those of the shards")
    itemsizes = np.array([np.dtype(dtype).itemsize for dtype in dtypes.tolist()], np.int64)
    sizes = np.array([shard.size_bytes for shard in shards], np.int64)
    width, end = np.repeat(itemsizes, num_documents), np.repeat(sizes, num_documents)
    is_outside = (start < 0) | (size < 0) | (size > end) | (start > end - size)
    is_outside |= (start % width != 0) | (size % width != 0)
    require(not is_outside.any(), "its documents point outside the shards")


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


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

    sequence_length: _Count = 0
    dtype: str = ""
    stride: _Count = 0
    header_bytes: _Count | None = None
    vocabulary: Annotated[int, msgspec.Meta(ge=0)] = 0
    samples: Literal["windows", "documents"] = "windows"

    def __post_init__(self) -> None:
        """Refuse keys that do not go together, and an unknown dtype."""
        if self.dtype and self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype of a tokens dataset is `{self.dtype}`; it must be one of "
                f"{', '.join(DTYPES)}"
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


class TokensFormat:
    """A `Format` that probes the head of each shard, unless the options say where ids begin."""

    pattern = "*.bin"
    unpacks_gzip = False

    def __init__(self, options: TokensOptions) -> None:
        self._options = options

    @property
    def inspection(self) -> Probe | None:
        if self._options.samples == "documents":
            return Probe("tokens-documents/1", probe_documents, check_documents)
        if self._options.header_bytes is not None:
            return None
        return Probe("tokens-headers/1", probe_headers, check_headers)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        if self._options.samples == "documents":
            return _documents(self._options, shards, inspected[0])
        if inspected:
            return _index(self._options, shards, _headers_of(inspected[0]))
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
    pairs = zip(shards, found["dtype"].tolist(), strict=True)
    headers = [TokenHeader("Megatron", dtype, 0, shard.size_bytes, 0) for shard, dtype in pairs]
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
    """The type of all ids, from the headers or the options, which must agree."""
    pairs = zip(shards, headers, strict=True)
    kinds = [header[:2] if shard.size_bytes else None for shard, header in pairs]
    kind, dtype = common_schema(shards, kinds, _describe) or headers[0][:2]
    first = next((shard for shard in shards if shard.size_bytes), shards[0])
    if not (dtype or options.dtype):
        raise ConfigError(
            f"`dtype` is missing: shard {first.name} of this tokens dataset has no header that "
            f"says how its ids are stored. Set it to one of {', '.join(DTYPES)}"
        )
    if dtype and options.dtype and dtype != options.dtype:
        raise ConfigError(
            f"`dtype` is {options.dtype}, but shard {first.name} has {_describe((kind, dtype))}; "
            "remove `dtype`, or correct it"
        )
    return dtype or options.dtype


def _describe(header: tuple[str, str]) -> str:
    kind, dtype = header
    return f"a {kind} header of {dtype} ids" if kind else "no header"


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
