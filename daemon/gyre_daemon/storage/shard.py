"""A shard: one file of a dataset, as it was listed, and the facts by which a change is noticed.

A remote one has HTTP's validators (RFC 9110, section 8.8), whatever carries them: answers,
listings, and the infos of fsspec drivers, which name them as they like.

The shards of a dataset of single files are arrays: names, sizes and times. There may be ten million
of them. An object for each would take gigabytes; here a file takes 32 bytes and its name.
"""

import bisect
import datetime
import functools
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.errors import CorruptSample

# Names in the infos of drivers; the first one present counts.
_ETAGS = ("e_tag", "ETag", "etag", "eTag")
_VERSIONS = (
    "version", "version_id", "VersionId", "versionId", "generation", "md5Hash", "md5", "ContentMD5",
    "content_md5", "crc32c", "sha256", "checksum",
)  # fmt: skip
_TIMES = (
    "last_modified", "LastModified", "Last-Modified", "lastModified", "mtime", "modified",
    "updated", "modify", "modification_time", "created",
)  # fmt: skip
_NS_PER_S = 1_000_000_000


class Validators(Struct, frozen=True):
    """The known facts of one version of an object; a text is empty where nothing was told.

    Attributes:
        etag: as it was sent, with its quotes.
        version: the number or checksum of a version.
        modified: the time of the last change, in any of the usual forms.
        digest: of the content, where only the listing tells it; never compared.
    """

    etag: str = ""
    version: str = ""
    modified: str = ""
    digest: str = ""

    @classmethod
    def in_info(cls, info: Mapping[str, Any]) -> "Validators":
        """Those of an object as an fsspec driver describes it; ours name them `told`."""
        if isinstance(told := info.get("told"), cls):
            return told
        return cls(*(_first(info, names) for names in (_ETAGS, _VERSIONS, _TIMES)))

    @classmethod
    def decoded(cls, text: bytes) -> "Validators":
        """The inverse of `encoded`."""
        return cls(*text.decode().split("\n")) if text else UNKNOWN

    def encoded(self) -> bytes:
        """One line each."""
        texts = (self.etag, self.version, self.modified, self.digest)
        return "\n".join(texts).encode() if self.text else b""

    def __bool__(self) -> bool:
        """Whether anything is known that answers may tell, too."""
        return bool(self.etag or self.version or self.modified)

    @property
    def text(self) -> str:
        """The strongest, as a `Shard.version`."""
        return self.digest or self.etag or self.version or self.modified

    def joined(self, told: "Validators") -> "Validators":
        """These, completed by others."""
        return Validators(
            self.etag or told.etag, self.version or told.version, self.modified or told.modified
        )


UNKNOWN = Validators()


def is_same(known: Validators, told: Validators) -> bool | None:
    """Whether two statements are about one version of an object; None if they cannot be compared.

    The strongest validator that both have decides: equal etags mean equal bytes, whatever the times
    are. A weak etag promises less, so that the others must agree too.
    """
    if known.etag and told.etag:
        if _bare(known.etag) != _bare(told.etag):
            return False
        if not (known.etag.startswith("W/") or told.etag.startswith("W/")):
            return True
    if known.version and told.version:
        return known.version == told.version
    if known.modified and told.modified:
        before, after = _nanoseconds(known.modified), _nanoseconds(told.modified)
        if before is not None and after is not None:
            return _are_equal_times(before, after)
    return True if known.etag and told.etag else None


def _first(info: Mapping[str, Any], names: tuple[str, ...]) -> str:
    found = next((info[name] for name in names if info.get(name)), "")
    return found.hex() if isinstance(found, bytes) else str(found).replace("\n", " ")


def _bare(etag: str) -> str:
    """An etag without the weak prefix and the quotes, which servers add as they like."""
    return etag.removeprefix("W/").strip('"')


def _are_equal_times(before: int, after: int) -> bool:
    """Whether two times are one; a header counts whole seconds of what a listing tells exactly."""
    if before % _NS_PER_S and after % _NS_PER_S:
        return before == after
    return before // _NS_PER_S == after // _NS_PER_S


@functools.lru_cache(4096)
def _nanoseconds(text: str) -> int | None:
    """Nanoseconds since 1970 of a time as HTTP, ISO 8601 or a file system writes it."""
    try:
        return round(float(text) * 1e6) * 1000
    except (OverflowError, ValueError):
        pass
    from email.utils import parsedate_to_datetime  # noqa: PLC0415  # for objects alone

    for parse in (datetime.datetime.fromisoformat, parsedate_to_datetime):
        try:
            time = parse(text)
        except (TypeError, ValueError, IndexError):
            continue
        if time.tzinfo is None:  # UTC, as in HTTP and fsspec's drivers
            time = time.replace(tzinfo=datetime.UTC)
        since = time - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        return (since.days * 86400 + since.seconds) * _NS_PER_S + since.microseconds * 1000
    return None


@dataclass(frozen=True, slots=True)
class Shard:
    """One file or object of a dataset, as listed when the dataset was opened.

    Attributes:
        name: relative to the dataset's root, so that a mirror elsewhere has the same names.
        size_bytes: the length of the file.
        version: the etag, or a local file's modification and change times in ns; changes whenever
            the shard does.
        digest: of the content, if the storage knows one that is the same for every copy of it;
            otherwise empty.
        validators: what its storage told; answers are compared with it. Unknown for local files.
    """

    name: str
    size_bytes: int
    version: str
    digest: str = ""
    validators: Validators = UNKNOWN

    def place_of(self, offset: int) -> tuple[str, int]:
        """The name of the file that has a byte of the shard, and which byte of that file it is."""
        return self.name, offset


def truncated(name: str, start: int, stop: int, num_bytes: int) -> CorruptSample:
    """The error for a read that ran past the end of a shard."""
    return CorruptSample(
        f"shard {name} is shorter than its index says: only {num_bytes} bytes of [{start}, {stop}) "
        "could be read; restore the shard, or index the dataset again",
        {"shard": name, "offset": start, "reason": "truncated"},
    )


def changed(name: str) -> CorruptSample:
    """The error for a shard that changed after its listing."""
    return CorruptSample(
        f"shard {name} has changed since the dataset was opened; restore it with its times "
        "(`cp -p`), or index the dataset again",
        {"shard": name, "reason": "changed"},
    )


Integers = npt.NDArray[np.int64]
Value = TypeVar("Value")


class Texts(Struct, frozen=True):
    """n byte strings, back to back.

    Attributes:
        data: all of them.
        ends: int64 [n + 1]; string i is `data[ends[i] : ends[i + 1]]`.
    """

    data: bytes
    ends: Integers

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> "Texts":
        """These strings."""
        kept = list(texts)
        return cls.joined([b"".join(kept)], np.array([len(text) for text in kept], np.int64))

    @classmethod
    def joined(cls, pieces: Iterable[bytes], sizes: Integers) -> "Texts":
        """Strings of these sizes, int64 [n], whose bytes come in any pieces."""
        return cls(b"".join(pieces), np.concatenate(([0], np.cumsum(sizes))).astype(np.int64))

    @classmethod
    def merged(cls, columns: "Sequence[Texts]") -> "Texts":
        """The strings of several columns of n, those with one number back to back."""
        if len(columns) == 1:
            return columns[0]
        rows = zip(
            *(map(column.__getitem__, range(len(column))) for column in columns), strict=True
        )
        sizes = np.sum([column.sizes for column in columns], axis=0)
        return cls.joined((text for row in rows for text in row), sizes)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.ends) - 1

    def __getitem__(self, number: int) -> bytes:
        """String `number`."""
        return self.data[self.ends[number] : self.ends[number + 1]]

    @property
    def sizes(self) -> Integers:
        """Int64 [n], in bytes."""
        return np.diff(self.ends)


class FileTable(Struct, frozen=True, dict=True):
    """The n files of a dataset.

    Attributes:
        names: relative to the dataset's root, in UTF-8, in the dataset's order.
        sizes: int64 [n], in bytes.
        validators: of remote files, each `Validators.encoded`. None for local ones.
        stamps: of local files: int64 [n, 2], modification and change times in ns. None for remote
            ones.
    """

    names: Texts
    sizes: Integers
    validators: Texts | None = None
    stamps: Integers | None = None

    def __len__(self) -> int:
        """How many there are."""
        return len(self.sizes)

    def name(self, number: int) -> str:
        """The name of a file."""
        return self.names[number].decode()

    def shard(self, number: int) -> Shard:
        """A file as it was listed."""
        if self.stamps is not None:
            modified_ns, changed_ns = self.stamps[number].tolist()
            return Shard(self.name(number), int(self.sizes[number]), f"{modified_ns}.{changed_ns}")
        told = Validators.decoded(self.validators[number]) if self.validators else UNKNOWN
        return Shard(self.name(number), int(self.sizes[number]), told.text, validators=told)

    def top_folders(self, limit: int = 1000) -> list[str]:
        """The first folders of the paths, at most `limit`, if the files are sorted by name."""
        found: list[str] = []
        number = 0
        while number < len(self) and len(found) < limit:
            folder, slash, _ = self.names[number].partition(b"/")
            if not slash:
                number += 1
                continue
            found.append(folder.decode())
            after = folder + b"0"  # the letter behind the slash
            number = bisect.bisect_left(range(len(self)), after, number, key=self.names.__getitem__)
        return found

    @cached_property
    def version(self) -> str:
        """Changes whenever a file does; empty if a file has no version."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.names.ends, self.sizes, self.stamps):
            digest.update(b"" if array is None else array.tobytes())
        digest.update(self.names.data)
        if self.validators is not None:
            if not self.validators.sizes.all():
                return ""
            for number in range(len(self)):
                digest.update(Validators.decoded(self.validators[number]).text.encode())
        return digest.hexdigest()


class Computed(Sequence[Value]):
    """n values, each computed when it is asked for; an object for each would take too much."""

    def __init__(self, num: int, compute: Callable[[int], Value]) -> None:
        self._num, self._compute = num, compute

    def __len__(self) -> int:
        """How many there are."""
        return self._num

    def __getitem__(self, number: Any) -> Any:
        """Value `number`."""
        return self._compute(number)


class FileShards(Computed[Shard]):
    """The files of a table as shards.

    Attributes:
        table: the files.
    """

    def __init__(self, table: FileTable) -> None:
        super().__init__(len(table), table.shard)
        self.table = table


def sizes_of(shards: Sequence[Shard]) -> Integers:
    """Int64 [n], the sizes of shards in bytes."""
    if isinstance(shards, FileShards):
        return shards.table.sizes
    return np.array([shard.size_bytes for shard in shards], np.int64)


def starts_of(heads: Texts, sizes: Integers) -> Integers:
    """Where files lie if all follow each other, each after its head.

    Args:
        heads: n byte strings.
        sizes: int64 [n], of the files.

    Returns:
        Int64 [n + 1]: where the head of each file begins, and where the last file ends.
    """
    return np.concatenate(([0], np.cumsum(heads.sizes + sizes))).astype(np.int64)


class PositionedFile(io.RawIOBase):
    """A file without one of the operating system: keeps the position; a subclass reads there."""

    def __init__(self, num_bytes: int) -> None:
        """At the beginning of so many bytes."""
        self._num_bytes, self._position = num_bytes, 0

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def seekable(self) -> bool:
        """Whether its position can be set: yes."""
        return True

    def tell(self) -> int:
        """The position of the next byte to read."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, which may be behind the end and is never negative."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position
