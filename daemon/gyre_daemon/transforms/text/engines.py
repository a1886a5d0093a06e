"""tokie reads a `tokenizer.json` and is faster than Hugging Face's library, which gives the ids.

It is used if its ids of the dataset's first samples are equal. After that, text with the name of a
special token is left to the library, because there the two differ first; of all other texts, one in
`_CHECKED_ONE_IN` is compared, chosen by its contents.
"""

import importlib.util
import json
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gyre_daemon.transforms.text.files import module_of
from gyre_daemon.transforms.text.libraries import TOKEN, Encode, Ids

# The library takes 20 times the time of an engine, so this costs about as much as the engine.
_CHECKED_ONE_IN = 64


def installed_engines() -> Sequence[str]:
    """The engines that can be imported here."""
    return [name for name in _LOADERS if importlib.util.find_spec(name)]


def load_engine(
    name: str, path: str, contents: bytes, library: Encode, *, special_tokens: bool
) -> Encode:
    """A function that turns text into ids as the library does, by an engine.

    Args:
        name: of the engine.
        path: of the `tokenizer.json`.
        contents: of the file.
        library: gives the ids that count.
        special_tokens: whether the tokenizer adds those of the file.

    Raises:
        ValueError: the engine cannot read the file.
    """
    try:
        fast = _LOADERS[name](path, special_tokens)
        special = _special_tokens(contents)
    except Exception as error:
        raise ValueError(f"{name} cannot read {path!r:.200}: {error!s:.300}") from error

    def encode(text: str) -> Ids:
        if special and special.search(text):
            return library(text)
        ids = fast(text)
        if not zlib.crc32(text.encode()) % _CHECKED_ONE_IN and not np.array_equal(
            ids, library(text)
        ):
            raise ValueError(
                f'{name} makes other ids of it than the library; set engine = "library"'
            )
        return ids

    return encode


def _special_tokens(contents: bytes) -> "re.Pattern[str] | None":
    added = [each["content"] for each in json.loads(contents).get("added_tokens") or ()]
    return re.compile("|".join(map(re.escape, added))) if added else None


def _tokie(path: str, special_tokens: bool) -> Encode:
    loaded: Any = module_of("tokie").Tokenizer.from_json(path)
    return lambda text: np.array(loaded.encode(text, special_tokens).ids, TOKEN)


_LOADERS: dict[str, Callable[[str, bool], Encode]] = {"tokie": _tokie}
