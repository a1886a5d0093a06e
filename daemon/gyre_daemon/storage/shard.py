"""A shard: one file of a dataset, as it was listed, and the facts by which a change is noticed.

A remote one has HTTP's validators (RFC 9110, section 8.8), whatever carries them: answers,
listings, and the infos of fsspec drivers, which name them as they like.
"""

import datetime
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

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


class Told(Protocol):
    """A source of validators: a listing, or an answer."""

    @property
    def etag(self) -> str:
        """As it was sent, with its quotes."""

    @property
    def version(self) -> str:
        """The number or checksum of a version."""

    @property
    def modified(self) -> str:
        """The time of the last change, in any of the usual forms."""


@dataclass(frozen=True, slots=True)
class Validators:
    """The known facts of one version of an object; a text is empty where nothing was told.

    Attributes:
        etag: see `Told`.
        version: see `Told`.
        modified: see `Told`.
        digest: of the content, where only the listing tells it; never compared.
    """

    etag: str = ""
    version: str = ""
    modified: str = ""
    digest: str = ""

    @classmethod
    def of(cls, told: Told) -> "Validators":
        """Those of an answer."""
        return cls(told.etag, told.version, told.modified)

    @classmethod
    def in_info(cls, info: Mapping[str, Any]) -> "Validators":
        """Those of an object as an fsspec driver describes it."""
        if digest := info.get("digest"):
            return cls(digest=digest)
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

    def joined(self, told: Told) -> "Validators":
        """These, completed by others."""
        return Validators(
            self.etag or told.etag, self.version or told.version, self.modified or told.modified
        )


UNKNOWN = Validators()


def is_same(known: Told, told: Told) -> bool | None:
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
    """The error for a shard that has changed since it was listed."""
    return CorruptSample(
        f"shard {name} has changed since the dataset was opened; restore it with its times "
        "(`cp -p`), or index the dataset again",
        {"shard": name, "reason": "changed"},
    )
