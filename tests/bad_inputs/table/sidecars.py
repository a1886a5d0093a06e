"""Index sidecars. `sent` makes a forged file from the bytes of a good one.

A daemon throws such a file away, makes it again, and serves the right bytes.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable

import numpy as np

from tests.bad_inputs.row import Row

DIGEST_BYTES = 32
Forge = Callable[[bytes], bytes]


def sealed(data: bytes) -> bytes:
    """Puts a right digest before forged contents: what somebody makes who knows the format."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest() + data


def rewritten(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Forge:
    def forge(good: bytes) -> bytes:
        with np.load(io.BytesIO(good[DIGEST_BYTES:]), allow_pickle=False) as archive:
            arrays = change({name: archive[name] for name in archive.files})
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        return sealed(buffer.getvalue())

    return forge


def _zip(name: str, data: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def _lying_npy(shape: str) -> bytes:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


FORGED: dict[str, Forge] = {
    "empty": lambda good: b"",
    "one byte": lambda good: b"x",
    "cut": lambda good: good[: len(good) // 2],
    "a flipped bit": lambda good: good[:100] + bytes([good[100] ^ 1]) + good[101:],
    "a digest alone": lambda good: good[:DIGEST_BYTES],
    "sealed nothing": lambda good: sealed(b""),
    "sealed noise": lambda good: sealed(bytes(range(256)) * 8),
    "sealed empty zip": lambda good: sealed(b"PK\x05\x06" + bytes(18)),
    "a zip of text": lambda good: sealed(_zip("key.npy", b"hello")),
    "no key": rewritten(lambda arrays: {k: v for k, v in arrays.items() if k != "key"}),
    "the key alone": rewritten(lambda arrays: {"key": arrays["key"]}),
    "a key of nothing": rewritten(lambda arrays: {**arrays, "key": np.empty(0, np.uint8)}),
    "a key of no JSON": rewritten(lambda arrays: {**arrays, "key": np.frombuffer(b"{]", np.uint8)}),
    "a key 100,000 deep": rewritten(
        lambda arrays: {**arrays, "key": np.frombuffer(b"[" * 100_000, np.uint8)}
    ),
    "a key of a number": rewritten(lambda arrays: {**arrays, "key": np.array(7)}),
    "a key of an empty list": rewritten(
        lambda arrays: {**arrays, "key": np.frombuffer(json.dumps([]).encode(), np.uint8)}
    ),
    "empty arrays": rewritten(
        lambda arrays: {k: v if k == "key" else v[:0] for k, v in arrays.items()}
    ),
    "scalars": rewritten(
        lambda arrays: {k: v if k == "key" else np.array(0) for k, v in arrays.items()}
    ),
    "floats": rewritten(
        lambda arrays: {k: v if k == "key" else v.astype(np.float64) for k, v in arrays.items()}
    ),
    "another dim": rewritten(
        lambda arrays: {k: v if k == "key" else v[None, None] for k, v in arrays.items()}
    ),
    "one less": rewritten(
        lambda arrays: {k: v if k == "key" else v[:-1] for k, v in arrays.items()}
    ),
    "an array of 2^45 bytes": lambda good: sealed(
        _zip("key.npy", _lying_npy("(4398046511104,)") + bytes(64))
    ),
    "a bomb": lambda good: sealed(_zip("key.npy", _lying_npy("(33554432,)") + bytes(256 << 20))),
}
ROWS = [
    Row(f"sidecar {words}", forge, "", "", "", "" if n < 5 else "checked sidecars")
    for n, (words, forge) in enumerate(FORGED.items())
]
