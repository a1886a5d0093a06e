"""From stored bytes to tensors: a codec for each way to store a field, and the casts of operators.

Bytes that are stored as the tensor lies in memory are read straight to their destination in the
batch. A codec says how many of a sample's stored bytes come before them and are read into scratch
memory instead (an npy header, the digits of a number), and checks or converts the bytes once all of
them are there.

An operator renames fields and casts them to other dtypes, alike for every format: that changes what
is said of the stored bytes, and not where they lie.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.base import PRESENT_SUFFIX, SHAPE_SUFFIX, is_servable
from gyre_daemon.datasets.formats.npy import parse_npy_header
from gyre_daemon.datasets.formats.values import (
    MAX_NUMBER_CHARS,
    check_documents,
    check_json,
    check_text,
    check_texts,
    lossless_cast,
    parse_integer,
    parse_number,
)
from gyre_daemon.errors import ConfigError
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
    check_all: Callable[[FieldSpec, memoryview, Int64Array], None] | None = None


def _checked(
    check: Callable[[memoryview], None], check_all: Callable[[memoryview, Int64Array], None]
) -> Codec:
    """Bytes that are served as they are stored, and checked before."""
    return Codec(
        misfits=np.not_equal,
        scratch_bytes=None,
        finish=lambda spec, scratch, destination: check(destination),
        check_all=lambda spec, data, begins: check_all(data, begins),
    )


def _check_ids(spec: FieldSpec, scratch: memoryview, destination: memoryview) -> None:
    # read as unsigned numbers, negative ids are beyond every vocabulary
    ids = np.frombuffer(destination, f"<u{spec.dtype.itemsize}")
    if len(ids) and ids.max() >= spec.vocabulary:
        number = int(np.argmax(ids >= spec.vocabulary))
        value = np.frombuffer(destination, spec.dtype)[number]
        raise ValueError(
            f"id {value} at position {number} is outside the vocabulary of {spec.vocabulary} ids"
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
    try:
        cast = lossless_cast(np.frombuffer(stored, dtype), spec.dtype)
    except ValueError as error:
        raise ValueError(f"{error}; choose a wider dtype in `cast`") from None
    np.frombuffer(destination, spec.dtype)[:] = cast


def _finish_default(spec: FieldSpec, scratch: memoryview, destination: memoryview) -> None:
    destination[:] = spec.default


def _from_scratch(
    finish: Finish, misfits: Callable[[Int64Array, Int64Array], npt.NDArray[np.bool_]]
) -> Codec:
    """Bytes that all go to scratch memory, and are converted from there."""
    return Codec(misfits, lambda stored, reserved: stored, finish)


def _misfits_number(stored: Int64Array, reserved: Int64Array) -> npt.NDArray[np.bool_]:
    return np.asarray((stored < 1) | (stored > MAX_NUMBER_CHARS))


CODECS: Mapping[str, Codec] = {
    "bytes": Codec(np.not_equal, scratch_bytes=None, finish=None),
    "ids": Codec(
        misfits=np.not_equal,
        scratch_bytes=None,
        finish=_check_ids,
        check_all=lambda spec, data, begins: _check_ids(spec, data, data),
    ),
    "text": _checked(check_text, check_texts),
    "json": _checked(check_json, check_documents),
    "integer": _from_scratch(_finish_integer, _misfits_number),
    "number": _from_scratch(_finish_number, _misfits_number),
    "quoted": _from_scratch(_finish_quoted, np.less),
    # the header goes to scratch memory, the array straight to its destination
    "npy": Codec(
        misfits=lambda stored, reserved: np.asarray(
            (stored <= reserved) | (stored > reserved + _MAX_NPY_HEADER_BYTES)
        ),
        scratch_bytes=np.subtract,
        finish=_finish_npy,
    ),
    "cast": _from_scratch(
        _finish_cast, lambda stored, reserved: np.asarray((stored < 1) != (reserved < 1))
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


def misfit_reason(spec: FieldSpec, num_bytes: int) -> str:
    """Why so many stored bytes cannot be such a field; see `Codec.misfits`."""
    stored = spec.cast_from[0] if spec.cast_from else spec.codec
    if stored not in ("integer", "number"):
        return f"its {num_bytes} bytes cannot be read as {stored}"
    if num_bytes:
        return f"its {num_bytes} characters are no number; one has at most {MAX_NUMBER_CHARS}"
    reason = "its text is empty, which is no number"
    if spec.cast_from:
        reason += ". In CSV, `types` in place of `cast` makes empty cells 0, and not present"
    return reason


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
        raise ValueError(misfit_reason(spec, len(stored)))
    before = int(codec.scratch_bytes(*sizes)[0]) if codec.scratch_bytes else 0
    destination = memoryview(bytearray(reserved))
    destination[: len(stored) - before] = stored[before:]
    if codec.finish:
        codec.finish(spec, stored[:before], destination)
    return destination


_AT_ONCE = 1 << 16  # samples in one look, which bounds the memory
_TEXTS = ("text", "quoted")
_NUMBERS = ("bytes", "integer", "number")
# Samples to look at, evenly spaced: a larger dataset would keep a core for seconds, and its
# histogram would look the same.
_MAX_SAMPLES = 1_000_000
_MAX_BINS = 20
_MAX_FIELDS = 100
# Where the longest is this many times the shortest, the bins widen by a factor each.
_MIN_RATIO_OF_LOGARITHMIC = 50


CASTS = (
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)


def chosen_fields(
    fields: Sequence[FieldSpec], rename: Mapping[str, str], cast: Mapping[str, str]
) -> Sequence[FieldSpec]:
    """The fields under their new names and with their new dtypes, in the same order.

    Args:
        fields: of an index.
        rename: new names, by the old ones.
        cast: dtypes, by the new names.

    Raises:
        ConfigError: there is no such field, a name is taken, or the field cannot be cast.
    """
    if not rename and not cast:
        return fields
    _check_known("rename", rename, [spec.name for spec in fields])
    new = [replace(spec, name=_new_name(spec, fields, rename)) for spec in fields]
    names = [spec.name for spec in new]
    for old, name in rename.items():
        if not is_servable(name) or names.count(name) > 1:
            raise ConfigError(f"`rename` cannot call {old!r:.100} {name!r:.100}: it is taken")
    _check_known("cast", cast, names)
    return [_cast(spec, cast[spec.name]) if spec.name in cast else spec for spec in new]


def with_lengths(
    index: SampleIndex, fields: Sequence[FieldSpec], names: Sequence[str], ragged: Sequence[str]
) -> Sequence[FieldSpec]:
    """The fields, where lists of numbers know the length that all samples have.

    Lists of uint8 are bytes, which stay ragged, and so are token ids of documents. All samples are
    looked at, as long as some field has one length.

    Args:
        index: at least one sample.
        fields: of the index, as they are served.
        names: theirs in the index.
        ragged: those of `names` that stay ragged.

    Raises:
        ConfigError: there is no such field.
    """
    _check_known("lengths", dict.fromkeys(ragged, ""), names)
    stored = stored_fields(fields)
    places = np.array(
        [
            place
            for place, spec in enumerate(stored)
            if _is_list(spec) and names[place] not in ragged
        ],
        np.int64,
    )
    if not len(places):
        return fields
    num_bytes = index.locate(np.zeros(1, np.int64)).tensor_bytes[0, places]
    places, num_bytes = places[num_bytes > 0], num_bytes[num_bytes > 0]
    for begin in range(0, index.num_samples, _AT_ONCE):
        if not len(places):
            return fields
        ids = np.arange(begin, min(begin + _AT_ONCE, index.num_samples))
        is_one = (index.locate(ids).tensor_bytes[:, places] == num_bytes).all(axis=0)
        places, num_bytes = places[is_one], num_bytes[is_one]
    lengths = dict(zip(places.tolist(), num_bytes.tolist(), strict=True))
    return [
        replace(spec, length=lengths[place] // spec.element_bytes) if place in lengths else spec
        for place, spec in enumerate(fields)
    ]


def _is_list(spec: FieldSpec) -> bool:
    """Whether the samples are lists of numbers, which may be cast, and no bytes."""
    stored = spec.cast_from[0] if spec.cast_from else spec.codec
    is_bytes = spec.dtype == np.uint8 and not spec.shape and not spec.cast_from
    return spec.ragged and stored == "bytes" and not is_bytes and not spec.token_ids


def _check_known(key: str, wanted: Mapping[str, str], names: Sequence[str]) -> None:
    for name in wanted:
        if name not in names:
            raise ConfigError(
                f"`{key}` has {name!r:.100}, and there is no such field; there are "
                f"{', '.join(names)}"
            )


def _new_name(spec: FieldSpec, fields: Sequence[FieldSpec], rename: Mapping[str, str]) -> str:
    """Its name; a property of another field follows the name of that one."""
    for suffix in (PRESENT_SUFFIX, SHAPE_SUFFIX):
        owner = spec.name.removesuffix(suffix)
        if spec.codec == "indexed" and owner != spec.name and owner in rename:
            return rename[owner] + suffix
    return rename.get(spec.name, spec.name)


def _cast(spec: FieldSpec, dtype: str) -> FieldSpec:
    if dtype not in CASTS:
        raise ConfigError(
            f"`cast` of {spec.name!r:.100} is {dtype!r:.100}; it must be one of {', '.join(CASTS)}"
        )
    wanted = np.dtype(dtype)
    if spec.codec in _TEXTS and spec.ragged:
        stored, codec = ("<f8", "number") if wanted.kind == "f" else ("<i8", "integer")
        read = FieldSpec(spec.name, np.dtype(stored), (), ragged=False, codec=codec)  # type: ignore[arg-type]
        filled = read
    else:
        read, filled = spec, replace(spec, codec="bytes")
    if spec.forms:
        forms = tuple(_cast_form(form, filled, dtype) for form in spec.forms)
        return replace(_cast(replace(spec, forms=()), dtype), forms=forms)
    if read.codec == "cast":
        return replace(read, dtype=wanted)
    is_list = read.ragged and read.codec == "bytes" and read.dtype != np.uint8
    is_single = not read.ragged and read.codec in _NUMBERS
    if not (is_list or is_single) or read.dtype.kind not in "iufb":
        raise ConfigError(
            f"`cast` cannot change {spec.name!r:.100}: only numbers, arrays, lists of numbers, and "
            "text with a number can be cast"
        )
    return replace(read, dtype=wanted, codec="cast", cast_from=(read.codec, read.dtype))


def _cast_form(form: FieldSpec, filled: FieldSpec, dtype: str) -> FieldSpec:
    """How a schema stores a field; a default becomes a number of the other dtype.

    Args:
        form: how it stores it, without a cast.
        filled: the default: a number as a tensor has it, or as text.
        dtype: the other one.
    """
    if form.codec != "default":
        return _cast(form, dtype)
    cast = _cast(replace(filled, forms=()), dtype)
    num_bytes = cast.element_bytes
    if cast.ragged:
        num_bytes *= len(form.default) // filled.element_bytes
    try:
        value = check_field(cast, memoryview(form.default), num_bytes)
    except ValueError as error:
        raise ConfigError(
            f"`cast` of {form.name!r:.100} is {dtype}, and its default cannot be cast: {error}"
        ) from error
    return replace(cast, codec="default", default=bytes(value))


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """The lengths of one ragged field, in elements.

    Attributes:
        field: its name.
        bounds: K + 1 rising numbers; bin i counts the lengths in `[bounds[i], bounds[i + 1])`.
        counts: of K bins.
        least: the shortest length.
        greatest: the longest.
        mean: of all that were looked at.
        num_samples: how many were looked at.
    """

    field: str
    bounds: Sequence[int]
    counts: Sequence[int]
    least: int
    greatest: int
    mean: float
    num_samples: int


def length_histograms(
    index: SampleIndex, fields: Sequence[FieldSpec] | None = None
) -> list[LengthHistogram]:
    """A histogram of each ragged field, of the first hundred; waits for seconds at most."""
    stored = stored_fields(index.fields if fields is None else fields)
    ragged = [place for place, spec in enumerate(stored) if spec.ragged]
    ragged = ragged[:_MAX_FIELDS]
    if not ragged or not index.num_samples:
        return []
    num_samples = min(index.num_samples, _MAX_SAMPLES)
    ids = np.arange(num_samples) * index.num_samples // num_samples
    parts = [
        index.locate(ids[begin : begin + _AT_ONCE]).tensor_bytes[:, ragged]
        for begin in range(0, num_samples, _AT_ONCE)
    ]
    histograms = []
    for place, num_bytes in zip(ragged, np.concatenate(parts).T, strict=True):
        lengths = num_bytes // max(stored[place].element_bytes, 1)
        least, greatest, mean = int(lengths.min()), int(lengths.max()), float(lengths.mean())
        bounds = _bounds(least, greatest)
        counts = np.histogram(lengths, np.array(bounds, np.float64))[0].tolist()
        name = stored[place].name
        histograms.append(LengthHistogram(name, bounds, counts, least, greatest, mean, num_samples))
    return histograms


def _bounds(least: int, greatest: int) -> list[int]:
    """Whole numbers, at most 21; the last is beyond the greatest length."""
    if greatest > _MIN_RATIO_OF_LOGARITHMIC * max(least, 1):
        bounds = np.geomspace(max(least, 1), greatest + 1, _MAX_BINS + 1)
        bounds[0] = least
    else:
        bounds = np.linspace(least, greatest + 1, min(_MAX_BINS, greatest - least + 1) + 1)
    rounded = np.unique(np.round(bounds).astype(np.int64))
    return [least, *rounded[(rounded > least) & (rounded <= greatest)].tolist(), greatest + 1]
