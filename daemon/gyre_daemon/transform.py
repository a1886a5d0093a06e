"""From stored bytes to tensors: one codec per kind of field.

A codec says where the stored bytes of a sample go (`targets`) and what must happen once they are there (`finish`). Whatever can
be read straight into its place in the batch is; what cannot goes through a few bytes of scratch memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gyre_daemon.formats import FieldSpec
from gyre_daemon.formats.npy import parse_npy_header

_MAX_INTEGER_CHARS = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one field of one sample is being put.

    Attributes:
        place: its part of the batch buffer.
        scratch: memory for stored bytes that are no part of the tensor; they come before those that are.
    """

    place: memoryview
    scratch: memoryview

    NO_SCRATCH = memoryview(b"")


class Codec(Protocol):
    """How one kind of field is stored."""

    finishes: bool

    def put(self, spec: FieldSpec, place: memoryview, stored_bytes: int) -> Placement:
        """Where to read the stored bytes to.

        Raises:
            ValueError: so many bytes cannot be such a field.
        """

    def targets(self, placement: Placement) -> tuple[memoryview, ...]:
        """The memory to read into, in the order of the stored bytes."""

    def finish(self, spec: FieldSpec, placement: Placement) -> None:
        """Check, or convert into the place; called only where `finishes`.

        Raises:
            ValueError: the bytes are not what the field's kind says.
        """


class BytesCodec:
    """Stored as the tensor lies in memory."""

    finishes = False

    def put(self, spec: FieldSpec, place: memoryview, stored_bytes: int) -> Placement:
        """See `Codec.put`."""
        if place.nbytes != stored_bytes:
            raise ValueError(f"it has {stored_bytes} bytes where field {spec.name} takes {place.nbytes}")
        return Placement(place, Placement.NO_SCRATCH)

    def targets(self, placement: Placement) -> tuple[memoryview, ...]:
        """See `Codec.targets`."""
        return (placement.place,)

    def finish(self, spec: FieldSpec, placement: Placement) -> None:
        """See `Codec.finish`: nothing to do."""


class TextCodec(BytesCodec):
    """UTF-8; checked, served as bytes."""

    finishes = True

    def finish(self, spec: FieldSpec, placement: Placement) -> None:
        """See `Codec.finish`."""
        str(placement.place, "utf-8")


class JsonCodec(BytesCodec):
    """A JSON document; checked, served as its UTF-8 bytes."""

    finishes = True

    def finish(self, spec: FieldSpec, placement: Placement) -> None:
        """See `Codec.finish`."""
        try:
            json.loads(bytes(placement.place))
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


class IntegerCodec:
    """A decimal number as text; served as int64."""

    finishes = True

    def put(self, spec: FieldSpec, place: memoryview, stored_bytes: int) -> Placement:
        """See `Codec.put`."""
        if not 1 <= stored_bytes <= _MAX_INTEGER_CHARS:
            raise ValueError(f"{stored_bytes} bytes are no decimal number")
        return Placement(place, memoryview(bytearray(stored_bytes)))

    def targets(self, placement: Placement) -> tuple[memoryview, ...]:
        """See `Codec.targets`."""
        return (placement.scratch,)

    def finish(self, spec: FieldSpec, placement: Placement) -> None:
        """See `Codec.finish`."""
        value = int(bytes(placement.scratch))
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{value} does not fit into int64")
        np.frombuffer(placement.place, np.int64)[0] = value


class NpyCodec:
    """An npy file; its header goes to scratch memory, its array straight into place."""

    finishes = True

    def put(self, spec: FieldSpec, place: memoryview, stored_bytes: int) -> Placement:
        """See `Codec.put`."""
        header_bytes = stored_bytes - place.nbytes
        if not 0 < header_bytes <= 1 << 16:
            raise ValueError(f"its {stored_bytes} bytes cannot hold an array of shape {list(spec.shape)} and type {spec.dtype}")
        return Placement(place, memoryview(bytearray(header_bytes)))

    def targets(self, placement: Placement) -> tuple[memoryview, ...]:
        """See `Codec.targets`."""
        return (placement.scratch, placement.place)

    def finish(self, spec: FieldSpec, placement: Placement) -> None:
        """See `Codec.finish`."""
        header = parse_npy_header(placement.scratch)
        if (
            header.shape != spec.shape
            or header.dtype.newbyteorder("<") != spec.dtype
            or header.num_bytes != placement.scratch.nbytes
        ):
            raise ValueError(
                f"it has shape {list(header.shape)} and type {header.dtype}, the dataset {list(spec.shape)} and {spec.dtype}"
            )
        if header.dtype != spec.dtype:
            np.frombuffer(placement.place, spec.dtype).byteswap(inplace=True)


CODECS: Mapping[str, Codec] = {
    "bytes": BytesCodec(),
    "text": TextCodec(),
    "json": JsonCodec(),
    "integer": IntegerCodec(),
    "npy": NpyCodec(),
}
