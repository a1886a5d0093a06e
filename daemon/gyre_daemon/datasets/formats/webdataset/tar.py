"""Reads tar archives strictly: damage is an error, never an early end of the archive.

Python's `tarfile` takes a damaged header in the middle of an archive for its end, goes backwards if
a size is negative, and accepts extended headers of any length.
"""

import contextlib
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn, Self

_EXTENDED_TYPES = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
# Limits on what a damaged header may claim. An extended header is read into memory; names and times
# take a few hundred bytes.
_MAX_EXTENDED_BYTES = 1 << 16
_MAX_MEMBER_BYTES = 1 << 50
_MAX_GLOBAL_KEYS = 100
_READ_BYTES = 1 << 20


class TarReader:
    """The regular files of an archive and where their bytes lie, in one pass and bounded memory."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the first header. The reader seeks if the file can.

        Raises:
            ValueError: it is no archive.
        """
        mode = "r:" if file.seekable() else "r|"
        with _damage_is_a_value_error():
            self._archive = tarfile.open(  # type: ignore[call-overload]  # noqa: SIM115
                fileobj=file, mode=mode, tarinfo=_StrictHeader
            )

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """The regular files in their order.

        Raises:
            ValueError: the archive is damaged or truncated, has a sparse file, or goes on after its
                end mark.
        """
        while member := self._next():
            if member.isreg():
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
        self._archive.members = []
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

    # A sparse file's map has any length and may lie in the member itself. No field is a sparse
    # file, so none is read.
    def _refuse_sparse(self, *_: Any) -> NoReturn:
        raise tarfile.ReadError(
            f"member {self.name!r:.200} is a sparse file; write the shard without --sparse"
        )

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def _check_size(member: tarfile.TarInfo, max_bytes: int) -> None:
    if not 0 <= member.size <= max_bytes:
        raise tarfile.ReadError(f"member {member.name!r:.200} has the size {member.size}")


@contextlib.contextmanager
def _damage_is_a_value_error() -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
