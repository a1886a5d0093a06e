"""`webdataset`: tar shards whose consecutive members with one key make a sample; what follows the key's first dot is the field.

The scan is one pass over a shard's headers. It follows the conventions of the WebDataset library: members that are no regular
files, and names that begin with `__...__`, are no samples. Unlike the library it passes over hidden files (`._0001.txt`) and
over names that end with a dot.
"""

import hashlib
import json
import math
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.blocks import BlockTable, BlockTables, blocks_of_unequal_samples
from gyre_daemon.cache import Arrays
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.formats.base import MASK, OFFSETS_SUFFIX, SAMPLE_ID, Codec, Extents, FieldSpec
from gyre_daemon.formats.npy import parse_npy_header
from gyre_daemon.formats.tar import TarReader
from gyre_daemon.storage import Shard

_NO_SAMPLE = re.compile(r"__[^/]*__($|/)")
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_CODECS: dict[str, Codec] = {
    "txt": "text", "text": "text", "json": "json", "cls": "integer", "cls2": "integer", "index": "integer", "id": "integer",
    "npy": "npy",
}  # fmt: skip
_NPY_HEADER_BYTES = 12 + 10_000
_UNSERVABLE = f"a batch has {SAMPLE_ID}, {MASK} and offsets of its own; name the other `fields` to serve"


@dataclass(frozen=True, slots=True)
class WebdatasetOptions:
    """Keys of a `webdataset` dataset.

    Attributes:
        fields: extensions to serve, such as `txt` and `cls`; empty for all that the first sample has.
    """

    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse fields that no batch can have."""
        for name in self.fields:
            if not is_servable(name):
                raise ConfigError(f"a webdataset cannot serve a field `{name}`: {_UNSERVABLE}")
        if len(set(self.fields)) < len(self.fields):
            raise ConfigError(f"fields of a webdataset names one twice: {', '.join(self.fields)}")


class WebdatasetFormat:
    """Tar shards, indexed once by one pass over their headers."""

    pattern = "*.tar"
    scanner = "webdataset/2"
    probe = None

    def __init__(self, options: WebdatasetOptions) -> None:
        self._options = options

    def scan(self, shard: str, file: BinaryIO) -> Arrays:
        """See `Format.scan`."""
        builder = _ShardBuilder(shard)
        try:
            archive = TarReader(file)
            for member in archive:
                builder.add(member, archive)
        except ValueError as error:
            raise _corrupt(shard, file.tell(), f"it is no sound tar archive: {error}") from error
        return builder.finish()

    def assemble(self, shards: Sequence[Shard], scans: Sequence[Arrays]) -> "WebdatasetIndex":
        """See `Format.assemble`."""
        return WebdatasetIndex(self._options, shards, scans)


@dataclass(slots=True)
class _ShardBuilder:
    """Gathers the members of one shard."""

    shard: str
    extensions: dict[str, int] = field(default_factory=dict)
    headers: dict[str, Any] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    names: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    key: str | None = None
    seen: set[str] = field(default_factory=set)

    def add(self, member: tarfile.TarInfo, archive: TarReader) -> None:
        match = _NAME.fullmatch(member.name)
        if not match or _NO_SAMPLE.match(member.name):
            return
        key, extension = match[1], match[2].lower()
        if member.issparse():
            raise _corrupt(
                self.shard, member.offset, f"member {member.name} is a sparse file; write the shard without --sparse"
            )
        if key != self.key:
            self.key, self.seen = key, set()
            self.firsts.append(len(self.starts))
        if extension in self.seen:
            raise _corrupt(self.shard, member.offset, f"sample `{key}` has two members .{extension}")
        self.seen.add(extension)
        if extension.rpartition(".")[2] == "npy" and extension not in self.headers:
            self.headers[extension] = self._npy_header(member, archive)
        self.names.update(f"{member.name}\n".encode(errors="surrogateescape"))
        self.starts.append(member.offset_data)
        self.sizes.append(member.size)
        self.members.append(self.extensions.setdefault(extension, len(self.extensions)))

    def finish(self) -> Arrays:
        meta = {"extensions": list(self.extensions), "npy": self.headers, "names": self.names.hexdigest()}
        return {
            "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
            "start": np.array(self.starts, np.int64),
            "size": np.array(self.sizes, np.int64),
            "extension": np.array(self.members, np.int32),
            "first": np.array([*self.firsts, len(self.starts)], np.int64),
        }

    def _npy_header(self, member: tarfile.TarInfo, archive: TarReader) -> dict[str, Any]:
        content = archive.read(member, _NPY_HEADER_BYTES)
        try:
            header = parse_npy_header(content)
        except ValueError as error:
            raise _corrupt(self.shard, member.offset_data, f"member {member.name}: {error}") from error
        if header.num_bytes + math.prod(header.shape) * header.dtype.itemsize != member.size:
            reason = f"member {member.name} has {member.size} bytes, its header declares an array of shape {list(header.shape)}"
            raise _corrupt(self.shard, member.offset_data, reason)
        return {"dtype": header.dtype.str, "shape": list(header.shape)}


class WebdatasetIndex:
    """Dense arrays of where each field of each sample lies: 16 bytes per sample and field."""

    def __init__(self, options: WebdatasetOptions, shards: Sequence[Shard], scans: Sequence[Arrays]) -> None:
        metas = [json.loads(scan["meta"].tobytes()) for scan in scans]
        names = _field_names(options, shards, scans, metas)
        columns = [_columns(shard, scan, meta, names) for shard, scan, meta in zip(shards, scans, metas, strict=True)]
        self._start = np.concatenate([start for start, _ in columns])
        self._size = np.concatenate([size for _, size in columns])
        self._first = np.concatenate(([0], np.cumsum([len(start) for start, _ in columns])))
        self.num_samples = len(self._start)
        self.fields = tuple(_field_spec(name, metas) for name in names)
        self._digest = hashlib.blake2b(json.dumps([names, metas]).encode(), digest_size=16)
        self._digest.update(self._start.tobytes())
        self._digest.update(self._size.tobytes())
        self._blocks = BlockTables(self._make_blocks)

    def locate(self, sample_ids: npt.NDArray[np.int64]) -> Extents:
        """See `SampleIndex.locate`."""
        shard = np.searchsorted(self._first, sample_ids, side="right") - 1
        return Extents(shard, self._start[sample_ids], self._size[sample_ids])

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`; each sample occurs at most once in each epoch that the positions touch."""
        totals = self._size[:, [spec.ragged for spec in self.fields]].sum(axis=1)
        num_epochs = num_samples // max(self.num_samples, 1) + 2
        num_largest = min(-(-num_samples // num_epochs), self.num_samples)
        largest = np.partition(totals, self.num_samples - num_largest)[self.num_samples - num_largest :]
        return num_epochs * int(largest.sum())

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`; 16 bytes per block, made by a look at every sample."""
        return self._blocks.of(io_block_bytes)

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        shard = np.repeat(np.arange(len(self._first) - 1), np.diff(self._first))
        start, stop = self._start.min(axis=1), (self._start + self._size).max(axis=1)
        return blocks_of_unequal_samples(shard, start, stop, io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        return self._digest.digest()


def codec_of(name: str) -> Codec:
    """How a field is stored, by the last part of its extension; unknown ones are served as they are."""
    return _CODECS.get(name.rpartition(".")[2], "bytes")


def is_servable(name: str) -> bool:
    """Whether a batch can have a field of this name beside its own tensors."""
    return name.isprintable() and name != "" and name not in (SAMPLE_ID, MASK) and not name.endswith(OFFSETS_SUFFIX)


def _field_names(
    options: WebdatasetOptions, shards: Sequence[Shard], scans: Sequence[Arrays], metas: Sequence[dict[str, Any]]
) -> tuple[str, ...]:
    """Those asked for, or all of the first sample; none where there is no sample."""
    for shard, scan, meta in zip(shards, scans, metas, strict=True):
        if len(scan["first"]) > 1:
            return options.fields or _all_fields(shard, scan, meta)
    return ()


def _all_fields(shard: Shard, scan: Arrays, meta: dict[str, Any]) -> tuple[str, ...]:
    """Of the first sample of a shard."""
    names = tuple(meta["extensions"][member] for member in scan["extension"][: scan["first"][1]])
    for name in names:
        if not is_servable(name):
            raise _corrupt(shard.name, int(scan["start"][0]), f"it has members .{ascii(name)[1:-1]}: {_UNSERVABLE}")
    return names


def _columns(
    shard: Shard, scan: Arrays, meta: dict[str, Any], names: Sequence[str]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Start and size [samples, fields] of one shard."""
    num_samples = len(scan["first"]) - 1
    starts, sizes = scan["start"], scan["size"]
    if ((starts < 0) | (sizes < 0) | (starts > shard.size_bytes - sizes)).any():
        raise _corrupt(shard.name, 0, "its index points outside it; remove the index")
    start, size = np.empty((num_samples, len(names)), np.int64), np.empty((num_samples, len(names)), np.int64)
    sample = np.searchsorted(scan["first"], np.arange(len(starts)), side="right") - 1
    for column, name in enumerate(names):
        members = (
            np.flatnonzero(scan["extension"] == meta["extensions"].index(name))
            if name in meta["extensions"]
            else np.array([], int)
        )
        if len(members) != num_samples:
            missing = int(np.setdiff1d(np.arange(num_samples), sample[members])[0])
            offset = int(starts[scan["first"][missing]])
            raise _corrupt(
                shard.name, offset, f"its sample {missing} has no member .{name}; name the fields that all samples have"
            )
        start[:, column], size[:, column] = starts[members], sizes[members]
    return start, size


def _field_spec(name: str, metas: Sequence[dict[str, Any]]) -> FieldSpec:
    codec = codec_of(name)
    if codec == "integer":
        return FieldSpec(name, np.dtype("<i8"), (), ragged=False, codec=codec)
    if codec == "npy":
        header = next((meta["npy"][name] for meta in metas if name in meta["npy"]), None)
        if header is None:
            raise ConfigError(f"no shard has a member .{name}")
        return FieldSpec(name, np.dtype(header["dtype"]).newbyteorder("<"), tuple(header["shape"]), ragged=False, codec=codec)
    return FieldSpec(name, np.dtype(np.uint8), (), ragged=True, codec=codec)


def _corrupt(shard: str, offset: int, reason: str) -> CorruptSample:
    return CorruptSample(f"shard {shard} at byte {offset}: {reason}", {"shard": shard, "offset": offset, "reason": reason})
