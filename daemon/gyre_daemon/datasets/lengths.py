"""How long the samples of a dataset are: a histogram of each ragged field. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, stored_fields
from gyre_daemon.order.shuffle.permutation import Int64Array

# Samples that are looked at, evenly spaced: a larger dataset would keep a core for seconds, and its
# histogram would look the same.
_MAX_SAMPLES, _AT_ONCE = 1_000_000, 1 << 16
_MAX_BINS = 20
_MAX_FIELDS = 100
# Where the longest is this many times the shortest, the bins widen by a factor each.
_MIN_RATIO_OF_LOGARITHMIC = 50


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
    """Whole numbers, at most 21, of which the last is beyond the greatest length."""
    if greatest > _MIN_RATIO_OF_LOGARITHMIC * max(least, 1):
        bounds = np.geomspace(max(least, 1), greatest + 1, _MAX_BINS + 1)
        bounds[0] = least
    else:
        bounds = np.linspace(least, greatest + 1, min(_MAX_BINS, greatest - least + 1) + 1)
    rounded = np.unique(np.round(bounds).astype(np.int64))
    return [least, *rounded[(rounded > least) & (rounded <= greatest)].tolist(), greatest + 1]
