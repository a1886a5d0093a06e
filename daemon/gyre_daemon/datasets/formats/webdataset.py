"""The format `webdataset`: tar archives in which successive members with one key make a sample.

A field is named after the extension of its members. `jpg;png` takes whichever of the two a sample
has, `jpg` before `png`. Its name is then `jpg`, or `image` if it is written `image=jpg;png`.

All arrays of a field have one type and one number of dims. If they have one shape, they are
stacked. If they differ in their first dim alone, a batch has their rows one after the other, and
its offsets count rows. If they differ in other dims, it has all elements one after the other, its
offsets count elements, and the tensor `NAME.shape` has the shape of each.

Archives are read strictly, in one pass over their headers. Damage is an error, never an early end
of the archive. Python's `tarfile` takes a damaged header in the middle of an archive for its end,
goes backwards if a size is negative, and accepts extended headers of any length.

The scan follows the conventions of the WebDataset library: members that follow each other and have
one key make a sample, and one whose name begins with `__...__` belongs to none. Unlike the library
it also passes over hidden files (`._0001.txt`) and over names that end with a dot. It refuses
members that the library loses or tears apart: links and other members that are no files, and
samples whose members are apart. It reads every number and every npy header, since these decide
whether the shards make one dataset, and the first text and JSON of a shard.
"""

import contextlib
import difflib
import errno
import hashlib
import io
import itertools
import json
import math
import re
import tarfile
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, BinaryIO, NoReturn, Self

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    MAX_JSON_BYTES,
    SHAPE_SUFFIX,
    TAKEN,
    Arrays,
    CodecName,
    DamagedSample,
    FieldSpec,
    Scan,
    array_of,
    corrupt,
    is_servable,
    json_of,
    media_type_of,
    presence_of,
    require,
)
from gyre_daemon.datasets.formats.chunk_index import num_samples
from gyre_daemon.datasets.formats.npy import (
    MAX_ARRAY_BYTES,
    MAX_DIMS,
    is_number_type,
    read_npy_header,
)
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.datasets.formats.values import (
    MAX_NUMBER_CHARS,
    check_json,
    check_text,
    parse_integer,
)
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.storage.shard import Shard

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
        """Read the first header; a ValueError says if it is no archive."""
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
        while True:
            with _damage_is_a_value_error():
                member = self._archive.next()
            # The archive would keep every header that it has seen: gigabytes for a large shard.
            self._archive.members = []  # type: ignore[attr-defined]
            if member is None:
                break
            yield member
        with _damage_is_a_value_error():
            while rest := self._archive.fileobj.read(_READ_BYTES):
                if rest.count(0) != len(rest):
                    raise ValueError(
                        "there is more after its end mark; join archives with `tar --concatenate`"
                    )

    def read(self, member: tarfile.TarInfo, num_bytes: int) -> bytes:
        """The next bytes of the member that was yielded last, up to its end."""
        file, stop = self._archive.fileobj, member.offset_data + member.size
        with _damage_is_a_value_error():
            begin = max(file.tell(), member.offset_data)
            file.seek(begin)
            data: bytes = file.read(max(min(num_bytes, stop - begin), 0))
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
MAX_EXTENSIONS = 1000


def codec_of(extension: str) -> CodecName:
    """How a member is stored, by the last part of its extension; unknown ones are plain bytes."""
    return _CODECS.get(extension.rpartition(".")[2], "bytes")


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
        file.seek(0)
        if file.read(len(_GZIP)) == _GZIP:
            reason = f"it is no sound tar archive: it is compressed; call it {shard}.gz"
        raise corrupt(shard, offset, reason) from error
    return builder.finish()


class _WrongSize(ValueError):
    """A member's size contradicts its npy header."""


class _IndexBuilder:
    """Collects the members of one shard; see `scan_tar` for the results.

    The numbers of an extension end with the last sample that has it.
    """

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self.extensions: dict[str, int] = {}
        self.headers: dict[str, Any] = {}
        self.kinds: dict[frozenset[int], list[Any]] = {}
        self.arrays: dict[str, list[Any]] = {}
        self.unsound: dict[str, list[Any]] = {}
        self.names = hashlib.blake2b(digest_size=16)
        # arrays of int64, as lists would take five times the memory
        self.starts: list[array[int]] = []  # of each extension
        self.sizes: list[array[int]] = []
        self.shapes: dict[str, array[int]] = {}
        self.begins, self.keys = array("q"), array("q")  # first byte and hash of key of each sample
        self.checked: set[str] = set()  # extensions whose first member was read
        self.key: str | None = None  # of the current sample
        self.kind: list[int] = []  # its extensions

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
            self.starts.append(array("q"))
            self.sizes.append(array("q"))
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
        if len(text) > MAX_JSON_BYTES:
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
                parse_integer(archive.read(member, MAX_NUMBER_CHARS + 1))
            elif codec in _CHECKS and is_first and member.size <= _MAX_CHECKED_BYTES:
                _CHECKS[codec](archive.read(member, member.size))
        except ValueError as error:
            separator = " " if isinstance(error, _WrongSize) else ": "
            reason = f"member {name}{separator}{error}"
            self.unsound.setdefault(extension, [member.offset_data, reason])

    def _add_array(self, member: tarfile.TarInfo, extension: str, archive: TarReader) -> None:
        header = read_npy_header(partial(archive.read, member))
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
        flat = self.shapes.setdefault(extension, array("q"))
        flat.extend([0] * ((len(self.begins) - 1) * num_dims - len(flat)))
        flat.extend(header.shape)


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
    """See `Scan.check`: refuse arrays that `scan_tar` cannot have returned."""
    meta = json_of(scan, "meta", _META, "its meta data is damaged")
    names = meta.extensions
    require(
        len(names) <= MAX_EXTENSIONS and len(set(names)) == len(names) and all(names),
        "its extensions are none",
    )
    start, size, shape = (array_of(scan, name, np.int64, 2) for name in ("start", "size", "shape"))
    require(
        start.shape == size.shape and start.shape[1] == len(meta.extensions),
        "its members are not complete",
    )
    require(len(shape) == len(size), "its arrays are not complete")
    if len(size):
        _check_members(start, size, file_bytes)
    _check_arrays(meta, size, shape)


def _check_members(start: Int64Array, size: Int64Array, file_bytes: int) -> None:
    """Refuse members outside the shard, in other members' bytes or out of sequence."""
    smallest, most = size.min(), max(start.max(), size.max())
    require(smallest >= -1, "it has a sample without members")
    # numbers above would overflow when they are added
    require(start.min() >= _BLOCK_BYTES and most <= file_bytes, "it points outside the shard")
    stop = start + np.maximum(size, 0)
    if smallest >= 0 and (start.ravel()[1:] > stop.ravel()[:-1]).all():  # as most tars are
        require(stop[-1, -1] <= file_bytes, "it points outside the shard")
        return
    has = size >= 0
    require(has.any(axis=1).all(), "it has a sample without members")
    require(stop.max() <= file_bytes, "it points outside the shard")
    first = np.where(has, start, file_bytes).min(axis=1)
    require((first[1:] > first[:-1]).all(), "its samples are not in sequence")
    begins, ends = start[has], stop[has]
    order = begins.argsort(kind="stable")
    require((begins[order[1:]] >= ends[order[:-1]]).all(), "it points twice to the same bytes")


def _check_arrays(meta: _Meta, size: Int64Array, shape: Int64Array) -> None:
    """Every sound extension of arrays has shapes, and each array fits into its member."""
    names = [name for name in meta.extensions if codec_of(name) == "npy"]
    require(set(meta.arrays) <= set(names), "its arrays are none")
    require(set(names) <= set(meta.arrays) | set(meta.unsound), "its arrays are not complete")
    num_dims = [array[1] for array in meta.arrays.values()]
    require(
        all(count <= MAX_DIMS for count in num_dims) and sum(num_dims) == shape.shape[1],
        "its shapes do not divide into arrays",
    )
    if not meta.arrays:
        return
    require(not ((shape < 0) | (shape > MAX_ARRAY_BYTES)).any(), "its shapes are none")
    begin = 0
    for name, (dtype, count, *_) in meta.arrays.items():
        require(is_number_type(dtype), "it has an array of an unknown type")
        its = size[:, meta.extensions.index(name)]
        # in floats, as the product of forged sizes overflows
        num_bytes = shape[:, begin : begin + count].astype(np.float64).prod(axis=1)
        is_larger = num_bytes * np.dtype(dtype).itemsize > its
        require(
            name in meta.unsound or not is_larger[its >= 0].any(),
            "its arrays are larger than their members",
        )
        begin += count


_NAMES_ARE_TAKEN = f"{TAKEN}; name the other `fields` to serve, or rename it: `NAME=EXTENSION`"


@dataclass(frozen=True, slots=True)
class TarField:
    """A field to serve, which samples may lack if it is optional."""

    name: str
    extensions: tuple[str, ...]  # of the members that may hold it, the preferred one first
    is_optional: bool

    @property
    def codec(self) -> CodecName:
        """How it is stored; all of its extensions are stored in the same way."""
        return codec_of(self.extensions[0])

    @property
    def members(self) -> str:
        """Its extensions, for messages."""
        return " or ".join(f".{extension}" for extension in self.extensions)


@dataclass(frozen=True, slots=True)
class TarShard:
    """A shard's name and scan; see `scan_tar` for the arrays and for `meta`."""

    name: str
    scan: Arrays
    meta: Mapping[str, Any]

    @property
    def num_samples(self) -> int:
        """How many samples the shard has."""
        return num_samples(self.scan)


def parse_fields(texts: Sequence[str], optional: Sequence[str]) -> tuple[TarField, ...]:
    """The fields that a configuration names, if a batch can have them."""
    parsed = []
    for text in texts:
        name, equals, rest = text.partition("=")
        extensions = tuple(part.strip() for part in (rest if equals else text).split(";"))
        name = name.strip() if equals else extensions[0]
        parsed.append(TarField(name, extensions, name in optional))
    fields = tuple(parsed)
    names = [field.name for field in fields]
    for field in fields:
        if not is_servable(field.name) or not all(field.extensions):
            raise ConfigError(
                f"a webdataset cannot serve a field `{field.name}`: {_NAMES_ARE_TAKEN}"
            )
        if len({codec_of(extension) for extension in field.extensions}) > 1:
            raise ConfigError(
                f"field `{field.name}` cannot be {field.members}: they are stored in different ways"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"fields of a webdataset names one twice: {', '.join(names)}")
    for name in optional:
        if fields and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"they are {', '.join(names)}"
            raise ConfigError(
                f"optional of a webdataset has `{name}`, which is none of its fields; {hint}"
            )
    return fields


def all_fields(shards: Sequence[TarShard], optional: Sequence[str]) -> tuple[TarField, ...]:
    """A field for every extension that any sample has, in order of appearance.

    Optional fields that no sample has come last.
    """
    found: dict[str, None] = {}
    for shard in shards:
        for extension in shard.meta["extensions"]:
            if not is_servable(extension):
                reason = f"it has members .{ascii(extension)[1:-1]}: {_NAMES_ARE_TAKEN}"
                raise corrupt(shard.name, int(shard.scan["start"][0].min()), reason)
            found[extension] = None
    names = dict.fromkeys([*found, *optional])
    return tuple(TarField(name, (name,), name in optional) for name in names)


def _check_field(shard: TarShard, field: TarField, *, is_tolerant: bool) -> None:
    """Check that all members of a field can be served, and no sample lacks a required one."""
    extensions, kinds = shard.meta["extensions"], shard.meta["kinds"]
    unsound = [its for name in field.extensions if (its := shard.meta["unsound"].get(name))]
    # the type and shape of a field of arrays are known only if every member has them
    if unsound and (not is_tolerant or field.codec == "npy"):
        offset, reason = unsound[0]
        raise corrupt(shard.name, offset, reason, field=field.name)
    numbers = {extensions.index(name) for name in field.extensions if name in extensions}
    lacking = [kind for kind in kinds if numbers.isdisjoint(kind[0])]
    if not lacking or field.is_optional or is_tolerant:
        return
    _, _, offset, key = min(lacking, key=lambda kind: int(kind[1]))
    reason = (
        f"sample `{key}` has no member {field.members}; name the fields that all samples have "
        f'(`fields`), or those that some may lack (`optional = ["{field.name}"]`)'
    )
    if all(len(kind[0]) == 1 for kind in kinds) and len(extensions) > 1:
        reason = (
            f"sample `{key}` has no member {field.members}: every sample has one member. Those "
            "of a sample have one name up to its first dot, folders included, and follow each "
            "other; name them so and write the shard with `tar --sort=name`"
        )
    raise corrupt(shard.name, offset, reason, field=field.name, key=key)


def locate_fields(
    shards: Sequence[TarShard], fields: Sequence[TarField]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The places of F fields in the N samples of some shards.

    Returns:
        Three int64 [N, F]: first byte; size; and the number of the extension of the member that has
        the field. Where a sample lacks it, its own first byte, 0 and -1.
    """
    shape = sum(each.num_samples for each in shards), len(fields)
    start, size, member = (np.full(shape, value, np.int64) for value in (0, 0, -1))
    begin = 0
    for extensions, alike in itertools.groupby(shards, lambda each: each.meta["extensions"]):
        scans = [each.scan for each in alike]
        starts, sizes = (np.concatenate([its[name] for its in scans]) for name in ("start", "size"))
        here = slice(begin, begin := begin + len(starts))
        start[here] = starts.min(axis=1, keepdims=True)
        for column, field in enumerate(fields):
            for extension in reversed(field.extensions):
                if extension in extensions:
                    number = extensions.index(extension)
                    has = sizes[:, number] >= 0
                    start[here, column][has] = starts[has, number]
                    size[here, column][has] = sizes[has, number]
                    member[here, column][has] = number
    return start, size, member


@dataclass(frozen=True, slots=True)
class ArrayField:
    """A field whose samples are npy arrays."""

    spec: FieldSpec
    lengths: Int64Array | None  # [N], bytes of each array; None if all have the same
    shape: FieldSpec | None  # the indexed field of the shapes, if the batch needs them
    shapes: Int64Array  # [N, dims]; zeros for a sample without an array


def array_field(
    field: TarField, shards: Sequence[TarShard], members: Sequence[Int64Array]
) -> ArrayField:
    """Decide how the arrays of all shards are served; `members` has a column of each.

    Raises:
        CorruptSample: they differ in type or in their number of dims; names the first that does.
        ConfigError: there are no arrays, so their type is not known.
    """
    dtype, num_dims = _common_type(field, shards)
    shapes = np.concatenate(
        [_shapes(each, its, num_dims) for each, its in zip(shards, members, strict=True)]
    )
    present = np.concatenate(members) >= 0
    first = shapes[np.argmax(present)]
    differs = (shapes != first)[present].any(axis=0)
    if not differs.any():
        spec = FieldSpec(field.name, dtype, tuple(first.tolist()), ragged=False, codec="npy")
        return ArrayField(spec, None, None, shapes)
    lengths = np.where(present, shapes.prod(axis=1) * dtype.itemsize, 0)
    if not differs[1:].any() and first[1:].all():
        spec = FieldSpec(field.name, dtype, tuple(first[1:].tolist()), ragged=True, codec="npy")
        return ArrayField(spec, lengths, None, shapes)
    spec = FieldSpec(field.name, dtype, (), ragged=True, codec="npy")
    name = field.name + SHAPE_SUFFIX
    shape = FieldSpec(name, _INT64, (num_dims,), ragged=False, codec="indexed")
    return ArrayField(spec, lengths, shape, shapes)


def _common_type(field: TarField, shards: Sequence[TarShard]) -> tuple[np.dtype[np.generic], int]:
    """The little-endian type and the number of dims of all arrays."""
    first: tuple[str, int, str] | None = None
    for shard in shards:
        arrays = shard.meta["arrays"]
        for extension in field.extensions:
            if extension not in arrays:
                continue
            dtype, num_dims, offset, key = arrays[extension]
            if first is None:
                first = dtype, num_dims, f"sample `{key}` of shard {shard.name}"
            if (dtype, num_dims) != first[:2]:
                reason = (
                    f"sample `{key}` has as its {field.name} an array of {num_dims} dims of type "
                    f"{dtype}, and {first[2]} has one of {first[1]} dims of type {first[0]}; a "
                    "field's arrays must have one type and one number of dims"
                )
                raise corrupt(shard.name, offset, reason, field=field.name, key=key)
    if first is None:
        raise ConfigError(
            f"no shard has a member {field.members}, so the type of the field `{field.name}` is "
            "not known"
        )
    return np.dtype(first[0]), first[1]


def _shapes(shard: TarShard, member: Int64Array, num_dims: int) -> Int64Array:
    """Int64 [n, dims], zeros for a sample without an array."""
    shapes = np.zeros((shard.num_samples, num_dims), np.int64)
    begin = 0
    for extension, (_, count, *_) in shard.meta["arrays"].items():
        if count == num_dims:
            some = member == shard.meta["extensions"].index(extension)
            shapes[some] = shard.scan["shape"][some, begin : begin + count]
        begin += count
    return shapes


_INT64, _UINT8 = np.dtype("<i8"), np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class WebdatasetOptions:
    """The keys of a `webdataset` dataset.

    Attributes:
        fields: extensions to serve, such as `txt`, `jpg;png` or `image=jpg;png`; empty for all that
            any sample has.
        optional: names of fields that samples may lack.
    """

    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse fields that no batch can have."""
        parse_fields(self.fields, self.optional)


class WebdatasetFormat:
    """A `Format` that scans the headers of each archive once."""

    pattern = "*.{tar,tar.gz,tgz}"
    unpacks_gzip = True
    inspection = Scan("webdataset/5", scan_tar, num_samples, check_scan, skips=True)

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: the magic of a tar header."""
        return head[257:262] == b"ustar"

    def __init__(self, options: WebdatasetOptions) -> None:
        self._options = options

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleTable:
        return self._assemble(shards, inspected, is_tolerant=False)[0]

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleTable, Sequence[DamagedSample]]:
        """See `TolerantFormat`: the samples that lack a member.

        Members that contradict their extension are found when all samples are checked.
        """
        return self._assemble(shards, inspected, is_tolerant=True)

    def _assemble(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays], *, is_tolerant: bool
    ) -> tuple[SampleTable, Sequence[DamagedSample]]:
        every = [
            TarShard(shard.name, scan, msgspec.json.decode(scan["meta"].tobytes()))
            for shard, scan in zip(shards, inspected, strict=True)
        ]
        full = [each for each in every if each.num_samples]
        options = self._options
        fields: Sequence[TarField] = ()
        if full:
            fields = parse_fields(options.fields, options.optional) or all_fields(
                full, options.optional
            )
        for each, its in itertools.product(full, fields):
            _check_field(each, its, is_tolerant=is_tolerant)
        start, size, member = locate_fields(full, fields)
        ends = np.cumsum([each.num_samples for each in full])[:-1]
        arrays = {
            number: array_field(field, full, np.split(member[:, number], ends))
            for number, field in enumerate(fields)
            if field.codec == "npy"
        }
        stored = [
            arrays[number].spec if number in arrays else _field_spec(field)
            for number, field in enumerate(fields)
        ]
        indexed: list[tuple[FieldSpec, npt.NDArray[np.generic]]] = [
            (presence_of(field.name), member[:, number] >= 0)
            for number, field in enumerate(fields)
            if field.is_optional
        ]
        indexed += [(each.shape, each.shapes) for each in arrays.values() if each.shape]
        damaged = _lacking(every, fields, member) if is_tolerant else []
        index = SampleTable(
            (*stored, *(spec for spec, _ in indexed)),
            [each.num_samples for each in every],
            start,
            size,
            identity=_identity(fields, every),
            lengths={
                number: each.lengths for number, each in arrays.items() if each.lengths is not None
            },
            absent=member < 0 if any(field.is_optional for field in fields) else None,
            indexed=[values for _, values in indexed],
        )
        return index, damaged


def _lacking(
    shards: Sequence[TarShard], fields: Sequence[TarField], member: Int64Array
) -> list[DamagedSample]:
    """The samples that lack a required field: `member`, int64 [N, F], is -1 there."""
    required = [number for number, field in enumerate(fields) if not field.is_optional]
    reasons = [f"the sample has no member {field.members}" for field in fields]
    ends = np.cumsum([each.num_samples for each in shards])
    damaged = []
    for sample in np.flatnonzero((member[:, required] < 0).any(axis=1)).tolist():
        number = int(np.searchsorted(ends, sample, side="right"))
        shard, first = shards[number], int(ends[number]) - shards[number].num_samples
        offset = int(shard.scan["start"][sample - first].min())
        lacks = next(each for each in required if member[sample, each] < 0)
        damaged.append(DamagedSample(number, sample, offset, reasons[lacks]))
    return damaged


def _field_spec(field: TarField) -> FieldSpec:
    """The spec of a field without arrays."""
    if field.codec == "integer":
        return FieldSpec(field.name, _INT64, (), ragged=False, codec="integer")
    media_type = media_type_of(field.extensions) if field.codec == "bytes" else ""
    return FieldSpec(field.name, _UINT8, (), ragged=True, codec=field.codec, media_type=media_type)


def _identity(fields: Sequence[TarField], shards: Sequence[TarShard]) -> bytes:
    """The meaning of the samples: their fields, and the scans' facts about all members of a shard.

    A field of one extension, which all samples must have, is identified by its name alone.
    """
    is_plain = all(field.extensions == (field.name,) and not field.is_optional for field in fields)
    named = [
        field.name if is_plain else [field.name, field.extensions, field.is_optional]
        for field in fields
    ]
    metas = [{name: each.meta[name] for name in ("extensions", "npy", "names")} for each in shards]
    return json.dumps([named, metas]).encode()
