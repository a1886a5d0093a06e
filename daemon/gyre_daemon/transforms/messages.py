"""Requests to compute workers that transform samples, and their replies.

The body of a request is the head, and for `DESCRIBE` a `Recipe`. `TRANSFORM` brings the descriptor
of an exchange with a `Portion`, too. So do `MEASURE`, which makes nothing and tells how
long the samples would be, and `VERIFY`, which tells whether an engine makes the same. Each is
answered by a `Described` or a `Done`. Answers may come from a process that hostile
bytes have taken over.
"""

import importlib
import struct
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from gyre_daemon.transforms.transform import Cost

# numpy has none, and would call it by a name that says its size alone. torch and clients have it.
BFLOAT16 = "bfloat16"


def name_of(dtype: np.dtype[np.generic]) -> str:
    """The name of a dtype, in which its byte order is if it has one."""
    return BFLOAT16 if dtype.name == BFLOAT16 else dtype.str


def dtype_of(name: str) -> np.dtype[np.generic]:
    """The dtype of a name.

    Raises:
        ModuleNotFoundError: it is bfloat16, and `ml_dtypes` is not installed.
    """
    if name == BFLOAT16:
        bfloat16: np.dtype[np.generic] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        return bfloat16
    return np.dtype(name)


# Kind; where the portion begins and ends in the exchange. Then the numbers of the samples, int32.
HEAD = struct.Struct("<3q")
MAX_PACKET_BYTES = 128 << 10  # of a request or a reply
_MAX_DIMS, _MAX_LENGTH = 8, 1 << 32
_Length = Annotated[int, Meta(ge=1, le=_MAX_LENGTH)]


class Kind(IntEnum):
    """The kinds of request."""

    DESCRIBE = 1
    TRANSFORM = 2
    MEASURE = 3
    VERIFY = 4


class Step(msgspec.Struct, frozen=True):
    """One transform of a chain.

    Attributes:
        name: as it was declared.
        target: where its class is, `MODULE:CLASS`.
        options: as they were declared.
    """

    name: str
    target: str
    options: dict[str, Any]


class SourceField(msgspec.Struct, frozen=True, omit_defaults=True):
    """A field of a stored sample, or of one that transforms made before; see `Field`."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    image: str = ""


class Recipe(msgspec.Struct, frozen=True):
    """A chain as plain data.

    Attributes:
        steps: its transforms.
        source: the fields that it begins with.
        versions: of its transforms, when it was described; empty before.
        engine: the faster program to use where it can; empty for none.
    """

    steps: list[Step]
    source: list[SourceField]
    versions: list[int] = []
    engine: str = ""


class MadeField(msgspec.Struct, frozen=True):
    """A field that a chain makes; where the first length is None, samples differ in it.

    Attributes:
        name, dtype, shape, image, max_length: see `Field`.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    dtype: Annotated[str, Meta(max_length=10)]
    shape: Annotated[tuple[_Length | None, ...], Meta(max_length=_MAX_DIMS)]
    image: Annotated[str, Meta(max_length=200)] = ""
    max_length: Annotated[int, Meta(ge=0, le=_MAX_LENGTH)] = 0


class Described(msgspec.Struct, frozen=True):
    """The properties of a chain.

    Attributes:
        error: why there can be none; empty if there can.
        versions: of its transforms.
        made, passed, read, cost: see `Chain`.
        engines: that may do it faster, the fastest first.
        random: the places of the transforms that may draw random numbers.
    """

    error: str = ""
    versions: list[int] = []
    made: list[MadeField] = []
    passed: list[str] = []
    read: list[str] = []
    cost: Cost = "heavy"
    engines: list[str] = []
    random: list[int] = []


class Input(msgspec.Struct, frozen=True):
    """The place of a stored field of n samples in an exchange.

    Attributes:
        name: of the field.
        dtype: of its elements.
        shape: of one sample, or of one element if samples differ in length.
        is_ragged: whether they do.
        offsets: int64 [n], in bytes.
        sizes: int64 [n], in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_ragged: bool
    offsets: bytes
    sizes: bytes


class Output(msgspec.Struct, frozen=True):
    """Where a field of n samples goes in an exchange: one behind the other from an offset on.

    Attributes:
        name: of the field.
        dtype: of its elements.
        shape: of one sample, or of one element if samples differ in length.
        offset: in bytes.
        ends: int64 [n + 1], the element at which each sample begins, and the end of the last; empty
            if samples do not differ in length.
        lengths: the byte of the exchange from which on the process writes the elements of each
            sample, int32 [n]; its place has room for more. -1 where its place fits exactly.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    ends: bytes = b""
    lengths: int = -1


class Portion(msgspec.Struct, frozen=True):
    """Samples to transform together.

    Attributes:
        recipe: an encoded `Recipe`.
        seed: of the job.
        sample_ids: int64 [n].
        epochs: int64 [n].
        inputs: the fields that the chain reads.
        outputs: the fields that it makes; empty where it is only measured.
        room: the bytes for output that is only measured, sample after sample with all fields of
            each; the first byte of the exchange and the end. Empty where it is dropped.
    """

    recipe: bytes
    seed: int
    sample_ids: bytes
    epochs: bytes
    inputs: list[Input]
    outputs: list[Output]
    room: Annotated[list[int], Meta(max_length=2)] = []


class Done(msgspec.Struct, frozen=True):
    """The answer to `TRANSFORM`, `MEASURE` and `VERIFY`.

    Attributes:
        failed: the sample of the portion that could not be transformed; -1 if all were.
        transform: which one refused it.
        reason: why.
        cpu_s: processor time that it took.
        lengths: to `MEASURE`, int32 [n, R], the elements of each field in which samples differ.
        num_kept: to `MEASURE`, the number of first samples that fit whole into the room.
    """

    failed: int = -1
    transform: str = ""
    reason: str = ""
    cpu_s: float = 0.0
    lengths: bytes = b""
    num_kept: int = 0


RECIPE_DECODER = msgspec.msgpack.Decoder(Recipe)
PORTION_DECODER = msgspec.msgpack.Decoder(Portion)
DESCRIBED_DECODER = msgspec.msgpack.Decoder(Described)
DONE_DECODER = msgspec.msgpack.Decoder(Done)
ENCODER = msgspec.msgpack.Encoder()
