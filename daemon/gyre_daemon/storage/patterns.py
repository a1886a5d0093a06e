"""Which files of a folder are shards: brace lists, patterns, and folders with several datasets.

Brace lists such as `shard-{000..127}.tar` are expanded as bash and the WebDataset library do,
within bounded time and memory. A folder with a training set and a held-out set is two datasets, and
is refused.
"""

import fnmatch
import functools
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TypeVar

from gyre_protos.text import counted, printable

from gyre_daemon.errors import InvalidRequest, ShardMissing
from gyre_daemon.runtime.events import log_event

_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.-?(\d+))?", re.ASCII)
_TOKEN = re.compile(r"\\.|[{},]", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_MAX_DEPTH = 16

Named = TypeVar("Named")

_MAX_PATTERNS = 64
_MAX_NAMED = 5  # files in a line of the log
# Files that are next to shards and hold no samples: hidden ones, those of systems that write tables
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
    return [_ESCAPED.sub(r"\1", expanded) for expanded in _expand(text, max_texts, 0)]


def _expand(text: str, max_texts: int, depth: int) -> list[str]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"its braces are nested more than {_MAX_DEPTH} deep")
    texts = [""]
    for begin, end in _pieces(text):
        piece = text[begin:end]
        choices = _choices(piece[1:-1], max_texts, depth) if piece.startswith("{") else [piece]
        if len(texts) * len(choices) > max_texts:
            raise ValueError(f"it names more than {max_texts} shards")
        texts = [before + choice for before in texts for choice in choices]
    return texts


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """The begins and ends of literal texts and outermost groups, in order."""
    edges, depth = {0, len(text)}, 0
    for token in _TOKEN.finditer(text):
        if token[0] == "{" and depth == 0:
            edges.add(token.start())
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if token[0] == "}" and depth == 0:
            edges.add(token.end())
        if depth < 0:
            break
    if depth:
        raise ValueError("its braces are not balanced")
    return pairwise(sorted(edges))


def _choices(group: str, max_texts: int, depth: int) -> list[str]:
    """The texts of a group: a range, a list, or itself if it is neither."""
    if bounds := _RANGE.fullmatch(group):
        texts = _range(bounds[1], bounds[2], int(bounds[3] or 1) or 1, max_texts)
        if texts is not None:
            return texts
    commas, inner = [-1], 0
    for token in _TOKEN.finditer(group):
        inner += {"{": 1, "}": -1}.get(token[0], 0)
        commas += [token.start()] if token[0] == "," and inner == 0 else []
    if len(commas) == 1:
        return ["{" + choice + "}" for choice in _expand(group, max_texts, depth + 1)]
    parts = [group[begin + 1 : end] for begin, end in pairwise([*commas, len(group)])]
    return [choice for part in parts for choice in _expand(part, max_texts, depth + 1)]


def _range(first: str, last: str, step: int, max_texts: int) -> list[str] | None:
    """The numbers or letters from the first to the last, in either direction; None for a mix."""
    letters = first in _LETTERS
    if letters != (last in _LETTERS):
        return None
    begin, end = (
        (_LETTERS.index(first), _LETTERS.index(last)) if letters else (int(first), int(last))
    )
    if abs(end - begin) // step >= max_texts:
        raise ValueError(f"it names more than {max_texts} shards")
    numbers = range(begin, end + 1, step) if begin < end else range(begin, end - 1, -step)
    if letters:
        return [_LETTERS[number] for number in numbers]
    is_padded = any(
        bound.lstrip("-").startswith("0") and bound.lstrip("-") != "0" for bound in (first, last)
    )
    width = max(len(first), len(last)) if is_padded else 0
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
    return _matcher(pattern).match(name) is not None


@functools.lru_cache(64)
def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns_of(pattern))))


def is_beside(name: str) -> bool:
    """Whether a file of this name is next to shards and is none."""
    return matches_any(name, _BESIDE)


def without_beside(
    folder: str, files: Sequence[Named], pattern: str, name_of: Callable[[Named], str]
) -> list[Named]:
    """The files of a folder without those that are next to shards; see `is_beside`.

    Hidden ones are left out silently, and one line of the log names others. All files stay if all
    of them are wanted.
    """
    if pattern == "*":
        return list(files)
    left = [name for name in map(name_of, files) if is_beside(name)]
    if shown := [name for name in left if not name.startswith(".")]:
        facts = {"path": folder, "num_files": len(shown), "names": ", ".join(shown[:_MAX_NAMED])}
        log_event("files next to the shards are passed over", facts, logging.WARNING)
    return [file for file in files if not is_beside(name_of(file))]


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
