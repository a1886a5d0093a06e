"""Reads tar archives strictly: damage is an error, never an early end of the archive.

Python's `tarfile` takes a damaged header in the middle of an archive for its end, goes backwards if
a size is negative, and accepts extended headers of any length.
"""

import contextlib
import errno
import io
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn, Self

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
        """Read the first header. The reader seeks if the file can.

        Raises:
            ValueError: it is no archive.
        """
        passed = file if file.seekable() else io.BufferedReader(_Forward(file), _READ_BYTES)
        with _damage_is_a_value_error():
            self._archive = tarfile.open(  # noqa: SIM115
                fileobj=passed, mode="r:", tarinfo=_StrictHeader
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


class _Forward(io.RawIOBase):
    """A file that cannot seek: skipped bytes are read and dropped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        while self._position < target:
            skipped = len(self._file.read(min(target - self._position, _READ_BYTES)))
            if not skipped:
                break
            self._position += skipped
        if whence == io.SEEK_END or self._position > target:
            raise tarfile.StreamError("it is read once, from its beginning to its end")
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


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
