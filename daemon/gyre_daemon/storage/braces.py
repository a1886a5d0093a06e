"""Brace lists such as `shard-{000..127}.tar`, expanded as bash and the WebDataset library do.

Time and memory are bounded.
"""

import re
import string
from collections.abc import Iterator
from itertools import pairwise

_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.-?(\d+))?", re.ASCII)
_TOKEN = re.compile(r"\\.|[{},]", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_MAX_DEPTH = 16


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
