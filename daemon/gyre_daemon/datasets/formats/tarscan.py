"""One pass over the headers of a tar shard: which samples it has, of which members, and what their first bytes say.

The scan follows the conventions of the WebDataset library: members that are no regular files, and names that begin with
`__...__`, are no samples. Unlike the library it passes over hidden files (`._0001.txt`) and over names that end with a dot.
It looks into every number and every npy header, since they decide whether the shards make one dataset, and into the first text
and JSON of a shard.
"""

import hashlib
import json
import math
import re
import tarfile
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, Codec
from gyre_daemon.datasets.formats.npy import NpyHeader, read_npy_header
from gyre_daemon.datasets.formats.tar import Content, TarReader
from gyre_daemon.datasets.formats.values import MAX_INTEGER_CHARS, check_json, check_text, parse_integer
from gyre_daemon.errors import CorruptSample

SCANNER = "webdataset/3"

_NO_SAMPLE = re.compile(r"__[^/]*__($|/)")
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_CODECS: dict[str, Codec] = {
    "txt": "text", "text": "text", "json": "json", "cls": "integer", "cls2": "integer", "index": "integer", "id": "integer",
    "npy": "npy",
}  # fmt: skip
_GZIP = b"\x1f\x8b"
_CHECKS = {"text": check_text, "json": check_json}
_MAX_LOOKED_AT_BYTES = 1 << 20  # of the first text and JSON; a longer one is checked when it is served


def codec_of(extension: str) -> Codec:
    """How a member is stored, by the last part of its extension; unknown ones are served as they are."""
    return _CODECS.get(extension.rpartition(".")[2], "bytes")


def scan_tar(shard: str, file: BinaryIO) -> Arrays:
    """The index of one shard.

    Returns:
        start, size: int64 [M], of each member of a sample.
        extension: int32 [M], its number in the meta data's list.
        first: int64 [N + 1], the first member of each sample, and M.
        array: int64 [K], which members are npy arrays.
        dim: int64 [K + 1], where each array's shape begins in `shape`.
        shape: int64, the shapes of all arrays, one behind the other.
        itemsize: int64 [K], of an array's elements.
        meta: JSON: see `_Builder.meta`.

    Raises:
        CorruptSample: it is no sound archive; names shard and offset.
    """
    builder = _Builder(shard)
    try:
        archive = TarReader(file)
        for member in archive:
            builder.add(member, archive)
    except ValueError as error:
        offset, told = file.tell(), _compression(file, shard) or f"it is no sound tar archive: {error}"
        raise corrupt(shard, offset, told) from error
    return builder.finish()


def corrupt(shard: str, offset: int, reason: str, **facts: str) -> CorruptSample:
    """The error for a shard that cannot be served."""
    return CorruptSample(
        f"shard {shard} at byte {offset}: {reason}", {"shard": shard, "offset": offset, "reason": reason, **facts}
    )


class _Misfit(ValueError):
    """A member's size contradicts its header."""


@dataclass(slots=True)
class _Builder:
    """Gathers the members of one shard."""

    shard: str
    extensions: dict[str, int] = field(default_factory=dict)
    headers: dict[str, Any] = field(default_factory=dict)  # of the first array of each extension
    kinds: dict[frozenset[int], list[Any]] = field(default_factory=dict)  # by their extensions, the first sample of a kind
    arrays: dict[tuple[str, str, int], list[Any]] = field(default_factory=dict)  # likewise by extension, type, dims
    unsound: dict[str, list[Any]] = field(default_factory=dict)  # by extension, the first member that is none
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    array: list[int] = field(default_factory=list)
    dims: list[int] = field(default_factory=lambda: [0])
    shapes: list[int] = field(default_factory=list)
    itemsizes: list[int] = field(default_factory=list)
    names: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    seen: set[str] = field(default_factory=set)  # extensions
    key: str | None = None

    def add(self, member: tarfile.TarInfo, archive: TarReader) -> None:
        match = _NAME.fullmatch(member.name)
        if not match or _NO_SAMPLE.match(member.name):
            return
        key, extension = match[1], match[2].lower()
        if member.issparse():
            raise corrupt(self.shard, member.offset, f"member {member.name} is a sparse file; write the shard without --sparse")
        if key != self.key:
            self._end_sample()
            self.key = key
            self.firsts.append(len(self.starts))
        number = self.extensions.setdefault(extension, len(self.extensions))
        if number in self.members[self.firsts[-1] :]:
            raise corrupt(self.shard, member.offset, f"sample `{key}` has two members .{extension}")
        self.names.update(f"{member.name}\n".encode(errors="surrogateescape"))
        self._look_into(member, extension, archive)
        self.starts.append(member.offset_data)
        self.sizes.append(member.size)
        self.members.append(number)

    def finish(self) -> Arrays:
        self._end_sample()
        return {
            "meta": np.frombuffer(json.dumps(self.meta()).encode(), np.uint8),
            "start": np.array(self.starts, np.int64),
            "size": np.array(self.sizes, np.int64),
            "extension": np.array(self.members, np.int32),
            "first": np.array([*self.firsts, len(self.starts)], np.int64),
            "array": np.array(self.array, np.int64),
            "dim": np.array(self.dims, np.int64),
            "shape": np.array(self.shapes, np.int64),
            "itemsize": np.array(self.itemsizes, np.int64),
        }

    def meta(self) -> dict[str, Any]:
        """What is not one number for each member.

        `names`, `extensions` and `npy` (the first header of each extension) are what a fingerprint covers. `kinds` has for
        every set of extensions that samples have [extensions, first sample, offset, key]; `arrays` for every extension, type
        and number of dims [extension, type, dims, offset, key]; `unsound` by extension [offset, reason].
        """
        return {
            "extensions": list(self.extensions),
            "npy": self.headers,
            "names": self.names.hexdigest(),
            "kinds": [[sorted(extensions), *first] for extensions, first in self.kinds.items()],
            "arrays": [[*kind, *first] for kind, first in self.arrays.items()],
            "unsound": self.unsound,
        }

    def _end_sample(self) -> None:
        """All members of a sample are there."""
        if self.key is not None:
            first = self.firsts[-1]
            kind = frozenset(self.members[first:])
            self.kinds.setdefault(kind, [len(self.firsts) - 1, self.starts[first], _told(self.key)])

    def _look_into(self, member: tarfile.TarInfo, extension: str, archive: TarReader) -> None:
        codec = codec_of(extension)
        try:
            if codec == "npy":
                self._add_array(member, extension, archive.content(member))
            elif codec == "integer":
                parse_integer(archive.content(member).read(MAX_INTEGER_CHARS + 1))
            elif codec in _CHECKS and extension not in self.seen and member.size <= _MAX_LOOKED_AT_BYTES:
                _CHECKS[codec](archive.content(member).read(member.size))
        except _Misfit as error:
            self.unsound.setdefault(extension, [member.offset_data, f"member {_told(member.name)} {error}"])
        except ValueError as error:
            self.unsound.setdefault(extension, [member.offset_data, f"member {_told(member.name)}: {error}"])
        self.seen.add(extension)

    def _add_array(self, member: tarfile.TarInfo, extension: str, content: Content) -> None:
        header = read_npy_header(content.read)
        if header.num_bytes + math.prod(header.shape) * header.dtype.itemsize != member.size:
            raise _Misfit(f"has {member.size} bytes, its header declares an array of shape {list(header.shape)}")
        self.headers.setdefault(extension, {"dtype": header.dtype.str, "shape": list(header.shape)})
        kind = extension, header.dtype.newbyteorder("<").str, len(header.shape)
        self.arrays.setdefault(kind, [member.offset_data, _told(self.key or "")])
        self._keep_shape(header)

    def _keep_shape(self, header: NpyHeader) -> None:
        self.array.append(len(self.starts))
        self.shapes.extend(header.shape)
        self.dims.append(len(self.shapes))
        self.itemsizes.append(header.dtype.itemsize)


def _compression(file: BinaryIO, shard: str) -> str:
    """What to say of a compressed archive, as far as a file can be looked at again."""
    if not file.seekable():
        return ""
    file.seek(0)
    return f"it is no sound tar archive: it is compressed; call it {shard}.gz" if file.read(2) == _GZIP else ""


def _told(name: str) -> str:
    """A name as an error tells it."""
    return ascii(name)[1:-1][:200] if not name.isprintable() else name[:200]
