"""A folder with a training set and a held-out set in it is two datasets, unless a pattern says otherwise. Pure."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from gyre_daemon.errors import InvalidRequest, ShardMissing
from gyre_daemon.storage.patterns import patterns_of

_WORD = re.compile(r"[A-Za-z]+")
_SETS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val", "eval": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def check_one_set(folder: str, names: Sequence[str], pattern: str) -> None:
    """Refuse to serve a folder's files as one set if their names say that they are several.

    Args:
        folder: as written, to be shown.
        names: of its files.
        pattern: which files of a folder count, such as `*.tar`.

    Raises:
        InvalidRequest: they are; shows the pattern of each.
    """
    by_word: dict[str, list[str]] = {}
    for name in names:
        if word := _split_word(name):
            by_word.setdefault(word, []).append(name)
    if len({_SETS[word.lower()] for word in by_word}) < 2:
        return
    root, pattern = folder.rstrip("/"), _narrowest(pattern, names)
    found = " and ".join(f"{word} ({len(its)} files, such as {its[0]})" for word, its in by_word.items())
    patterns = " or ".join(f"{root}/*{word}{pattern}" for word in by_word)
    raise InvalidRequest(
        f"the folder {root} holds {found}, which are hardly one dataset: name {patterns}, or {root}/{pattern} for all of them"
    )


def check_subfolders(folder: str, names: Sequence[str], pattern: str) -> None:
    """Say which of a folder's own folders may be meant, where it has no file that counts.

    Args:
        folder: as written, to be shown.
        names: of its folders.
        pattern: which files count.

    Raises:
        ShardMissing: some are named as training and held-out sets are.
    """
    root, sets = folder.rstrip("/"), [name for name in sorted(names) if _split_word(name)]
    if sets:
        raise ShardMissing(
            f"no file of {root} matches {pattern}, but it has the folders {', '.join(sets)}: name one of them, such as "
            f"{root}/{sets[0]}, or {root}/*/{pattern} for all of them",
            {"path": root},
        )


def _narrowest(pattern: str, names: Sequence[str]) -> str:
    """Of a brace list of patterns, the one that all names match; all of it where there is none."""
    return next((each for each in patterns_of(pattern) if all(fnmatchcase(name, each) for name in names)), pattern)


def _split_word(name: str) -> str | None:
    """The first word of a name that says which set it belongs to."""
    return next((word for word in _WORD.findall(name) if word.lower() in _SETS), None)
