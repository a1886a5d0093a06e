"""Indexes one tar shard in one pass over its headers.

The scan follows the conventions of the WebDataset library: members that follow each other and have
one key make a sample, and one whose name begins with `__...__` belongs to none. Unlike the library
it also passes over hidden files (`._0001.txt`) and over names that end with a dot. It refuses
members that the library loses or tears apart: links and other members that are no files, and
samples whose members are apart. It reads every number and every npy header, since these decide
whether the shards make one dataset, and the first text and JSON of a shard.
"""

import hashlib
import io
import json
import math
import re
import tarfile
from array import array
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, CodecName
from gyre_daemon.datasets.formats.npy import read_npy_header
from gyre_daemon.datasets.formats.values import (
    MAX_NUMBER_CHARS,
    check_json,
    check_text,
    parse_integer,
)
from gyre_daemon.datasets.formats.webdataset.tar import TarReader
from gyre_daemon.errors import CorruptSample

SCAN_VERSION = "webdataset/4"

_NO_SAMPLE = re.compile(r"__[^/]*__($|/)")
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_CODECS: dict[str, CodecName] = {
    **dict.fromkeys(("txt", "text"), "text"),
    **dict.fromkeys(("cls", "cls2", "index", "id"), "integer"),
    "json": "json",
    "npy": "npy",
}
_GZIP = b"\x1f\x8b"
_NO_FILE = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    b"M": "the rest of a file that begins in another volume",
}
# Directories, and the label of a volume, which is text of `tar --label`.
_NO_MEMBER = (tarfile.DIRTYPE, b"D", b"V")
_CHECKS = {"text": check_text, "json": check_json}
# The first text and JSON of a shard are read into memory up to this size; longer ones are checked
# when they are served.
_MAX_CHECKED_BYTES = 1 << 20
# Limits on one shard's index, its arrays excepted. A dataset has some ten extensions, and a sample
# may lack some of them.
MAX_EXTENSIONS, MAX_META_BYTES = 10_000, 4 << 20


def codec_of(extension: str) -> CodecName:
    """How a member is stored, by the last part of its extension; unknown ones are plain bytes."""
    return _CODECS.get(extension.rpartition(".")[2], "bytes")


def num_samples(scan: Arrays) -> int:
    """How many samples a scanned shard has."""
    return len(scan["first"]) - 1


def scan_tar(shard: str, file: BinaryIO) -> Arrays:
    """The index of one shard of N samples, M members that belong to samples, and K npy arrays.

    Returns:
        start, size: int64 [M], first byte and length of each member.
        extension: int32 [M], its number in `extensions` of the meta data.
        first: int64 [N + 1], the first member of each sample, and M.
        array: int64 [K], which members are npy arrays.
        dim: int64 [K + 1], where the shape of each array begins in `shape`.
        shape: int64, the shapes of all arrays, one after the other.
        itemsize: int64 [K], bytes of an element of each array.
        meta: JSON of `extensions`, their names; `npy`, the first header of each extension; `names`,
            a hash of all names; `kinds`, for every set of extensions that a sample has,
            [extensions, first sample, offset, key]; `arrays`, for every combination that occurs,
            [extension, type, dims, offset, key]; `unsound`, for every extension with a bad member,
            its first [offset, reason].

    Raises:
        CorruptSample: it is no sound archive; with shard and offset.
    """
    builder = _IndexBuilder(shard)
    try:
        archive = TarReader(file)
        for member in archive:
            builder.add(member, archive)
    except ValueError as error:
        offset = file.tell()
        if file.seekable():  # it may have been told to go on behind the end
            offset = min(offset, file.seek(0, io.SEEK_END))
        reason = f"it is no sound tar archive: {error}"
        if _is_gzip(file):
            reason = f"it is no sound tar archive: it is compressed; call it {shard}.gz"
        raise corrupt(shard, offset, reason) from error
    return builder.finish()


def corrupt(shard: str, offset: int, reason: str, **facts: str) -> CorruptSample:
    """The error for a shard that cannot be served."""
    return CorruptSample(
        f"shard {shard} at byte {offset}: {reason}",
        {"shard": shard, "offset": offset, "reason": reason, **facts},
    )


def _numbers() -> "array[int]":
    """Numbers of 64 bits; a list would take five times the memory."""
    return array("q")


class _WrongSize(ValueError):
    """A member's size contradicts its npy header."""


@dataclass(slots=True)
class _IndexBuilder:
    """Collects the members of one shard; the attributes are the results of `scan_tar`."""

    shard: str
    extensions: dict[str, int] = field(default_factory=dict)
    headers: dict[str, Any] = field(default_factory=dict)
    kinds: dict[frozenset[int], list[Any]] = field(default_factory=dict)
    arrays: dict[tuple[str, str, int], list[Any]] = field(default_factory=dict)
    unsound: dict[str, list[Any]] = field(default_factory=dict)
    names: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    starts: "array[int]" = field(default_factory=_numbers)
    sizes: "array[int]" = field(default_factory=_numbers)
    members: "array[int]" = field(default_factory=_numbers)  # the extension of each
    firsts: "array[int]" = field(default_factory=_numbers)
    keys: "array[int]" = field(default_factory=_numbers)  # the hash of that of each sample
    arrays_at: "array[int]" = field(default_factory=_numbers)
    dims: "array[int]" = field(default_factory=lambda: array("q", [0]))
    shapes: "array[int]" = field(default_factory=_numbers)
    itemsizes: "array[int]" = field(default_factory=_numbers)
    checked: set[str] = field(default_factory=set)  # extensions whose first member was read
    key: str | None = None  # of the current sample

    def add(self, member: tarfile.TarInfo, archive: TarReader) -> None:
        match = _NAME.fullmatch(member.name)
        if not match or _NO_SAMPLE.match(member.name):
            return
        key, extension = match[1], match[2].lower()
        if not member.isreg() or member.issparse():
            self._check_kind(member)
            return
        if key != self.key:
            self._end_sample()
            self.key = key
            self.keys.append(hash(key))
            self.firsts.append(len(self.starts))
        number = self.extensions.setdefault(extension, len(self.extensions))
        if len(self.extensions) > MAX_EXTENSIONS:
            reason = (
                f"its members have more than {MAX_EXTENSIONS} different extensions, all that "
                "follows the first dot of a name; write the keys of samples without dots"
            )
            raise corrupt(self.shard, member.offset, reason)
        if number in self.members[self.firsts[-1] :]:
            raise corrupt(self.shard, member.offset, f"sample `{key}` has two members .{extension}")
        self.names.update(f"{member.name}\n".encode(errors="surrogateescape"))
        self._check(member, extension, archive)
        self.starts.append(member.offset_data)
        self.sizes.append(member.size)
        self.members.append(number)

    def _check_kind(self, member: tarfile.TarInfo) -> None:
        """Refuse a member of a sample that is no file: it would be lost."""
        if member.type in _NO_MEMBER:
            return
        name = _printable(member.name)
        if member.issparse():
            reason = f"member {name} is a sparse file; write the shard without --sparse"
        elif member.islnk() or member.issym():
            reason = (
                f"member {name} is {_NO_FILE[member.type]} to {_printable(member.linkname)}; write "
                "the shard with `tar --dereference --hard-dereference`"
            )
        else:
            kind = _NO_FILE.get(member.type, f"of the type {member.type!r}")
            reason = f"member {name} is {kind}, and no file; leave it out of the shard"
        raise corrupt(self.shard, member.offset, reason)

    def _check_together(self) -> None:
        """Refuse a sample whose members are apart: its parts would be samples."""
        keys = np.array(self.keys, np.int64)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(np.diff(keys[order]) == 0)
        ends = [*self.firsts, len(self.starts)]
        pairs = np.stack((order[same + 1], order[same]), axis=1).tolist()
        for again, first in sorted(pairs):
            parts = [set(self.members[ends[each] : ends[each + 1]]) for each in (first, again)]
            if parts[0].isdisjoint(parts[1]):
                names = list(self.extensions)
                here, there = (names[min(part)] for part in parts)
                reason = (
                    f"the members .{here} and .{there} of one sample are not adjacent, at byte "
                    f"{self.starts[ends[first]]} and here; write the shard with `tar --sort=name`"
                )
                raise corrupt(self.shard, self.starts[ends[again]], reason)

    def finish(self) -> Arrays:
        self._end_sample()
        self._check_together()
        meta = {
            "extensions": list(self.extensions),
            "npy": self.headers,
            "names": self.names.hexdigest(),
            "kinds": [[sorted(extensions), *first] for extensions, first in self.kinds.items()],
            "arrays": [[*kind, *first] for kind, first in self.arrays.items()],
            "unsound": self.unsound,
        }
        text = json.dumps(meta).encode()
        if len(text) > MAX_META_BYTES:
            reason = (
                f"its samples have {len(self.kinds)} different sets of extensions, far more than "
                "one dataset can have"
            )
            raise corrupt(self.shard, 0, reason)
        return {
            "meta": np.frombuffer(text, np.uint8),
            "start": np.array(self.starts, np.int64),
            "size": np.array(self.sizes, np.int64),
            "extension": np.array(self.members, np.int32),
            "first": np.array([*self.firsts, len(self.starts)], np.int64),
            "array": np.array(self.arrays_at, np.int64),
            "dim": np.array(self.dims, np.int64),
            "shape": np.array(self.shapes, np.int64),
            "itemsize": np.array(self.itemsizes, np.int64),
        }

    def _end_sample(self) -> None:
        """Note which extensions the sample had, once all of its members are there."""
        if self.key is not None:
            first = self.firsts[-1]
            kind = frozenset(self.members[first:])
            example = [len(self.firsts) - 1, self.starts[first], _printable(self.key)]
            self.kinds.setdefault(kind, example)

    def _check(self, member: tarfile.TarInfo, extension: str, archive: TarReader) -> None:
        """Read a member as far as its codec demands, and note it if it cannot be served."""
        codec, name = codec_of(extension), _printable(member.name)
        is_first = extension not in self.checked
        self.checked.add(extension)
        try:
            if codec == "npy":
                self._add_array(member, extension, archive)
            elif codec == "integer":
                parse_integer(archive.open(member).read(MAX_NUMBER_CHARS + 1))
            elif codec in _CHECKS and is_first and member.size <= _MAX_CHECKED_BYTES:
                _CHECKS[codec](archive.open(member).read(member.size))
        except ValueError as error:
            separator = " " if isinstance(error, _WrongSize) else ": "
            reason = f"member {name}{separator}{error}"
            self.unsound.setdefault(extension, [member.offset_data, reason])

    def _add_array(self, member: tarfile.TarInfo, extension: str, archive: TarReader) -> None:
        header = read_npy_header(archive.open(member).read)
        if header.num_bytes + math.prod(header.shape) * header.dtype.itemsize != member.size:
            raise _WrongSize(
                f"has {member.size} bytes, its header declares an array of shape "
                f"{list(header.shape)}"
            )
        self.headers.setdefault(extension, {"dtype": header.dtype.str, "shape": list(header.shape)})
        kind = extension, header.dtype.newbyteorder("<").str, len(header.shape)
        self.arrays.setdefault(kind, [member.offset_data, _printable(self.key or "")])
        self.arrays_at.append(len(self.starts))
        self.shapes.extend(header.shape)
        self.dims.append(len(self.shapes))
        self.itemsizes.append(header.dtype.itemsize)


def _is_gzip(file: BinaryIO) -> bool:
    """Whether the file is gzip, as far as it can be read again."""
    if not file.seekable():
        return False
    file.seek(0)
    return file.read(2) == _GZIP


def _printable(name: str) -> str:
    """A name for messages."""
    return ascii(name)[1:-1][:200] if not name.isprintable() else name[:200]
