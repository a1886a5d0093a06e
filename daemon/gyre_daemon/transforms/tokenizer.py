"""The transform `tokenize`: token ids of text, as the tokenizer's own library makes them.

Each library is imported when a chain needs it. A faster engine is used if its ids of the dataset's
first samples are equal. After that, text with the name of a special token is left to the library,
because there the two differ first; of all other texts, one in `_CHECKED_ONE_IN` is compared, chosen
by its contents.
"""

import base64
import hashlib
import importlib
import importlib.util
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gyre_daemon.transforms.recipes import Field, OfField, Sample, set_of

BYTES = "bytes"  # in place of a tokenizer's file: each byte is a token
_MAX_FILE_BYTES = 256 << 20
TOKEN = np.dtype("<i4")
Ids = npt.NDArray[np.int32]
Encode = Callable[[str], Ids]
MANY = (None,)
# The endings of the files that these libraries read, one each.
SENTENCEPIECE, RANKS = ".model", ".tiktoken"


@dataclass(frozen=True)
class Tokenize(OfField):
    """Turns text into token ids.

    Attributes:
        field: UTF-8.
        tokenizer: the path of a `tokenizer.json` of Hugging Face's tokenizers, of a SentencePiece
            model (`*.model`), or of tiktoken's ranks (`*.tiktoken`); or `bytes`, where each byte is
            its own id.
        key: where the field has JSON objects, the key of the text; empty for the text itself.
        to: the name of the ids, int32 [n].
        special_tokens: whether a `tokenizer.json` adds its special tokens.
        end: an id to append to each document; -1 for none.
        pattern: with ranks, the regular expression that cuts text into words.
        engine: `auto` for a faster installed program that makes the same ids of the
            dataset's first samples; `library` for the tokenizer's own library.
    """

    tokenizer: str
    key: str = ""
    to: str = "tokens"
    special_tokens: bool = True
    end: int = -1
    pattern: str = ""
    engine: Literal["auto", "library"] = "auto"

    def __post_init__(self) -> None:
        """Read the file, whose contents are part of the version."""
        contents = b"" if self.tokenizer == BYTES else read_file(self.tokenizer)
        set_of(self, _encode=_by_library(self, contents))
        if contents:
            set_of(self, version=version_of(contents))

    @property
    def engines(self) -> Sequence[str]:
        is_other = self.tokenizer == BYTES or self.tokenizer.endswith((SENTENCEPIECE, RANKS))
        if self.engine == "library" or is_other:
            return ()
        return [name for name in _LOADERS if importlib.util.find_spec(name)]

    def with_engine(self, engine: str) -> "Tokenize":
        if engine not in self.engines:
            return self
        other = replace(self)
        library: Encode = other._encode  # type: ignore[attr-defined]
        set_of(other, _encode=_by_engine(engine, self, library), cost="light")
        return other

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        self.require_bytes(fields)
        return {self.to: Field(TOKEN, MANY)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        encode: Encode = self._encode  # type: ignore[attr-defined]
        text = sample[self.field].tobytes()
        ids = encode(_text_of(json.loads(text), self.key) if self.key else text.decode())
        if self.end >= 0:
            ids = np.append(ids, TOKEN.type(self.end))
        self.put(self.to, ids, sample, out)


def _text_of(document: object, key: str) -> str:
    text = document.get(key) if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"its JSON is no object with text under the key {key!r:.100}")
    return text


def read_file(path: str) -> bytes:
    """The contents of a tokenizer's file.

    Raises:
        ValueError: it cannot be read, or is too large.
    """
    if not Path(path).is_absolute():
        raise ValueError(f"{path!r:.200} must be an absolute path, or {BYTES!r}")
    try:
        with Path(path).open("rb") as file:
            contents = file.read(_MAX_FILE_BYTES + 1)
    except IsADirectoryError as error:
        raise ValueError(
            f"{path!r:.200} is a folder; name the file in it, such as tokenizer.json"
        ) from error
    except OSError as error:
        raise ValueError(f"{path!r:.200} cannot be read: {error.strerror}") from error
    if len(contents) > _MAX_FILE_BYTES:
        raise ValueError(f"{path!r:.200} has more than {_MAX_FILE_BYTES} bytes")
    return contents


def version_of(*contents: bytes) -> int:
    """A number that tells the contents of files from others."""
    digest = hashlib.blake2b(digest_size=7)
    for each in contents:
        digest.update(hashlib.blake2b(each, digest_size=16).digest())
    return int.from_bytes(digest.digest(), "big")


def _by_library(options: Tokenize, contents: bytes) -> Encode:
    """A function that turns text into ids, by the library that reads files with this ending."""
    path, special_tokens = options.tokenizer, options.special_tokens
    if options.pattern and not path.endswith(RANKS):
        raise ValueError(
            f"`pattern` goes with a file of ranks (*{RANKS}), which {path!r:.200} is not"
        )
    if path == BYTES:
        return lambda text: np.frombuffer(text.encode(), np.uint8).astype(TOKEN)
    if path.endswith(SENTENCEPIECE):
        return _sentencepiece(path, contents)
    if path.endswith(RANKS):
        return _ranks(path, contents, options.pattern)
    loaded = load_hugging_face(path, contents)

    def encode(text: str) -> Ids:
        # the same ids in a quarter less time, because their offsets in the text are not needed
        (encoded,) = loaded.encode_batch_fast([text], add_special_tokens=special_tokens)
        return np.array(encoded.ids, TOKEN)

    return encode


def load_hugging_face(path: str, contents: bytes) -> Any:
    """A `tokenizers.Tokenizer`.

    Raises:
        ValueError: the file is not a tokenizer.
        ModuleNotFoundError: the library is missing.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    library: Any = importlib.import_module("tokenizers")
    try:
        loaded = library.Tokenizer.from_str(contents.decode())
    except Exception as error:  # the library has no error class
        raise ValueError(f"{path!r:.200} is no tokenizer: {error!s:.300}") from error
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _sentencepiece(path: str, contents: bytes) -> Encode:
    library: Any = importlib.import_module("sentencepiece")
    try:
        loaded = library.SentencePieceProcessor(model_proto=contents)
    except Exception as error:
        raise ValueError(f"{path!r:.200} is no SentencePiece model: {error!s:.300}") from error
    return lambda text: np.array(loaded.encode(text), TOKEN)


def _ranks(path: str, contents: bytes, pattern: str) -> Encode:
    library: Any = importlib.import_module("tiktoken")
    if not pattern:
        raise ValueError(
            f"{path!r:.200} has ranks and does not say how text is cut into words; give the "
            "regular expression of its encoding as `pattern`"
        )
    try:
        pairs = [line.split() for line in contents.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        loaded = library.Encoding(path, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except Exception as error:
        raise ValueError(f"{path!r:.200} has no ranks of tokens: {error!s:.300}") from error
    return lambda text: np.array(loaded.encode_ordinary(text), TOKEN)


# The library takes 20 times the time of an engine, so this costs about as much as the engine.
_CHECKED_ONE_IN = 64


def _by_engine(name: str, options: Tokenize, library: Encode) -> Encode:
    """A function that turns text into the ids of the library, by an engine."""
    path = options.tokenizer
    try:
        fast = _LOADERS[name](path, options.special_tokens)
        added = json.loads(read_file(path)).get("added_tokens") or ()
        special = re.compile("|".join(re.escape(each["content"]) for each in added))
    except Exception as error:
        raise ValueError(f"{name} cannot read {path!r:.200}: {error!s:.300}") from error

    def encode(text: str) -> Ids:
        if added and special.search(text):
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


def _tokie(path: str, special_tokens: bool) -> Encode:
    library: Any = importlib.import_module("tokie")
    loaded = library.Tokenizer.from_json(path)
    return lambda text: np.array(loaded.encode(text, special_tokens).ids, TOKEN)


_LOADERS: dict[str, Callable[[str, bool], Encode]] = {"tokie": _tokie}
