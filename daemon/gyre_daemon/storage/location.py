"""The URI of a dataset, checked before anything connects, and which files of a folder are shards.

Brace lists such as `shard-{000..127}.tar` are expanded as bash and the WebDataset library do,
within bounded time and memory. A folder with a training set and a held-out set is two datasets, and
is refused.
"""

import fnmatch
import functools
import hashlib
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import filterfalse
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from gyre_protos.text import counted, printable

from gyre_daemon.errors import InvalidRequest, ShardMissing
from gyre_daemon.runtime.events import log_event

_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.-?(\d+))?", re.ASCII)
_TOKEN = re.compile(r"\\.|[{},]", re.DOTALL)
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_MAX_DEPTH = 16
_MAGIC = re.compile(r"[*?\[]")

Named = TypeVar("Named")

_MAX_PATTERNS = 64
_MAX_NAMED = 5  # files in a line of the log
# Files next to shards that hold no samples: hidden ones, those of systems that write tables
# (`_SUCCESS`, `_metadata`), checksums, indexes, and notes of libraries and people.
_BESIDE = (
    "{.*,_*,*.crc,*.idx,*.gyre-*,*.md,LICENSE*,README*,[Rr]eadme.*,*md5sum*,*sha[0-9]*sum*,MD5SUM*,"
    "SHA[0-9]*SUM*,checksums.*,index.json,state.json,dataset_dict.json,dataset_info.json,"
    "dataset_infos.json}"
)

_WORD = re.compile(r"[A-Za-z]+")
_EXTENSION = re.compile(r"(\.\w+)?\.(gz|zst)$|\.\w+$")
_SETS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val", "eval": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def expand(text: str, max_texts: int) -> list[str]:
    """All texts that a brace list stands for, in its order; a backslash escapes a character.

    Raises:
        ValueError: unbalanced braces, braces nested too deeply, or more than `max_texts` texts.
    """
    _check_depth(text)
    begins: list[int] = []  # of open groups
    choices: list[list[list[str]]] = [[[""]]]  # the same of the whole text, and of each group

    def append(texts: list[str]) -> None:
        before = choices[-1][-1]
        if sum(map(len, choices[-1])) + len(before) * (len(texts) - 1) > max_texts:
            raise ValueError(f"it names more than {max_texts} shards")
        choices[-1][-1] = [each + text for each in before for text in texts]

    end = 0
    for token in _TOKEN.finditer(text):
        append([text[end : token.start()]])
        end = token.end()
        if token[0] == "{":
            begins.append(end)
            choices.append([[""]])
        elif token[0] == "}":
            group, its = text[begins.pop() : token.start()], choices.pop()
            if len(its) > 1:
                append([text for texts in its for text in texts])
            else:
                append(_range(group, max_texts) or [f"{{{text}}}" for text in its[0]])
        elif token[0] == "," and begins:
            choices[-1].append([""])
        else:
            append([token[0][-1]])
    append([text[end:]])
    return choices[0][0]


def _check_depth(text: str) -> None:
    depth, deepest = 0, 0
    for token in _TOKEN.finditer(text):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        deepest = max(depth, deepest)
        if depth < 0:
            break
    if depth:
        raise ValueError("its braces are not balanced")
    if deepest > _MAX_DEPTH:
        raise ValueError(f"its braces are nested more than {_MAX_DEPTH} deep")


def _range(group: str, max_texts: int) -> list[str] | None:
    """The numbers or letters of a range, in either direction; None if the group is none."""
    bounds = _RANGE.fullmatch(group)
    if not bounds or (bounds[1] in _LETTERS) != (bounds[2] in _LETTERS):
        return None
    is_letters, step = bounds[1] in _LETTERS, int(bounds[3] or 1) or 1
    begin, end = map(_LETTERS.index if is_letters else int, bounds.group(1, 2))
    if abs(end - begin) // step >= max_texts:
        raise ValueError(f"it names more than {max_texts} shards")
    numbers = range(begin, end + 1, step) if begin < end else range(begin, end - 1, -step)
    if is_letters:
        return [_LETTERS[number] for number in numbers]
    digits = [bound.lstrip("-") for bound in bounds.group(1, 2)]
    is_padded = any(each.startswith("0") and each != "0" for each in digits)
    width = max(map(len, bounds.group(1, 2))) if is_padded else 0
    return [f"{number:0{width}d}" for number in numbers]


@functools.lru_cache(64)  # asked for each file of a folder
def patterns_of(pattern: str) -> tuple[str, ...]:
    """The patterns of a brace list."""
    return tuple(expand(pattern, _MAX_PATTERNS))


def checked_glob(path: str) -> str:
    """The glob of a path, which means the same with every version of Python.

    Where it ends with `**` it names all files below a folder, as it does in object storages.

    Raises:
        ValueError: `**` is only a part of a path component, as in `a**b`.
    """
    components = path.split("/")
    if any("**" in each and each != "**" for each in components):
        raise ValueError("`**` can only be an entire path component")
    return f"{path}/*" if components[-1] == "**" else path


def matches_any(name: str, pattern: str) -> bool:
    """Whether a file name matches any of the patterns."""
    return bool(_matcher(pattern)(name))


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The file names that match any of the patterns."""
    return list(filter(_matcher(pattern), names))


@functools.lru_cache(64)
def _matcher(pattern: str) -> Callable[[str], object]:
    patterns = patterns_of(pattern)
    ends = tuple(each[1:] for each in patterns)
    if all(each.startswith("*") for each in patterns) and not any(map(_MAGIC.search, ends)):
        return lambda name: name.endswith(ends)  # compiling an expression takes 1 ms
    return re.compile("|".join(map(fnmatch.translate, patterns))).match


def is_beside(name: str) -> bool:
    """Whether a file of this name is next to shards and is none."""
    return matches_any(name, _BESIDE)


def possible_shards(names: Iterable[str]) -> list[str]:
    """The names without files next to shards; see `is_beside`."""
    return list(filterfalse(_matcher(_BESIDE), names))


def without_beside(
    folder: str, files: Sequence[Named], pattern: str, name_of: Callable[[Named], str]
) -> list[Named]:
    """The files of a folder without those that are next to shards; see `is_beside`.

    Hidden ones are left out silently, and one line of the log names others. All files stay if all
    of them are wanted.
    """
    if pattern == "*":
        return list(files)
    left = set(matching(map(name_of, files), _BESIDE))
    if shown := sorted(name for name in left if not name.startswith(".")):
        facts = {"path": folder, "num_files": len(shown), "names": ", ".join(shown[:_MAX_NAMED])}
        log_event("files next to the shards are passed over", facts, logging.WARNING)
    return [file for file in files if name_of(file) not in left]


def check_one_set(folder: str, names: Sequence[str], pattern: str) -> None:
    """Refuse to serve a folder's files as one dataset if their names say that they are several.

    Args:
        folder: as written; shown in the error.
        names: of its files.
        pattern: which files of a folder count, such as `*.tar`.

    Raises:
        InvalidRequest: they are several; shows a pattern for each.
    """
    by_word: dict[str, list[str]] = {}
    for name in names:
        if word := _split_word(name):
            by_word.setdefault(word, []).append(name)
    if len({_SETS[word.lower()] for word in by_word}) < 2:
        return
    root, pattern = folder.rstrip("/"), _narrowest(pattern, names)
    found = " and ".join(
        f"{word} ({counted(len(its), 'file')}, such as {its[0]})" for word, its in by_word.items()
    )
    patterns = " or ".join(f"{root}/*{word}{pattern}" for word in by_word)
    raise InvalidRequest(
        f"the folder {root} holds {found}, which are probably several datasets. Name "
        f"{patterns}, or {root}/{pattern} for all of them."
    )


def no_match(folder: str, pattern: str, names: Sequence[str], below: Sequence[str]) -> ShardMissing:
    """The error for a folder without a matching file, with the pattern that would match one.

    Args:
        folder: as written; shown in the error.
        pattern: which files count.
        names: of the files that it has.
        below: paths of files in its folders, relative to it, some of which may match.
    """
    root, below = folder.rstrip("/"), _visible(below)
    names = _visible(names) or below
    found = [name for name in below if matches_any(name.rpartition("/")[2], pattern)]
    if found:
        files = [name.rpartition("/")[2] for name in found]
        pattern = _of_suffix(files) if pattern == "*" else _narrowest(pattern, files)
        tops = dict.fromkeys(name.partition("/")[0] for name in found)
        sets = {top: _SETS[word.lower()] for top in tops if (word := _split_word(top))}
        if sets:
            is_flat = all(name.count("/") == 1 for name in found)
            below_set, stars = ("", "*") if is_flat else (f"/**/{pattern}", "**")
            first = next((top for top in sets if sets[top] == "train"), next(iter(sets)))
            text = (
                f"no file of {root} matches {pattern}, but it has the folders {', '.join(sets)}: "
                f"name one of them, such as {root}/{first}{below_set}, or {root}/{stars}/{pattern} "
                "for all of them"
            )
        else:
            text = (
                f"no file of {root} itself is a shard, but files in its folders are, such as "
                f"{found[0]}: name {root}/**/{pattern}"
            )
    elif names:
        text = (
            f"no shard at {root}: the folder has no file that matches {pattern}, but "
            f"{counted(len(names), 'other')}, such as {names[0]}; correct `format`, or leave it out"
        )
    else:
        why = "the folder has no file" + ("" if pattern == "*" else f" that matches {pattern}")
        text = f"no shard at {root}: {why}; correct the dataset's URI"
    return ShardMissing(printable(text), {"path": root})


def check_one_tree(folder: str, names: Sequence[str], key: str = "") -> None:
    """Refuse to serve all files below a folder if its subfolders are named like several datasets.

    Args:
        folder: as written; shown in the error.
        names: of its subfolders, or their values.
        key: of partitions, whose folders are named `KEY=VALUE`.

    Raises:
        InvalidRequest: some are named like training sets, and some like held-out sets.
    """
    sets = [name for name in names if name.lower() in _SETS]
    if len({_SETS[name.lower()] for name in sets}) > 1:
        root = folder.rstrip("/")
        sets = [f"{key}={name}" if key else name for name in sets]
        raise InvalidRequest(
            f"the folder {root} holds {' and '.join(sets)}, which are probably several datasets: "
            f"name {' or '.join(f'{root}/{name}' for name in sets)}"
        )


def _narrowest(pattern: str, names: Sequence[str]) -> str:
    """The pattern of a brace list that all names match; the whole list if there is none."""
    return next(
        (each for each in patterns_of(pattern) if all(fnmatchcase(name, each) for name in names)),
        pattern,
    )


def _visible(paths: Sequence[str]) -> list[str]:
    """All but hidden names and metadata, sorted."""
    return sorted(path for path in paths if not re.search(r"(^|/)[._]|\.gyre-", path))


def _of_suffix(names: Sequence[str]) -> str:
    """The pattern of the extension that most names have."""
    extensions = Counter(match[0] for name in names if (match := _EXTENSION.search(name)))
    return f"*{extensions.most_common(1)[0][0]}" if extensions else "*"


def _split_word(name: str) -> str | None:
    """The first word of a name that tells which set it belongs to."""
    return next((word for word in _WORD.findall(name) if word.lower() in _SETS), None)


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
CLASS = "class"  # among the settings of a storage: the file of the class
_ABSENT = "gyre_daemon.absent.Absent"  # where fsspec looks for a class that was not passed
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
        return Location("file", _expand_uri(uri), uri)
    scheme, rest = match[1].lower(), uri[match.end() :]
    _check_url(scheme, rest)
    if scheme in ("file", "local"):
        return Location("file", _expand_uri(rest), uri)
    return Location(scheme, _expand_uri(f"{scheme}://{rest}"), shown_uri(uri))


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
    return Location(scheme, _expand_uri(whole), text)


def allow_scheme(uri: str) -> None:
    """Let datasets have the scheme of a script's file system.

    Raises:
        InvalidRequest: a driver reads this scheme.
    """
    from fsspec.registry import known_implementations  # noqa: PLC0415  # see `_has_driver`

    scheme = uri.partition("://")[0].lower()
    error = f"{scheme}:// is read by a class: pass storage="
    known = known_implementations.setdefault(scheme, {"class": _ABSENT, "err": error})
    if known["class"] != _ABSENT:
        raise InvalidRequest(
            f"storage: {scheme}:// has a driver already. Give the dataset another scheme, such as "
            "my://"
        )


def _has_driver(scheme: str) -> bool:
    # local data are read without fsspec, whose imports are a twentieth of a start
    from fsspec.registry import available_protocols  # noqa: PLC0415

    return scheme in available_protocols()


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
    if scheme in ("file", "local"):
        if not rest.startswith("/"):
            raise InvalidRequest(
                f"a {scheme}:// URI needs an absolute path, such as {scheme}:///data/shards"
            )
        return
    if not _has_driver(scheme):
        raise InvalidRequest(
            f"unknown scheme `{scheme}://` in a dataset's URI: no fsspec driver of that name is "
            "installed where the daemon runs. Install its package there; a driver that a script "
            "registers needs an entry point in the group `fsspec.specs`",
            {"scheme": scheme},
        )
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


def _expand_uri(uri: str) -> tuple[str, ...]:
    """All texts of a brace list such as `shard-{000..127}.tar`, in its order."""
    try:
        return tuple(expand(uri, min(_MAX_SHARDS, _MAX_EXPANDED_CHARS // len(uri))))
    except ValueError as error:
        raise InvalidRequest(f"the URI {redact(uri)} cannot be expanded: {error}") from error
