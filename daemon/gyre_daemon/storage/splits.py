"""Refuses a folder with a training set and a held-out set, which are two datasets. Pure."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from gyre_common.counts import counted

from gyre_daemon.errors import InvalidRequest, ShardMissing
from gyre_daemon.storage.patterns import patterns_of

_WORD = re.compile(r"[A-Za-z]+")
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
        f"the folder {root} holds {found}, which are probably several datasets: name "
        f"{patterns}, or {root}/{pattern} for all of them"
    )


def check_subfolders(folder: str, names: Sequence[str], pattern: str) -> None:
    """Suggest the subfolders of a folder without any matching file.

    Args:
        folder: as written; shown in the error.
        names: of its subfolders.
        pattern: which files count.

    Raises:
        ShardMissing: some subfolders are named like training and held-out sets.
    """
    root, sets = folder.rstrip("/"), [name for name in sorted(names) if _split_word(name)]
    if sets:
        raise ShardMissing(
            f"no file of {root} matches {pattern}, but it has the folders {', '.join(sets)}: name "
            f"one of them, such as {root}/{sets[0]}, or {root}/*/{pattern} for all of them",
            {"path": root},
        )


def check_one_tree(folder: str, names: Sequence[str]) -> None:
    """Refuse to serve all files below a folder if its subfolders are named like several datasets.

    Args:
        folder: as written; shown in the error.
        names: of its subfolders.

    Raises:
        InvalidRequest: some are named like training sets, and some like held-out sets.
    """
    sets = [name for name in names if name.lower() in _SETS]
    if len({_SETS[name.lower()] for name in sets}) > 1:
        root = folder.rstrip("/")
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


def _split_word(name: str) -> str | None:
    """The first word of a name that tells which set it belongs to."""
    return next((word for word in _WORD.findall(name) if word.lower() in _SETS), None)
