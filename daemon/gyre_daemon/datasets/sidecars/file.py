"""The bytes of a sidecar: a few arrays of numbers or short text, and the key that they belong to.

A file has a magic number, a digest of all that follows, the length of a header, the header, and the
arrays. The header is JSON of one shape: the key, and the name, dtype and shape of each array.
Nothing is compressed, so that a file needs no more memory than it has bytes. Nothing in a file is
executed or unpickled. A file whose arrays do not end where it ends is refused.
"""

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from functools import lru_cache

import msgspec
import numpy as np

Arrays = Mapping[str, np.ndarray]

_MAGIC = b"GYREIDX\x03"
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")
_PREFIX_BYTES = len(_MAGIC) + _DIGEST_BYTES + _LENGTH.size
_ALIGNMENT_BYTES = 8
# Bounds of the header. A key has a version, such as an etag of some hundred characters.
_MAX_HEADER_BYTES = 64 << 10
_MAX_ARRAYS, _MAX_DIMS, _MAX_DIM = 64, 4, 1 << 40
_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|U[0-9]{1,4})")


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The header of a file.

    Attributes:
        key: the subject of the arrays.
        arrays: name, dtype and shape of each.
    """

    key: str
    arrays: list[tuple[str, str, list[int]]]


# Made here, by one thread: msgspec prepares a Struct when it is first decoded, and crashes where
# several threads do that at once.
_HEADER = msgspec.json.Decoder(_Header)


def encode(key: str, arrays: Arrays) -> bytes:
    """The bytes of a file."""
    stored = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = _Header(
        key, [(name, each.dtype.str, list(arrays[name].shape)) for name, each in stored.items()]
    )
    text = msgspec.json.encode(header)
    parts = [_LENGTH.pack(len(text)), text]
    position = _PREFIX_BYTES + len(text)
    for array in stored.values():
        padding = -position % _ALIGNMENT_BYTES
        parts += [bytes(padding), array.tobytes()]
        position += padding + array.nbytes
    content = b"".join(parts)
    return _MAGIC + _digest(content) + content


def decode(data: bytes) -> tuple[str, Arrays]:
    """The key and the arrays of a file; the arrays cannot be written to and keep `data` alive.

    Raises:
        ValueError: the file is damaged or foreign; says how.
    """
    if not data.startswith(_MAGIC):
        raise ValueError("it is no index of this version")
    content = memoryview(data)[len(_MAGIC) + _DIGEST_BYTES :]
    if data[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES] != _digest(content):
        raise ValueError("its checksum does not fit")
    if len(content) < _LENGTH.size:
        raise ValueError("it is cut off")
    (num_bytes,) = _LENGTH.unpack_from(content)
    if num_bytes > min(_MAX_HEADER_BYTES, len(content) - _LENGTH.size):
        raise ValueError("its header is cut off or too long")
    header = _decode_header(content[_LENGTH.size : _LENGTH.size + num_bytes])
    arrays, position = {}, _PREFIX_BYTES + num_bytes
    for name, dtype_name, shape in header.arrays:
        _check_shape(shape)
        dtype = _checked_dtype(dtype_name)
        position += -position % _ALIGNMENT_BYTES
        end = position + math.prod(shape) * dtype.itemsize
        if name in arrays or end > len(data):
            raise ValueError(f"its array {name!r:.50} is there twice or cut off")
        arrays[name] = np.frombuffer(data, dtype, math.prod(shape), position).reshape(shape)
        position = end
    if position != len(data):
        raise ValueError("it goes on behind its arrays")
    return header.key, arrays


def _decode_header(text: memoryview) -> _Header:
    try:
        header = _HEADER.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError("its header is damaged") from error
    if len(header.arrays) > _MAX_ARRAYS:
        raise ValueError(f"it has {len(header.arrays)} arrays")
    return header


def _check_shape(shape: list[int]) -> None:
    if len(shape) > _MAX_DIMS or not all(0 <= size <= _MAX_DIM for size in shape):
        raise ValueError(f"it has an array of shape {shape!r:.100}")


@lru_cache
def _checked_dtype(name: str) -> np.dtype[np.generic]:
    dtype = np.dtype(name) if _DTYPE.fullmatch(name) else None
    if dtype is None or not dtype.itemsize:
        raise ValueError(f"it has an array of {name!r:.50}")
    return dtype


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
