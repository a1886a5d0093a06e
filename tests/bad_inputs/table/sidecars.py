"""Index sidecars. `sent` makes a forged file from the bytes of a good one.

A daemon throws such a file away, makes it again, and serves the right bytes.
"""

import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
from gyre_daemon.datasets import sidecars as sidecar_file

from tests.bad_inputs.row import Row

MAGIC_BYTES = 8
DIGEST_BYTES = 32
Forge = Callable[[bytes], bytes]
Change = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def sealed(good: bytes, content: bytes) -> bytes:
    """Puts a right digest before forged contents: what somebody makes who knows the format."""
    digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
    return good[:MAGIC_BYTES] + digest + content


def containing(content: bytes) -> Forge:
    return lambda good: sealed(good, content)


def headed(header: Any, data: bytes = b"") -> Forge:
    """A file whose header is right in form, and lies."""
    text = json.dumps(header).encode()
    return containing(len(text).to_bytes(4, "little") + text + data)


def rewritten(change: Change) -> Forge:
    def forge(good: bytes) -> bytes:
        key, arrays = sidecar_file.decode(good)
        return sidecar_file.encode(key, change(dict(arrays)))

    return forge


def every(change: Callable[[np.ndarray], np.ndarray]) -> Forge:
    return rewritten(lambda arrays: {name: change(array) for name, array in arrays.items()})


def keyed(key: str) -> Forge:
    return lambda good: sidecar_file.encode(key, sidecar_file.decode(good)[1])


def _zip(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


FORGED: dict[str, Forge] = {
    "empty": lambda good: b"",
    "one byte": lambda good: b"x",
    "cut": lambda good: good[: len(good) // 2],
    "a flipped bit": lambda good: good[:100] + bytes([good[100] ^ 1]) + good[101:],
    "magic alone": lambda good: good[:MAGIC_BYTES],
    "a digest alone": lambda good: good[: MAGIC_BYTES + DIGEST_BYTES],
    "another version": lambda good: good[: MAGIC_BYTES - 1] + b"\x7f" + good[MAGIC_BYTES:],
    "a pickle": lambda good: pickle.dumps({"a": 1}),
    "a zip of text": lambda good: _zip("key.npy", b"hello"),
    "a bomb": lambda good: _zip("key.npy", bytes(64 << 20)),
    "bytes behind its end": lambda good: good + b"x",
    "sealed nothing": containing(b""),
    "sealed noise": containing(bytes(range(256)) * 8),
    "a header of 4 GiB": containing(b"\xff\xff\xff\xff{}"),
    "a header of no JSON": containing(b"\x02\0\0\0{]"),
    "a header 60,000 deep": containing((60_000).to_bytes(4, "little") + b"[" * 60_000),
    "a header of a number": headed(7),
    "a header without a key": headed([[]]),
    "no arrays": headed(["", []]),
    "an array of 2^45 bytes": headed(["", [["start", "<i8", [1 << 42]]]], bytes(64)),
    "a negative array": headed(["", [["start", "<i8", [-1]]]]),
    "an array of objects": headed(["", [["start", "|O", [1]]]], bytes(8)),
    "an array twice": headed(["", [["start", "<i8", [0]], ["start", "<i8", [0]]]]),
    "2,000 arrays": headed(["", [[f"a{n}", "<i8", [0]] for n in range(2000)]]),
    "an empty key": keyed(""),
    "a key of nonsense": keyed("[" * 1000),
    "empty arrays": every(lambda array: array[:0]),
    "scalars": every(lambda array: np.array(0)),
    "small numbers": every(lambda array: array.astype(np.uint8)),
    "another dim": every(lambda array: array[None, None]),
    "one less": every(lambda array: array[:-1]),
    "no arrays but a key": rewritten(lambda arrays: {}),
}
ROWS = [Row(f"sidecar {words}", forge, "", "", "") for words, forge in FORGED.items()]
