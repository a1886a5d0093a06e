"""What random transforms draw, computed from seed, epoch and sample alone."""

import hashlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt


def source_seed(seed: int, name: str) -> int:
    """The seed of one source of a mixture."""
    text = struct.pack("<Q", seed) + name.encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"gyre.source").digest()
    return int.from_bytes(digest, "little")


def generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The random numbers of a sample."""
    key = hashlib.blake2b(struct.pack("<3Q", seed, epoch, sample), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def cropped(
    tokens: npt.NDArray[Any], length: int, seed: int, epoch: int, sample: int
) -> npt.NDArray[Any]:
    """What is left of longer tokens that are cut at random to a length."""
    begin = int(generator(seed, epoch, sample).integers(len(tokens) - length + 1))
    return tokens[begin : begin + length]
