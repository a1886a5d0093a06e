"""From stored bytes to tensors: one codec per kind of field.

Whatever is stored as the tensor lies in memory is read straight into its place in the batch. A codec says how many of a
sample's stored bytes come before that and go to scratch memory instead (an npy header, the digits of a number), and what must
happen once all bytes are there: a check, or a conversion into the place.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.npy import parse_npy_header
from gyre_daemon.datasets.formats.values import MAX_INTEGER_CHARS, check_json, check_text, parse_integer

Sizes = npt.NDArray[np.int64]

_MAX_HEADER_BYTES = 1 << 16


class Codec(Protocol):
    """How one kind of field is stored.

    Attributes:
        finishes: `finish` has something to do.
        uses_scratch: `scratch_bytes` may be more than none.
    """

    @property
    def finishes(self) -> bool:
        """See above."""

    @property
    def uses_scratch(self) -> bool:
        """See above."""

    def scratch_bytes(self, stored: Sizes, placed: Sizes) -> Sizes:
        """How many bytes of each sample go to scratch memory; all others go to its place.

        Args:
            stored: int64 [n], stored bytes.
            placed: int64 [n], length of the place.
        """

    def misfits(self, stored: Sizes, placed: Sizes) -> npt.NDArray[np.bool_]:
        """Which samples cannot be such a field, by their sizes alone."""

    def finish(self, spec: FieldSpec, scratch: memoryview, place: memoryview) -> None:
        """Check, or convert into the place.

        Raises:
            ValueError: the bytes are not what the field's kind says.
        """


class BytesCodec:
    """Stored as the tensor lies in memory."""

    finishes = uses_scratch = False

    def scratch_bytes(self, stored: Sizes, placed: Sizes) -> Sizes:
        """See `Codec.scratch_bytes`."""
        return np.zeros_like(stored)

    def misfits(self, stored: Sizes, placed: Sizes) -> npt.NDArray[np.bool_]:
        """See `Codec.misfits`."""
        return np.asarray(stored != placed)

    def finish(self, spec: FieldSpec, scratch: memoryview, place: memoryview) -> None:
        """See `Codec.finish`: nothing to do."""


class TextCodec(BytesCodec):
    """UTF-8; checked, served as bytes."""

    finishes = True

    def finish(self, spec: FieldSpec, scratch: memoryview, place: memoryview) -> None:
        """See `Codec.finish`."""
        check_text(place)


class JsonCodec(BytesCodec):
    """A JSON document; checked, served as its UTF-8 bytes."""

    finishes = True

    def finish(self, spec: FieldSpec, scratch: memoryview, place: memoryview) -> None:
        """See `Codec.finish`."""
        check_json(place)


class IntegerCodec:
    """A decimal number as text; served as int64."""

    finishes = uses_scratch = True

    def scratch_bytes(self, stored: Sizes, placed: Sizes) -> Sizes:
        """See `Codec.scratch_bytes`."""
        return stored

    def misfits(self, stored: Sizes, placed: Sizes) -> npt.NDArray[np.bool_]:
        """See `Codec.misfits`."""
        return np.asarray((stored < 1) | (stored > MAX_INTEGER_CHARS))

    def finish(self, spec: FieldSpec, scratch: memoryview, place: memoryview) -> None:
        """See `Codec.finish`."""
        np.frombuffer(place, np.int64)[0] = parse_integer(bytes(scratch))


class NpyCodec:
    """An npy file; its header goes to scratch memory, its array straight into place, whatever its shape where it is ragged."""

    finishes = uses_scratch = True

    def scratch_bytes(self, stored: Sizes, placed: Sizes) -> Sizes:
        """See `Codec.scratch_bytes`."""
        return stored - placed

    def misfits(self, stored: Sizes, placed: Sizes) -> npt.NDArray[np.bool_]:
        """See `Codec.misfits`."""
        return np.asarray((stored <= placed) | (stored > placed + _MAX_HEADER_BYTES))

    def finish(self, spec: FieldSpec, scratch: memoryview, place: memoryview) -> None:
        """See `Codec.finish`."""
        header = parse_npy_header(scratch)
        fits = math.prod(header.shape) * spec.dtype.itemsize == place.nbytes if spec.ragged else header.shape == spec.shape
        if not fits or header.dtype.newbyteorder("<") != spec.dtype or header.num_bytes != scratch.nbytes:
            raise ValueError(
                f"it has shape {list(header.shape)} and type {header.dtype}, the dataset {list(spec.shape)} and {spec.dtype}"
            )
        if header.dtype != spec.dtype:
            np.frombuffer(place, spec.dtype).byteswap(inplace=True)


def first_unknown_id(spec: FieldSpec, place: memoryview) -> int | None:
    """Which of many samples' token ids is the first outside the field's vocabulary, counted in ids; None where all are within.

    Args:
        spec: a field of the codec `ids`.
        place: the samples' bytes, back to back.
    """
    ids = np.frombuffer(place, f"<u{spec.dtype.itemsize}")  # a negative one is beyond all vocabularies
    if not len(ids) or ids.max() < spec.vocabulary:
        return None
    return int(np.argmax(ids >= spec.vocabulary))


CODECS: Mapping[str, Codec] = {
    "bytes": BytesCodec(),
    "ids": BytesCodec(),  # checked by `first_unknown_id`, many samples at once
    "text": TextCodec(),
    "json": JsonCodec(),
    "integer": IntegerCodec(),
    "npy": NpyCodec(),
}
