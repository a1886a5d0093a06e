"""Tokens of text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gyre_daemon.transforms.text.libraries import (
    BYTES,
    TOKEN,
    Encode,
    installed_engines,
    is_hugging_face,
    load_engine,
    load_library,
    read_file,
    set_of,
    version_of,
)
from gyre_daemon.transforms.transform import Field, OfField, Sample

MANY = (None,)


@dataclass(frozen=True)
class OfText(OfField):
    """A transform of text in UTF-8."""

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return False

    def check_text(self, fields: Mapping[str, Field]) -> None:
        """Refuse a field that cannot be text.

        Raises:
            ValueError: names it.
        """
        before = fields[self.field]
        if before.dtype != np.uint8 or before.shape != MANY:
            raise ValueError(f"{self.field!r:.100} is no text, which is bytes in UTF-8")


@dataclass(frozen=True)
class Tokenize(OfText):
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
        encode = load_library(
            self.tokenizer, contents, self.pattern, special_tokens=self.special_tokens
        )
        set_of(self, _contents=contents, _encode=encode)
        if contents:
            set_of(self, version=version_of(contents))

    @property
    def engines(self) -> Sequence[str]:
        """See `Transform.engines`."""
        has_engines = self.engine == "auto" and is_hugging_face(self.tokenizer)
        return installed_engines() if has_engines else ()

    def with_engine(self, engine: str) -> "Tokenize":
        """See `Transform.with_engine`."""
        if engine not in self.engines:
            return self
        other = replace(self)
        contents: bytes = other._contents  # type: ignore[attr-defined]
        library: Encode = other._encode  # type: ignore[attr-defined]
        fast = load_engine(
            engine, self.tokenizer, contents, library, special_tokens=self.special_tokens
        )
        set_of(other, _encode=fast, cost="light")
        return other

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        self.check_text(fields)
        return {self.to: Field(TOKEN, MANY)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
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
