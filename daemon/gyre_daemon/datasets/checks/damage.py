"""Damaged samples: found in a shard's bytes, kept, counted and reported."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.codecs import check_field, has_checks
from gyre_daemon.datasets.formats.base import Arrays, FieldSpec, array_of
from gyre_daemon.errors import CorruptSample

CheckMedia = Callable[[str, memoryview], str]  # see `transforms.media.check_media`
_MEDIA = ("image", "audio", "video")
_MAX_KINDS = 20  # of reasons why media were not decoded
_Integers = npt.NDArray[np.int64]

# Reasons kept of one shard. Beyond it, only the numbers of damaged samples are.
_MAX_REASONS, _MAX_REASON_CHARS = 1000, 300
# Bytes read at once where samples are smaller. More would read the bytes between fields
# that are far apart; less costs a call for every few small samples.
_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged sample.

    Attributes:
        sample: its number in the shard, or its id in the dataset.
        offset: the byte of the shard at which it, or its damaged field, begins.
        reason: the problem.
    """

    sample: int
    offset: int
    reason: str


def to_arrays(damages: Sequence[Damage]) -> Arrays:
    """The damages as they are stored and sent between processes."""
    reasons = [each.reason[:_MAX_REASON_CHARS] for each in damages[:_MAX_REASONS]]
    return {
        "sample": np.array([each.sample for each in damages], np.int64),
        "offset": np.array([each.offset for each in damages], np.int64),
        "reasons": np.frombuffer(json.dumps(reasons).encode(), np.uint8),
    }


def from_arrays(arrays: Arrays, num_samples: int) -> list[Damage]:
    """The damages in a shard of `num_samples`, from arrays that may be forged.

    Raises:
        ValueError: they are no damages of such a shard.
    """
    samples, offsets = (array_of(arrays, name, np.int64) for name in ("sample", "offset"))
    if len(samples) != len(offsets) or (offsets < 0).any():
        raise ValueError("its list of damaged samples points outside the shard")
    if len(samples) and not (
        samples[0] >= 0 and samples[-1] < num_samples and (np.diff(samples) > 0).all()
    ):
        raise ValueError("its damaged samples are not those of the shard")
    text = array_of(arrays, "reasons", np.uint8)
    if len(text) > _MAX_REASONS * _MAX_REASON_CHARS * 12 + 2:
        raise ValueError("its reasons are too long")
    try:
        reasons = msgspec.json.decode(text.tobytes(), type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError("its reasons cannot be read") from error
    reasons += ["damaged, as others of this shard"] * (len(samples) - len(reasons))
    return [
        Damage(*each) for each in zip(samples.tolist(), offsets.tolist(), reasons, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class ShardFields:
    """The fields of n samples of one shard that can be checked.

    Attributes:
        specs: F fields.
        start: int64 [n, F], the first byte of each in the shard.
        size: int64 [n, F], stored bytes.
        reserved: int64 [n, F], the bytes that each takes in its tensor.
        skipped: bool [n, F], which are not there, or are known to be damaged.
        check_media: decodes images and sounds; None where their bytes are not looked at.
    """

    specs: tuple[FieldSpec, ...]
    start: _Integers
    size: _Integers
    reserved: _Integers
    skipped: npt.NDArray[np.bool_]
    check_media: CheckMedia | None = None

    def run(self, shard: str, file: BinaryIO) -> Arrays:
        """Check every field of every sample; returns arrays as `to_arrays`, with media.

        Args:
            shard: its name.
            file: its bytes, which are read from their beginning to their end.

        Raises:
            CorruptSample: the shard ends before its last sample.
        """
        reader = _ForwardReader(shard, file)
        found: dict[int, Damage] = {}
        media: Counter[str] = Counter()  # by why they were not decoded; empty for those that were
        order = np.argsort(self.start, axis=None, kind="stable")
        order = order[~self.skipped.ravel()[order]]
        columns = (order, self.start.ravel()[order], self.size.ravel()[order])
        reserved = self.reserved.ravel()[order].tolist()
        for (place, start, size), room in zip(
            zip(*(column.tolist() for column in columns), strict=True), reserved, strict=True
        ):
            sample, number = divmod(place, len(self.specs))
            spec = self.specs[number]
            if spec.media_type.startswith("video/"):
                media["video is not decoded here"] += 1
                continue
            try:
                if self.check_media and is_media(spec):
                    media[self.check_media(spec.media_type, reader.read(start, size))] += 1
                    continue
                check_field(spec, reader.read(start, size), room)
            except ValueError as error:
                found.setdefault(sample, Damage(sample, start, f"field {spec.name}: {error}"))
        arrays = to_arrays([found[sample] for sample in sorted(found)])
        kinds = media.most_common(_MAX_KINDS)
        return {**arrays, "media": np.frombuffer(json.dumps(kinds).encode(), np.uint8)}


def media_of(arrays: Arrays) -> dict[str, int]:
    """How many images and sounds were decoded, under "", and how many not, by the reason.

    Raises:
        ValueError: the arrays are not those of a check.
    """
    text = array_of(arrays, "media", np.uint8)
    return dict(msgspec.json.decode(text.tobytes(), type=list[tuple[str, int]]))


class _ForwardReader:
    """Reads ranges of a file whose starts rise; the file may be a stream."""

    def __init__(self, shard: str, file: BinaryIO) -> None:
        self._shard = shard
        self._file = file
        self._can_seek = file.seekable()
        self._base = 0  # where the kept bytes begin
        self._kept = bytearray()

    def read(self, start: int, size: int) -> memoryview:
        """The bytes `[start, start + size)`; no earlier byte can be read after this.

        Raises:
            CorruptSample: the file ends before.
        """
        end = self._base + len(self._kept)
        if start > end and self._can_seek:
            self._file.seek(start)
            self._base, self._kept = start, bytearray()
        while (end := self._base + len(self._kept)) < start + size:
            if end <= start:
                self._base, self._kept = end, bytearray()
            piece = self._file.read(max(_READ_BYTES, min(start + size - end, 16 << 20)))
            if not piece:
                raise CorruptSample(
                    f"shard {self._shard} ends at byte {end}, before the end of a sample",
                    {"shard": self._shard, "offset": end, "reason": "it ends inside a sample"},
                )
            self._kept += piece
        first = start - self._base
        data = memoryview(bytes(self._kept[first : first + size]))
        if first > _READ_BYTES:
            del self._kept[:first]
            self._base = start
        return data


def is_media(spec: FieldSpec) -> bool:
    """Whether a field has encoded images, sounds or videos."""
    return spec.codec == "bytes" and spec.media_type.partition("/")[0] in _MEDIA


def checkable(specs: Sequence[FieldSpec], *, with_media: bool) -> list[int]:
    """The numbers of the stored fields whose bytes can be wrong."""
    return [
        number
        for number, spec in enumerate(specs)
        if has_checks(spec) or (with_media and is_media(spec))
    ]
