"""Reading tar archives strictly: what is damaged is an error, and never the end of the archive or of the daemon.

Python's tarfile takes a damaged header in the middle of an archive for its end, goes backwards where a size is negative, and
believes extended headers of any length.
"""

import contextlib
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, Self

_EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip
_MAX_EXTENSION_BYTES = 1 << 16
_MAX_MEMBER_BYTES = 1 << 50
_READ_BYTES = 1 << 20


class TarReader:
    """The regular files of an archive, each with where its bytes lie; one pass, in bounded memory."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the first header; seeks where the file can.

        Raises:
            ValueError: it is no archive.
        """
        with _damage_is_a_value_error():
            self._archive = tarfile.open(fileobj=file, mode="r:" if file.seekable() else "r|", tarinfo=_Header)  # noqa: SIM115

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Regular files, sparse ones among them, in their order.

        Raises:
            ValueError: the archive is damaged, truncated, or goes on after its end mark.
        """
        while member := self._next():
            if member.isreg():
                yield member
        with _damage_is_a_value_error():
            while rest := self._archive.fileobj.read(_READ_BYTES):
                if rest.count(0) != len(rest):
                    raise ValueError("there is more after its end mark; join archives with `tar --concatenate`")

    def content(self, member: tarfile.TarInfo) -> "Content":
        """The bytes of the member that was yielded last, from their beginning."""
        return Content(self._archive.fileobj, member)

    def _next(self) -> tarfile.TarInfo | None:
        with _damage_is_a_value_error():
            member = self._archive.next()
        self._archive.members = []  # type: ignore[attr-defined]  # else it keeps every header it has seen, which is gigabytes in a large shard
        return member


class Content:
    """A member's bytes, read from the first to the last; what is behind a truncation is absent."""

    def __init__(self, file: Any, member: tarfile.TarInfo) -> None:
        with _damage_is_a_value_error():
            file.seek(member.offset_data)
        self._file = file
        self._num_left = member.size

    def read(self, num_bytes: int) -> bytes:
        """The next bytes, or as many as there are."""
        with _damage_is_a_value_error():
            data: bytes = self._file.read(min(num_bytes, self._num_left))
        self._num_left -= len(data)
        return data


class _Header(tarfile.TarInfo):
    """A member whose headers make sense."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        _check(member, _MAX_EXTENSION_BYTES if member.type in _EXTENSIONS else _MAX_MEMBER_BYTES)
        return member

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            member = super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros: the end mark
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error
        _check(member, _MAX_MEMBER_BYTES)
        end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if member.isreg() and not member.issparse() and archive.offset != end:
            raise tarfile.ReadError(f"the sizes of member {member.name!r:.200} contradict each other")
        return member


def _check(member: tarfile.TarInfo, max_bytes: int) -> None:
    if not 0 <= member.size <= max_bytes:
        raise tarfile.ReadError(f"member {member.name!r:.200} has the size {member.size}")


@contextlib.contextmanager
def _damage_is_a_value_error() -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
