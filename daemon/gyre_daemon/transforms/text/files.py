"""The files and the libraries of tokenizers."""

import hashlib
import importlib
from pathlib import Path
from typing import Any

from gyre_daemon.transforms.transform import Transform

BYTES = "bytes"  # in place of a tokenizer's file: each byte is a token
_MAX_FILE_BYTES = 256 << 20


def set_of(transform: Transform, **values: object) -> None:
    """Set attributes that a transform derives from its options."""
    for name, value in values.items():
        object.__setattr__(transform, name, value)  # it is frozen


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


def module_of(name: str) -> Any:
    """A library that the extra `text` installs.

    Raises:
        ValueError: it is missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name} is not installed. Run pip install 'gyre-ml[text]'.") from error
