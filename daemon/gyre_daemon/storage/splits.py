"""Refuses a folder with a training set and a held-out set, which are two datasets. Pure."""

import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from gyre_protos.text import counted, printable

from gyre_daemon.errors import InvalidRequest, ShardMissing
from gyre_daemon.storage.patterns import matches_any, patterns_of

_WORD = re.compile(r"[A-Za-z]+")
_EXTENSION = re.compile(r"(\.\w+)?\.(gz|zst)$|\.\w+$")
_SETS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val", "eval": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


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
        sets = {top: None for name in found if _split_word(top := name.partition("/")[0])}
        if sets:
            is_flat = all(name.count("/") == 1 for name in found)
            below_set, stars = ("", "*") if is_flat else (f"/**/{pattern}", "**")
            first = next((name for name in sets if _set_of(name) == "train"), next(iter(sets)))
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


def _set_of(name: str) -> str:
    """Which set a name tells; empty for none."""
    return _SETS[word.lower()] if (word := _split_word(name)) else ""


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
