"""From stored bytes to tensors: one codec for each way to store a field.

Bytes that are stored as the tensor lies in memory are read straight to their destination in the
batch. A codec says how many of a sample's stored bytes come before them and are read into scratch
memory instead (an npy header, the digits of a number), and checks or converts the bytes once all of
them are there.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.npy import parse_npy_header
from gyre_daemon.datasets.formats.values import (
    MAX_NUMBER_CHARS,
    check_documents,
    check_json,
    check_text,
    check_texts,
    parse_integer,
    parse_number,
)
from gyre_daemon.order.permutation import Int64Array

# An npy header takes 128 bytes. A sample whose stored bytes exceed its tensor by more than this is
# refused before scratch memory is allocated for it.
_MAX_NPY_HEADER_BYTES = 1 << 16

Finish = Callable[[FieldSpec, memoryview, memoryview], None]


class Codec(Struct, frozen=True):
    """How one kind of field is stored.

    `misfits` and `scratch_bytes` take two arrays, int64 [n]: the stored bytes of each sample, and
    the length of its destination.

    Attributes:
        misfits: bool [n], which samples cannot be such a field, by their sizes alone.
        scratch_bytes: int64 [n], how many bytes of each sample go to scratch memory; the rest go to
            its destination. None where none go to scratch memory.
        finish: takes a sample's scratch memory and its destination, and checks the bytes or
            converts them into the destination. Raises ValueError if they are no such field. None
            where there is nothing to do.
        check_all: does what `finish` does to samples that lie back to back, at once: takes their
            bytes and int64 [n], where each begins. Raises ValueError if some are no such field.
            None where there is no faster way.
    """

    misfits: Callable[[Int64Array, Int64Array], npt.NDArray[np.bool_]]
    scratch_bytes: Callable[[Int64Array, Int64Array], Int64Array] | None
    finish: Finish | None
    check_all: Callable[[memoryview, Int64Array], None] | None = None


def first_unknown_id(spec: FieldSpec, destination: memoryview) -> int | None:
    """The number of the first id outside the field's vocabulary; None if all are inside.

    Args:
        spec: a field of the codec `ids`.
        destination: the bytes of several samples, back to back.
    """
    # read as unsigned numbers, negative ids are beyond every vocabulary
    ids = np.frombuffer(destination, f"<u{spec.dtype.itemsize}")
    if not len(ids) or ids.max() < spec.vocabulary:
        return None
    return int(np.argmax(ids >= spec.vocabulary))


def _as_stored(
    check: Callable[[memoryview], None] | None = None,
    check_all: Callable[[memoryview, Int64Array], None] | None = None,
) -> Codec:
    """Bytes that are served as they are stored, and checked if there is a `check`."""
    return Codec(
        misfits=lambda stored, reserved: np.asarray(stored != reserved),
        scratch_bytes=None,
        finish=(lambda spec, scratch, destination: check(destination)) if check else None,
        check_all=check_all,
    )


def _finish_integer(spec: FieldSpec, scratch: memoryview, destination: memoryview) -> None:
    np.frombuffer(destination, np.int64)[0] = parse_integer(bytes(scratch))


def _finish_number(spec: FieldSpec, scratch: memoryview, destination: memoryview) -> None:
    np.frombuffer(destination, np.float64)[0] = parse_number(bytes(scratch))


def _finish_quoted(spec: FieldSpec, scratch: memoryview, destination: memoryview) -> None:
    """Text in which every quote is written twice."""
    text = bytes(scratch).replace(b'""', b'"')
    check_text(text)
    if len(text) != len(destination):
        raise ValueError("its quotes are not those that were indexed")
    destination[:] = text


def _finish_npy(spec: FieldSpec, scratch: memoryview, destination: memoryview) -> None:
    """Check the header; a ragged field takes an array of any shape of the right size."""
    header = parse_npy_header(scratch)
    if spec.ragged:
        fits = math.prod(header.shape) * spec.dtype.itemsize == destination.nbytes
    else:
        fits = header.shape == spec.shape
    has_dtype = header.dtype.newbyteorder("<") == spec.dtype
    if not fits or not has_dtype or header.num_bytes != scratch.nbytes:
        raise ValueError(
            f"it has shape {list(header.shape)} and type {header.dtype}, the dataset "
            f"{list(spec.shape)} and {spec.dtype}"
        )
    if header.dtype != spec.dtype:
        np.frombuffer(destination, spec.dtype).byteswap(inplace=True)


def _finish_cast(spec: FieldSpec, scratch: memoryview, destination: memoryview) -> None:
    """Numbers of another dtype; a value that this one does not hold is an error."""
    assert spec.cast_from
    codec, dtype = spec.cast_from
    stored: bytearray | memoryview = scratch
    finish = CODECS[codec].finish
    if finish:
        stored = bytearray(dtype.itemsize)
        finish(spec, scratch, memoryview(stored))
    count = destination.nbytes // spec.dtype.itemsize
    if len(stored) != count * dtype.itemsize:
        raise ValueError(f"{len(stored)} bytes are not {count} numbers of {dtype}")
    values = np.frombuffer(stored, dtype)
    with np.errstate(all="ignore"):
        cast = values.astype(spec.dtype)
        if spec.dtype.kind == "f":
            is_lost = np.isinf(cast) & np.isfinite(values)
        else:
            is_lost = (cast.astype(dtype) != values) | ((cast < 0) != (values < 0))
    if is_lost.any():
        lost = values[np.argmax(is_lost)]
        raise ValueError(f"{lost} does not fit into {spec.dtype}; choose a wider dtype in `cast`")
    np.frombuffer(destination, spec.dtype)[:] = cast


def _finish_default(spec: FieldSpec, scratch: memoryview, destination: memoryview) -> None:
    destination[:] = spec.default


CODECS: Mapping[str, Codec] = {
    "bytes": _as_stored(),
    "ids": _as_stored(),  # `first_unknown_id` checks many samples at once
    "text": _as_stored(check_text, check_texts),
    "json": _as_stored(check_json, check_documents),
    "integer": Codec(
        misfits=lambda stored, reserved: np.asarray((stored < 1) | (stored > MAX_NUMBER_CHARS)),
        scratch_bytes=lambda stored, reserved: stored,
        finish=_finish_integer,
    ),
    "number": Codec(
        misfits=lambda stored, reserved: np.asarray((stored < 1) | (stored > MAX_NUMBER_CHARS)),
        scratch_bytes=lambda stored, reserved: stored,
        finish=_finish_number,
    ),
    "quoted": Codec(
        misfits=lambda stored, reserved: np.asarray(stored < reserved),
        scratch_bytes=lambda stored, reserved: stored,
        finish=_finish_quoted,
    ),
    # the header goes to scratch memory, the array straight to its destination
    "npy": Codec(
        misfits=lambda stored, reserved: np.asarray(
            (stored <= reserved) | (stored > reserved + _MAX_NPY_HEADER_BYTES)
        ),
        scratch_bytes=lambda stored, reserved: stored - reserved,
        finish=_finish_npy,
    ),
    "cast": Codec(
        misfits=lambda stored, reserved: np.asarray((stored < 1) != (reserved < 1)),
        scratch_bytes=lambda stored, reserved: stored,
        finish=_finish_cast,
    ),
    "default": Codec(
        misfits=lambda stored, reserved: np.asarray(stored > 0),
        scratch_bytes=None,
        finish=_finish_default,
    ),
}


def has_checks(spec: FieldSpec) -> bool:
    """Whether the bytes of such a field can be wrong; any bytes are `bytes`."""
    return spec.codec not in ("bytes", "indexed", "default")


def check_field(spec: FieldSpec, stored: memoryview, reserved: int) -> memoryview:
    """Check the stored bytes of one sample as they are checked when it is served.

    Returns:
        The served values.

    Args:
        spec: its field.
        stored: all bytes.
        reserved: the bytes that the sample takes in the tensor.

    Raises:
        ValueError: they are no such field.
    """
    codec = CODECS[spec.codec]
    sizes = np.array([len(stored)]), np.array([reserved])
    if codec.misfits(*sizes)[0]:
        raise ValueError(f"its {len(stored)} bytes cannot be read as {spec.codec}")
    before = int(codec.scratch_bytes(*sizes)[0]) if codec.scratch_bytes else 0
    destination = memoryview(bytearray(reserved))
    destination[: len(stored) - before] = stored[before:]
    if codec.finish:
        codec.finish(spec, stored[:before], destination)
    elif spec.codec == "ids" and (unknown := first_unknown_id(spec, destination)) is not None:
        raise ValueError(unknown_id(spec, destination, unknown))
    return destination


def unknown_id(spec: FieldSpec, destination: memoryview, number: int) -> str:
    """The problem of a sample whose id of this number is outside the vocabulary."""
    value = np.frombuffer(destination, spec.dtype)[number]
    return f"id {value} at position {number} is outside the vocabulary of {spec.vocabulary} ids"
