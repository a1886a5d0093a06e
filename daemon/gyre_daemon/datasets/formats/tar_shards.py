"""Reads tar archives strictly, and indexes one tar shard in one pass over its headers.

Damage is an error, never an early end of the archive. Python's `tarfile` takes a damaged header in
the middle of an archive for its end, goes backwards if a size is negative, and accepts extended
headers of any length.

The scan follows the conventions of the WebDataset library: members that follow each other and have
one key make a sample, and one whose name begins with `__...__` belongs to none. Unlike the library
it also passes over hidden files (`._0001.txt`) and over names that end with a dot. It refuses
members that the library loses or tears apart: links and other members that are no files, and
samples whose members are apart. It reads every number and every npy header, since these decide
whether the shards make one dataset, and the first text and JSON of a shard.
"""

import contextlib
import errno
import hashlib
import io
import json
import math
import re
import tarfile
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, NoReturn, Self

import msgspec
import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, CodecName, array_of, corrupt
from gyre_daemon.datasets.formats.npy import (
    MAX_ARRAY_BYTES,
    MAX_DIMS,
    is_number_type,
    read_npy_header,
)
from gyre_daemon.datasets.formats.values import (
    MAX_NUMBER_CHARS,
    check_json,
    check_text,
    parse_integer,
)
from gyre_daemon.order.permutation import Int64Array

_EXTENDED_TYPES = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
# Limits on the claims of a damaged header. An extended header is read into memory; names and times
# take a few hundred bytes.
_MAX_EXTENDED_BYTES = 1 << 16
_MAX_MEMBER_BYTES = 1 << 40
_MAX_GLOBAL_KEYS = 100
_READ_BYTES = 1 << 20
_PLAIN_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE)


class TarReader:
    """The members of an archive and where their bytes are, in one pass and bounded memory."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the first header.

        Raises:
            ValueError: it is no archive.
        """
        with _damage_is_a_value_error():
            self._archive = tarfile.open(  # noqa: SIM115
                fileobj=file, mode="r:", tarinfo=_StrictHeader
            )

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """The members in their order: files, and whatever else there is.

        Raises:
            ValueError: the archive is damaged or truncated, has a sparse file, or continues after
                its end mark.
        """
        while member := self._next():
            yield member
        with _damage_is_a_value_error():
            while rest := self._archive.fileobj.read(_READ_BYTES):
                if rest.count(0) != len(rest):
                    raise ValueError(
                        "there is more after its end mark; join archives with `tar --concatenate`"
                    )

    def open(self, member: tarfile.TarInfo) -> "MemberReader":
        """A reader of the member that was yielded last."""
        return MemberReader(self._archive.fileobj, member)

    def _next(self) -> tarfile.TarInfo | None:
        with _damage_is_a_value_error():
            member: tarfile.TarInfo | None = self._archive.next()
        # The archive would keep every header that it has seen: gigabytes for a large shard.
        self._archive.members = []  # type: ignore[attr-defined]
        return member


class MemberReader:
    """Reads a member's bytes from the first to the last, or as many as a truncated archive has."""

    def __init__(self, file: Any, member: tarfile.TarInfo) -> None:
        with _damage_is_a_value_error():
            file.seek(member.offset_data)
        self._file = file
        self._num_left = member.size

    def read(self, num_bytes: int) -> bytes:
        """The next bytes, up to `num_bytes`."""
        with _damage_is_a_value_error():
            data: bytes = self._file.read(min(num_bytes, self._num_left))
        self._num_left -= len(data)
        return data


class _StrictHeader(tarfile.TarInfo):
    """A header whose sizes make sense."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if plain := plain_header(bytes(buf)):
            member = cls(plain[0])
            member.size = plain[1]
            return member
        member = super().frombuf(buf, encoding, errors)
        is_extended = member.type in _EXTENDED_TYPES
        _check_size(member, _MAX_EXTENDED_BYTES if is_extended else _MAX_MEMBER_BYTES)
        return member

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        if len(archive.pax_headers) > _MAX_GLOBAL_KEYS:  # each member gets a copy
            raise tarfile.ReadError(f"its global headers have more than {_MAX_GLOBAL_KEYS} keys")
        try:
            member = super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros: the end mark
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error
        _check_size(member, _MAX_MEMBER_BYTES)
        end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if member.isreg() and not member.issparse() and archive.offset != end:
            raise tarfile.ReadError(
                f"the sizes of member {member.name!r:.200} contradict each other"
            )
        return member

    # A sparse file's map has any length and may be in the member itself. No field is a sparse
    # file, so none is read.
    def _refuse_sparse(self, *_: Any) -> NoReturn:
        raise tarfile.ReadError(
            f"member {self.name!r:.200} is a sparse file; write the shard without --sparse"
        )

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def plain_header(header: bytes) -> tuple[str, int] | None:
    """The name and size of a regular file; None of any other header, and of a damaged one.

    Nearly all headers are such, and `tarfile` takes five times as long for one: it reads eight
    unneeded numbers, and adds up the bytes in Python.
    """
    is_plain = header[156:157] in _PLAIN_TYPES and header[345:346] == b"\0"
    if len(header) != tarfile.BLOCKSIZE or not is_plain or not header.isascii():
        return None
    name = header[:100].partition(b"\0")[0]
    # ASCII adds up to less than the modulus of this checksum, whose low half is then the sum
    total = (zlib.adler32(header) & 0xFFFF) - 1
    try:
        stored = int(header[148:156].strip(b"\0 "), 8)
        size = int(header[124:136].strip(b"\0 "), 8)
    except ValueError:
        return None
    is_sound = total - sum(header[148:156]) + 8 * ord(" ") == stored
    is_file = bool(name) and name[-1:] != b"/" and 0 <= size <= _MAX_MEMBER_BYTES
    return (name.decode(), size) if is_sound and is_file else None


def _check_size(member: tarfile.TarInfo, max_bytes: int) -> None:
    if not 0 <= member.size <= max_bytes:
        raise tarfile.ReadError(f"member {member.name!r:.200} has the size {member.size}")


@contextlib.contextmanager
def _damage_is_a_value_error() -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # the kernel's word where no file can be that long
            raise
        raise ValueError("a member's size leads beyond the end of any file") from error


SCAN_VERSION = "webdataset/5"

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
MAX_EXTENSIONS, MAX_META_BYTES = 1000, 4 << 20


def codec_of(extension: str) -> CodecName:
    """How a member is stored, by the last part of its extension; unknown ones are plain bytes."""
    return _CODECS.get(extension.rpartition(".")[2], "bytes")


def num_samples(scan: Arrays) -> int:
    """How many samples a scanned shard has."""
    return len(scan["size"])


def scan_tar(shard: str, file: BinaryIO) -> Arrays:
    """The index of one shard of N samples, whose members have E extensions.

    Returns:
        start, size: int64 [N, E], first byte and length of each member; -1 as the size, and the
            first byte of the sample, where a sample lacks it.
        shape: int64 [N, D], the shapes of the npy arrays, those of one extension after the other.
        meta: JSON of `extensions`, their names; `npy`, the first header of each extension; `names`,
            a hash of all names; `kinds`, for every set of extensions that a sample has,
            [extensions, first sample, offset, key]; `arrays`, for every extension of arrays,
            [type, dims, offset, key] of the first; `unsound`, for every extension with a bad
            member, its first [offset, reason].

    Raises:
        CorruptSample: it is no sound archive; with shard and offset.
    """
    builder = _IndexBuilder(shard)
    try:
        archive = TarReader(file)
        for member in archive:
            builder.add(member, archive)
    except ValueError as error:
        # it may have been told to go on behind the end
        offset = min(file.tell(), file.seek(0, io.SEEK_END))
        reason = f"it is no sound tar archive: {error}"
        if _is_gzip(file):
            reason = f"it is no sound tar archive: it is compressed; call it {shard}.gz"
        raise corrupt(shard, offset, reason) from error
    return builder.finish()


def _numbers() -> "array[int]":
    """Numbers of 64 bits; a list would take five times the memory."""
    return array("q")


class _WrongSize(ValueError):
    """A member's size contradicts its npy header."""


@dataclass(slots=True)
class _IndexBuilder:
    """Collects the members of one shard; see `scan_tar` for the results.

    The lists of numbers of an extension end with the last sample that has it.
    """

    shard: str
    extensions: dict[str, int] = field(default_factory=dict)
    headers: dict[str, Any] = field(default_factory=dict)
    kinds: dict[frozenset[int], list[Any]] = field(default_factory=dict)
    arrays: dict[str, list[Any]] = field(default_factory=dict)
    unsound: dict[str, list[Any]] = field(default_factory=dict)
    names: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    starts: "list[array[int]]" = field(default_factory=list)  # of each extension
    sizes: "list[array[int]]" = field(default_factory=list)
    shapes: "dict[str, array[int]]" = field(default_factory=dict)
    begins: "array[int]" = field(default_factory=_numbers)  # the first byte of each sample
    keys: "array[int]" = field(default_factory=_numbers)  # the hash of that of each sample
    checked: set[str] = field(default_factory=set)  # extensions whose first member was read
    key: str | None = None  # of the current sample
    kind: list[int] = field(default_factory=list)  # its extensions

    def add(self, member: tarfile.TarInfo, archive: TarReader) -> None:
        match = _NAME.fullmatch(member.name)
        if not match or _NO_SAMPLE.match(member.name):
            return
        # bytes outside of UTF-8 are written as \udcXX, since the names go to JSON
        key, extension = match[1], match[2].lower().encode(errors="backslashreplace").decode()
        if not member.isreg() or member.issparse():
            self._check_kind(member)
            return
        if key != self.key:
            self._end_sample()
            self.key, self.kind = key, []
            self.keys.append(hash(key))
            self.begins.append(member.offset_data)
        number = self.extensions.setdefault(extension, len(self.extensions))
        if len(self.extensions) > MAX_EXTENSIONS:
            reason = (
                f"its members have more than {MAX_EXTENSIONS} different extensions, all that "
                "follows the first dot of a name; write the keys of samples without dots"
            )
            raise corrupt(self.shard, member.offset, reason)
        if number in self.kind:
            raise corrupt(self.shard, member.offset, f"sample `{key}` has two members .{extension}")
        self.names.update(f"{member.name}\n".encode(errors="surrogateescape"))
        self._check(member, extension, archive)
        self.kind.append(number)
        if number == len(self.starts):
            self.starts.append(_numbers())
            self.sizes.append(_numbers())
        starts, sizes = self.starts[number], self.sizes[number]
        if num_lacking := len(self.begins) - 1 - len(starts):
            starts.extend([-1] * num_lacking)
            sizes.extend([-1] * num_lacking)
        starts.append(member.offset_data)
        sizes.append(member.size)

    def _check_kind(self, member: tarfile.TarInfo) -> None:
        """Refuse a link, pipe or device among the members of a sample: it would be lost."""
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

    def _check_together(self, size: Int64Array) -> None:
        """Refuse a sample whose members are apart: its parts would be samples."""
        keys = np.array(self.keys, np.int64)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(np.diff(keys[order]) == 0)
        pairs = np.stack((order[same + 1], order[same]), axis=1).tolist()
        for again, first in sorted(pairs):
            parts = [np.flatnonzero(size[each] >= 0).tolist() for each in (first, again)]
            if set(parts[0]).isdisjoint(parts[1]):
                names = list(self.extensions)
                here, there = (names[part[0]] for part in parts)
                reason = (
                    f"the members .{here} and .{there} of one sample are not adjacent, at byte "
                    f"{self.begins[first]} and here; write the shard with `tar --sort=name`"
                )
                raise corrupt(self.shard, self.begins[again], reason)

    def finish(self) -> Arrays:
        self._end_sample()
        begins = np.array(self.begins, np.int64)
        start = np.repeat(begins[:, None], len(self.extensions), axis=1)
        size = np.full_like(start, -1)
        for number, (starts, sizes) in enumerate(zip(self.starts, self.sizes, strict=True)):
            its = np.array(sizes, np.int64)
            rows = np.flatnonzero(its >= 0)
            start[rows, number] = np.array(starts, np.int64)[rows]
            size[rows, number] = its[rows]
        self._check_together(size)
        tables = [np.empty((len(begins), 0), np.int64)]
        for extension, (_, num_dims, *_) in self.arrays.items():
            flat = self.shapes[extension]
            flat.extend([0] * (len(begins) * num_dims - len(flat)))
            tables.append(np.array(flat, np.int64).reshape(len(begins), num_dims))
        meta = {
            "extensions": list(self.extensions),
            "npy": self.headers,
            "names": self.names.hexdigest(),
            "kinds": [[sorted(extensions), *first] for extensions, first in self.kinds.items()],
            "arrays": self.arrays,
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
            "start": start,
            "size": size,
            "shape": np.concatenate(tables, axis=1),
        }

    def _end_sample(self) -> None:
        """Note which extensions the sample had, once all of its members are there."""
        if self.key is not None:
            example = [len(self.begins) - 1, self.begins[-1], _printable(self.key)]
            self.kinds.setdefault(frozenset(self.kind), example)

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
        dtype, num_dims = header.dtype.newbyteorder("<").str, len(header.shape)
        self.headers.setdefault(extension, {"dtype": header.dtype.str, "shape": list(header.shape)})
        first = self.arrays.setdefault(
            extension, [dtype, num_dims, member.offset_data, _printable(self.key or "")]
        )
        if first[:2] != [dtype, num_dims]:
            raise ValueError(
                f"it is an array of {num_dims} dims of type {dtype}, and that of sample "
                f"`{first[3]}` is one of {first[1]} dims of type {first[0]}; a field's arrays must "
                "have one type and one number of dims"
            )
        flat = self.shapes.setdefault(extension, _numbers())
        flat.extend([0] * ((len(self.begins) - 1) * num_dims - len(flat)))
        flat.extend(header.shape)


def _is_gzip(file: BinaryIO) -> bool:
    file.seek(0)
    return file.read(2) == _GZIP


def _printable(name: str) -> str:
    """A name for messages."""
    return ascii(name)[1:-1][:200] if not name.isprintable() else name[:200]


_BLOCK_BYTES = 512
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _FirstHeader(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Count]


class _Meta(msgspec.Struct, forbid_unknown_fields=True):
    """The meta data that `scan_tar` returns."""

    extensions: list[str]
    npy: dict[str, _FirstHeader]
    names: str
    kinds: list[tuple[list[_Count], _Count, _Count, str]]
    arrays: dict[str, tuple[str, _Count, _Count, str]]
    unsound: dict[str, tuple[_Count, str]]


_META = msgspec.json.Decoder(_Meta)  # made by one thread; see `sidecars`


def check_scan(scan: Arrays, file_bytes: int) -> None:
    """Refuse arrays that `scan_tar` cannot have returned for a shard of `file_bytes`.

    Raises:
        ValueError: names the problem.
    """
    meta = _read_meta(scan)
    start, size, shape = (array_of(scan, name, np.int64, 2) for name in ("start", "size", "shape"))
    _require(
        start.shape == size.shape and start.shape[1] == len(meta.extensions),
        "its members are not complete",
    )
    _require(len(shape) == len(size), "its arrays are not complete")
    if len(size):
        _check_members(start, size, file_bytes)
    _check_arrays(meta, size, shape)


def _check_members(start: Int64Array, size: Int64Array, file_bytes: int) -> None:
    """Refuse members outside the shard, in other members' bytes or out of sequence."""
    smallest, most = size.min(), max(start.max(), size.max())
    _require(smallest >= -1, "it has a sample without members")
    # numbers above would overflow when they are added
    _require(start.min() >= _BLOCK_BYTES and most <= file_bytes, "it points outside the shard")
    stop = start + np.maximum(size, 0)
    if smallest >= 0 and (start.ravel()[1:] > stop.ravel()[:-1]).all():  # as most tars are
        _require(stop[-1, -1] <= file_bytes, "it points outside the shard")
        return
    has = size >= 0
    _require(has.any(axis=1).all(), "it has a sample without members")
    _require(stop.max() <= file_bytes, "it points outside the shard")
    first = np.where(has, start, file_bytes).min(axis=1)
    _require((first[1:] > first[:-1]).all(), "its samples are not in sequence")
    begins, ends = start[has], stop[has]
    order = begins.argsort(kind="stable")
    _require((begins[order[1:]] >= ends[order[:-1]]).all(), "it points twice to the same bytes")


def _read_meta(scan: Arrays) -> _Meta:
    text = array_of(scan, "meta", np.uint8)
    _require(len(text) <= MAX_META_BYTES, f"its meta data has {len(text)} bytes")
    try:
        meta = _META.decode(text.tobytes())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError("its meta data is damaged") from error
    names = meta.extensions
    _require(
        len(names) <= MAX_EXTENSIONS and len(set(names)) == len(names) and all(names),
        "its extensions are none",
    )
    return meta


def _check_arrays(meta: _Meta, size: Int64Array, shape: Int64Array) -> None:
    """Every sound extension of arrays has shapes, and each array fits into its member."""
    names = [name for name in meta.extensions if codec_of(name) == "npy"]
    _require(set(meta.arrays) <= set(names), "its arrays are none")
    _require(set(names) <= set(meta.arrays) | set(meta.unsound), "its arrays are not complete")
    num_dims = [array[1] for array in meta.arrays.values()]
    _require(
        all(count <= MAX_DIMS for count in num_dims) and sum(num_dims) == shape.shape[1],
        "its shapes do not divide into arrays",
    )
    if not meta.arrays:
        return
    _require(not ((shape < 0) | (shape > MAX_ARRAY_BYTES)).any(), "its shapes are none")
    begin = 0
    for name, (dtype, count, *_) in meta.arrays.items():
        _require(is_number_type(dtype), "it has an array of an unknown type")
        its = size[:, meta.extensions.index(name)]
        # in floats, as the product of forged sizes overflows
        num_bytes = shape[:, begin : begin + count].astype(np.float64).prod(axis=1)
        is_larger = num_bytes * np.dtype(dtype).itemsize > its
        _require(
            name in meta.unsound or not is_larger[its >= 0].any(),
            "its arrays are larger than their members",
        )
        begin += count


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
