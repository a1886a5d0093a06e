"""Tokenizers by the libraries that define them, whose ids are the right ones for a dataset."""

import base64
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.transforms.text.files import BYTES, module_of

TOKEN = np.dtype("<i4")
Ids = npt.NDArray[np.int32]
Encode = Callable[[str], Ids]
# The endings of the files that these libraries read, one each.
SENTENCEPIECE, RANKS = ".model", ".tiktoken"


def is_hugging_face(path: str) -> bool:
    """Whether a path is that of a `tokenizer.json`."""
    return path != BYTES and not path.endswith((SENTENCEPIECE, RANKS))


def load_library(path: str, contents: bytes, pattern: str, *, special_tokens: bool) -> Encode:
    """A function that turns text into ids, by the library that reads files with this ending.

    Args:
        path: of the file, or `bytes`.
        contents: of the file.
        pattern: with ranks, the regular expression that cuts text into words.
        special_tokens: whether a `tokenizer.json` adds its special tokens.

    Raises:
        ValueError: the file is no tokenizer, the library is missing, or the options do not fit.
    """
    if pattern and not path.endswith(RANKS):
        raise ValueError(
            f"`pattern` goes with a file of ranks (*{RANKS}), which {path!r:.200} is not"
        )
    if path == BYTES:
        return lambda text: np.frombuffer(text.encode(), np.uint8).astype(TOKEN)
    if path.endswith(SENTENCEPIECE):
        return _sentencepiece(path, contents)
    if path.endswith(RANKS):
        return _ranks(path, contents, pattern)
    loaded = load_hugging_face(path, contents)

    def encode(text: str) -> Ids:
        # the same ids in a quarter less time, because their offsets in the text are not needed
        (encoded,) = loaded.encode_batch_fast([text], add_special_tokens=special_tokens)
        return np.array(encoded.ids, TOKEN)

    return encode


def load_hugging_face(path: str, contents: bytes) -> Any:
    """A `tokenizers.Tokenizer`.

    Raises:
        ValueError: the file is not a tokenizer, or the library is missing.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    library = module_of("tokenizers")
    try:
        loaded = library.Tokenizer.from_str(contents.decode())
    except Exception as error:  # the library has no error class
        raise ValueError(f"{path!r:.200} is no tokenizer: {error!s:.300}") from error
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _sentencepiece(path: str, contents: bytes) -> Encode:
    library = module_of("sentencepiece")
    try:
        loaded = library.SentencePieceProcessor(model_proto=contents)
    except Exception as error:
        raise ValueError(f"{path!r:.200} is no SentencePiece model: {error!s:.300}") from error
    return lambda text: np.array(loaded.encode(text), TOKEN)


def _ranks(path: str, contents: bytes, pattern: str) -> Encode:
    library = module_of("tiktoken")
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
