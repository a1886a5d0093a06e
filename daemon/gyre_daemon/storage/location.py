"""The URI of a dataset, checked before anything connects."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from fsspec.registry import available_protocols
from gyre_protos.text import printable

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.storage.patterns import expand

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://")
# Drivers of fsspec that read through another one, or hold the data in the URI.
_LAYERS = (
    "async_wrapper", "asynclocal", "asyncwrapper", "blockcache", "cached", "data", "dir",
    "filecache", "generic", "libarchive", "reference", "simplecache", "tar", "zip",
)  # fmt: skip
# Chains: these would keep what they read, which the node cache does for all remote storages.
_CACHES = re.compile(r"(?:(?:blockcache|cached|filecache|simplecache)(?:://)?::)+")
# These read the members of an archive.
ARCHIVES = ("tar", "zip")
_MEMBER = re.compile(rf"({'|'.join(ARCHIVES)})(?:://(.*?))?::(.+)")
_IPV6_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\](?=[:/]|$)")
_PASSWORD = re.compile(r"[^/]*:[^/]*@")
_CREDENTIALS = re.compile(r"//[^/\s]*@")
_QUERY = re.compile(r"\?\S+")
# Settings that say whose files a driver reads, and from where.
_SERVER_KEYS = ("base_url", "host", "org", "port", "repo", "share", "user", "username")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# Bounds of one URI: an index of more shards, or expanded texts, would not fit into memory.
_MAX_CHARS = 4096
_MAX_SHARDS = 1_000_000
_MAX_EXPANDED_CHARS = 1 << 28


@dataclass(frozen=True, slots=True)
class Location:
    """Where the shards of a dataset lie.

    Attributes:
        scheme: such as `file` or `s3`, in lower case.
        paths: with scheme, except for local files; several if the URI was a brace list. Each may be
            a glob or a folder.
        text: the URI as written, without credentials.
    """

    scheme: str
    paths: tuple[str, ...]
    text: str


def parse_location(uri: str) -> Location:
    """Check a URI and expand its brace list.

    Raises:
        InvalidRequest: it is empty, too long or unprintable, is chained or piped, has an unknown
            scheme or a password, leaves its root, or names too many shards. The message never
            repeats a password.
    """
    if not uri or len(uri) > _MAX_CHARS:
        raise InvalidRequest(
            f"a dataset's URI must have 1 to {_MAX_CHARS} characters, but has {len(uri)}"
        )
    if _UNPRINTABLE.search(uri):
        raise InvalidRequest(
            "a dataset's URI must not contain control characters or broken Unicode"
        )
    plain = _without_caches(uri)
    if member := _MEMBER.fullmatch(plain):
        return _in_archive(member[1], member[2] or "", member[3], shown_uri(uri))
    match = _SCHEME.match(plain)
    host = match and _IPV6_HOST.match(plain, match.end())
    if "::" in (plain[host.end() :] if host else plain) or plain.startswith("pipe:"):
        raise InvalidRequest(
            "chained URLs (`::`) and pipes are not served, but for `zip://MEMBERS::URL` and "
            "`tar://MEMBERS::URL`; name the location of the shards"
        )
    uri = plain
    if not match:
        return Location("file", _expand(uri), uri)
    scheme, rest = match[1].lower(), uri[match.end() :]
    _check_url(scheme, rest)
    if scheme in ("file", "local"):
        return Location("file", _expand(rest), uri)
    return Location(scheme, _expand(f"{scheme}://{rest}"), shown_uri(uri))


def shown_uri(uri: str) -> str:
    """A URI as `Location.text` has it. Its brace list is not expanded, so this takes no time."""
    uri = _without_caches(uri)
    match = _SCHEME.match(uri)
    is_local = "::" not in uri and (not match or match[1].lower() in ("file", "local"))
    return uri if is_local else redact(uri)


def archive_of(path: str) -> Location:
    """The archive of a path whose scheme is one of `ARCHIVES`."""
    archive = unquote(path.partition("://")[2].partition("/")[0])
    scheme = archive.partition("://")[0] if "://" in archive else "file"
    return Location(scheme, (archive,), redact(archive))


def _without_caches(uri: str) -> str:
    caches = _CACHES.match(uri)
    return uri[caches.end() :] if caches else uri


def _in_archive(scheme: str, members: str, url: str, text: str) -> Location:
    """The members of one archive; its URL is the first component of their paths, quoted."""
    archive = parse_location(url)
    path = archive.paths[0]
    name = path.rpartition("://")[2].partition("/")[2]  # an IPv6 host has brackets
    if len(archive.paths) > 1 or any(letter in name for letter in "*?[") or path.endswith("/"):
        raise InvalidRequest(f"the archive of {text} must be one file, without a pattern")
    if archive.scheme in ARCHIVES:
        raise InvalidRequest(f"{text} is an archive in an archive; unpack the outer one")
    if archive.scheme == "file" and not path.startswith("/"):
        raise InvalidRequest(f"the archive of {text} needs an absolute path, or a URL")
    if ".." in members.split("/"):
        raise InvalidRequest("a dataset's URI must not leave its root with `..`")
    whole = f"{scheme}://{quote(path, safe='')}/{members.lstrip('/')}"
    return Location(scheme, _expand(whole), text)


def _check_url(scheme: str, rest: str) -> None:
    """Refuse URLs that no driver reads, or that the wrong one would."""
    if scheme == "memory":
        raise InvalidRequest(
            "memory:// is the memory of one process, and the daemon is another one. Write the "
            "files to a folder, and name that",
            {"scheme": scheme},
        )
    if scheme in _LAYERS:
        raise InvalidRequest(
            f"{scheme}:// reads what other URLs name, and is not served by itself. Name the files, "
            "or the members of an archive: `zip://MEMBERS::URL`, `tar://MEMBERS::URL`",
            {"scheme": scheme},
        )
    if scheme not in available_protocols():
        raise InvalidRequest(
            f"unknown scheme `{scheme}://` in a dataset's URI: no fsspec driver of that name is "
            "installed where the daemon runs. Install its package there; a driver that a script "
            "registers needs an entry point in the group `fsspec.specs`",
            {"scheme": scheme},
        )
    if scheme in ("file", "local"):
        if not rest.startswith("/"):
            raise InvalidRequest(
                f"a {scheme}:// URI needs an absolute path, such as {scheme}:///data/shards"
            )
        return
    if _PASSWORD.match(rest):
        raise InvalidRequest(
            "a dataset's URI must not contain a password; put credentials into the dataset's "
            "`storage` table"
        )
    if ".." in rest.split("/"):
        raise InvalidRequest("a dataset's URI must not leave its root with `..`")
    if scheme in ("http", "https") and any(letter in rest for letter in "?#"):
        raise InvalidRequest(
            "an http dataset's URI must not have a query or a fragment; signed URLs are not served"
        )
    if scheme in ("http", "https") and not _has_host(rest):
        raise InvalidRequest(
            "an http dataset's URI needs a host, and its port must be 1 to 65535, as in "
            "http://127.0.0.1:8080/a.tar or http://[::1]:8080/a.tar"
        )


def _has_host(rest: str) -> bool:
    try:
        parts = urlsplit(f"//{rest}")
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def endpoints_in(settings: Mapping[str, Any]) -> list[str]:
    """The storage's URLs in a driver's settings: every kind of `endpoint`, and `base_url`."""
    return [
        str(value)
        for key, value in settings.items()
        if "endpoint" in key.lower() or key.lower().endswith("base_url")
    ]


def endpoint_name(scheme: str, settings: Mapping[str, Any], path: str) -> str:
    """The name of the bucket or server that serves a path, which all its datasets share.

    Args:
        scheme: of the path.
        settings: of the driver.
        path: with its scheme.
    """
    if scheme in ARCHIVES:
        return f"{scheme}::{archive_of(path).text}"
    if host := settings.get("host"):
        port = settings.get("port")
        return redact(f"{scheme}://{host}:{port}" if port else f"{scheme}://{host}")
    where = next((each.rstrip("/") for each in endpoints_in(settings)), f"{scheme}:/")
    return redact(f"{where}/{path.partition('://')[2].partition('/')[0]}")


def data_owner(uri: str, settings: Mapping[str, Any]) -> str:
    """A digest that tells the files of one user or server from those of another at the same URI.

    Empty where the URI says it all. A user in the URI counts, which `Location.text` hides.
    """
    settings_of_server = sorted(f"{key}={settings[key]}" for key in _SERVER_KEYS if key in settings)
    told = [*_CREDENTIALS.findall(uri), *settings_of_server]
    return hashlib.blake2b("\n".join(told).encode(), digest_size=8).hexdigest() if told else ""


def redact(text: str) -> str:
    """The text without credentials before a host, and without query strings with signatures."""
    return _QUERY.sub("?...", _CREDENTIALS.sub("//***@", text))


def encoded_name(name: str) -> bytes:
    """The name of a file in UTF-8.

    Raises:
        InvalidRequest: a file system has it in other bytes.
    """
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        shown = printable(name.encode(errors="surrogateescape").decode(errors="backslashreplace"))
        raise InvalidRequest(f"the file name {shown} is not UTF-8; rename the file") from error


def relative_names(paths: list[str]) -> list[str]:
    """The paths relative to the deepest folder that contains all of them.

    Raises:
        InvalidRequest: a name is not UTF-8, so that no message and no index can have it.
    """
    for path in paths:
        encoded_name(path)
    split = [
        path.partition("://")[2].split("/") if "://" in path else path.split("/") for path in paths
    ]
    depth = 0
    while all(len(parts) > depth + 1 and parts[depth] == split[0][depth] for parts in split):
        depth += 1
    return ["/".join(parts[depth:]) for parts in split]


def _expand(uri: str) -> tuple[str, ...]:
    """All texts of a brace list such as `shard-{000..127}.tar`, in its order."""
    try:
        return tuple(expand(uri, min(_MAX_SHARDS, _MAX_EXPANDED_CHARS // len(uri))))
    except ValueError as error:
        raise InvalidRequest(f"the URI {redact(uri)} cannot be expanded: {error}") from error
