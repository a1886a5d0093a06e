"""The fields of a dataset as its operator wants them: renamed, and cast to other dtypes. Pure.

It works alike for every format, because it changes what is said of the stored bytes and not where
they lie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre_daemon.datasets.codecs import check_field
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.base import PRESENT_SUFFIX, SHAPE_SUFFIX, is_servable
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.permutation import Int64Array

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
    specs = [stored[place] for place in ragged]
    num_bytes = np.concatenate(parts)
    return [
        _histogram(spec.name, num_bytes[:, column] // max(spec.element_bytes, 1))
        for column, spec in enumerate(specs)
    ]


def _histogram(field: str, lengths: Int64Array) -> LengthHistogram:
    least, greatest = int(lengths.min()), int(lengths.max())
    bounds = _bounds(least, greatest)
    counts, _ = np.histogram(lengths, np.array(bounds, np.float64))
    return LengthHistogram(
        field, bounds, counts.tolist(), least, greatest, float(lengths.mean()), len(lengths)
    )


def _bounds(least: int, greatest: int) -> list[int]:
    """Whole numbers, at most 21; the last is beyond the greatest length."""
    if greatest > _MIN_RATIO_OF_LOGARITHMIC * max(least, 1):
        bounds = np.geomspace(max(least, 1), greatest + 1, _MAX_BINS + 1)
        bounds[0] = least
    else:
        bounds = np.linspace(least, greatest + 1, min(_MAX_BINS, greatest - least + 1) + 1)
    rounded = np.unique(np.round(bounds).astype(np.int64))
    return [least, *rounded[(rounded > least) & (rounded <= greatest)].tolist(), greatest + 1]
