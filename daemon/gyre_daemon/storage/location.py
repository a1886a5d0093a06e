"""What an operator or a client wrote as the place of a dataset, checked before anything connects."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import braceexpand
from fsspec.registry import available_protocols

from gyre_daemon.errors import InvalidRequest

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CREDENTIALS = re.compile(r"//[^/@]*@")
_QUERY = re.compile(r"\?\S+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MAX_CHARS = 4096
_MAX_SHARDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Location:
    """A place of shards.

    Attributes:
        scheme: `file`, `s3`, ... paths: with scheme, except for local files; several where the URI was a brace list. One of
        them may be a glob or a folder. text: as written, credentials redacted.
    """

    scheme: str
    paths: tuple[str, ...]
    text: str


def parse_location(uri: str) -> Location:
    """Check a URI and expand its brace list.

    Raises:
        InvalidRequest: it is empty, too long, has control characters, is chained with `::`, or its scheme is unknown.
    """
    if not uri or len(uri) > _MAX_CHARS:
        raise InvalidRequest(f"a dataset's URI must have 1 to {_MAX_CHARS} characters, but has {len(uri)}")
    if _CONTROL.search(uri):
        raise InvalidRequest("a dataset's URI must not contain control characters")
    if "::" in uri:
        raise InvalidRequest("chained URLs (`::`) are not served; name the location of the shards themselves")
    match = _SCHEME.match(uri)
    scheme = match[1].lower() if match else "file"
    if scheme not in available_protocols():
        raise InvalidRequest(f"unknown scheme `{scheme}://` in a dataset's URI", {"scheme": scheme})
    if scheme in ("file", "local"):
        scheme, uri = "file", uri.removeprefix("file://").removeprefix("local://")
    return Location(scheme, _expand(uri), redact(uri))


def redact(text: str) -> str:
    """The text without credentials before a host and without query strings, where signatures travel."""
    return _QUERY.sub("?...", _CREDENTIALS.sub("//***@", text))


def relative_names(paths: list[str]) -> list[str]:
    """The paths below the deepest folder that holds all of them."""
    split = [(urlsplit(path).path if "://" in path else path).split("/") for path in paths]
    depth = 0
    while all(len(parts) > depth + 1 and parts[depth] == split[0][depth] for parts in split):
        depth += 1
    return ["/".join(parts[depth:]) for parts in split]


def _expand(uri: str) -> tuple[str, ...]:
    """All texts of a brace list such as `shard-{000..127}.tar`, in its order."""
    try:
        expanded = []
        for path in braceexpand.braceexpand(uri):
            expanded.append(path)
            if len(expanded) > _MAX_SHARDS:
                raise InvalidRequest(f"a dataset's URI names more than {_MAX_SHARDS} shards")
    except ValueError as error:
        raise InvalidRequest(f"unbalanced braces in the URI {redact(uri)}") from error
    return tuple(expanded)
