"""From stored numbers or JSON to boxes that move with their image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as option
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from gyre_daemon.transforms.transform import Cost, Field, Sample, Transform

from gyre_media.boxes.documents import column, parsed, values_at
from gyre_media.boxes.moving import areas, as_boxes, boxes_field, clipped, visible_parts

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
_SLACK_PIXELS = 1.0  # annotations are rounded to this


@dataclass(frozen=True)
class DecodeBoxes(Transform):
    """Makes boxes in pixels of an image of numbers or of JSON.

    It stands behind the transform that decodes the image, before any other changes it. A box with a
    negative width or height, or with NaN or infinity, is refused with its sample.

    Attributes:
        field: numbers, [n, 4] or [n * 4], or JSON.
        format: of the four numbers: `xyxy` for two corners, `xywh` for a corner, width and
            height, as COCO has them, or `cxcywh` for the center, width and height.
        key: of JSON: where the boxes are, such as `objects.bbox`. In a list, each element is asked.
        normalized: whether the numbers are parts of the width and height of the image, as those of
            YOLO are; else they are pixels.
        image: the field with the image.
        to: the boxes, float32 [n, 5]; see [Note: Boxes between transforms].
        fields: other fields that JSON has for each box, int64 [n]: keys by the names of the fields.
        floats: the float32 ones of `fields`.
        classes: for `fields` with texts or numbers with gaps: all values in order; the field has
            the index of a value in this list.
        outside: `refuse` boxes that reach more than a pixel beyond the image, or `clip` them.
    """

    field: str
    format: BoxFormat
    key: str = ""
    normalized: bool = False
    image: str = "image"
    to: str = "boxes"
    fields: dict[str, str] = option(default_factory=dict)
    floats: tuple[str, ...] = ()
    classes: dict[str, tuple[int | str, ...]] = option(default_factory=dict)
    outside: Literal["refuse", "clip"] = "refuse"

    cost: ClassVar[Cost] = "light"

    def __post_init__(self) -> None:
        """Refuse names that stand for two fields, or for none."""
        for key, names in (("floats", self.floats), ("classes", self.classes)):
            if unknown := set(names) - self.fields.keys():
                raise ValueError(f"{key} names {min(unknown)!r:.100}, which is not in `fields`")
        if self.to in self.fields:
            raise ValueError(f"`fields` has {self.to!r:.100}, as the boxes are called")

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`."""
        return [self.field, self.image]

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return False

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        if not fields[self.image].is_whole:
            raise ValueError(
                f"boxes are places in the file of an image, and {self.image!r:.100} is no longer "
                "what its file has. Put decode_boxes behind decode_image, which must have no "
                "min_size, and before what cuts, resizes or mirrors."
            )
        stored = fields[self.field]
        if _is_json(stored):
            made = {name: Field(self._dtype(name), (None,)) for name in self.fields}
            return {self.to: boxes_field(None, self.image), **made}
        if self.key or self.fields:
            raise ValueError(f"`key` and `fields` are for JSON, and {self.field!r:.100} is numbers")
        is_number = stored.dtype.kind in "iuf"
        if not is_number or len(stored.shape) not in (1, 2) or stored.shape[1:] not in ((), (4,)):
            shape = ", ".join("*" if length is None else str(length) for length in stored.shape)
            raise ValueError(
                f"{self.field!r:.100} is {stored.dtype.name} [{shape}], and boxes are numbers "
                "[n, 4] or [n * 4], or JSON"
            )
        length = stored.shape[0]
        if length is not None and len(stored.shape) == 1:
            length //= 4
        return {self.to: boxes_field(length, self.image)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        stored = sample[self.field]
        height, width = sample[self.image].shape[:2]
        if stored.dtype == np.uint8 and stored.ndim == 1:
            document = parsed(stored)
            found = values_at(document, self.key)
        else:
            document, found = None, stored
        boxes = self._boxes(found, height, width)
        self.put(self.to, boxes, sample, out)
        for name, key in self.fields.items():
            values = column(values_at(document, key), key, len(boxes), self.classes.get(name))
            self.put(name, _cast(values, key, self._dtype(name)), sample, out)

    def _boxes(self, found: Any, height: int, width: int) -> npt.NDArray[np.float32]:
        stored = _rows(found, self.field)
        self._require(stored, np.isfinite(stored).all(1), "what is no number")
        corners = _corners(stored, self.format)
        if self.normalized:
            corners = corners * (width, height, width, height)
        self._require(stored, (corners[:, 2:] >= corners[:, :2]).all(1), "a negative length")
        inside = clipped(corners, height, width)
        if self.outside == "refuse":
            size = f"places outside of the image of {width} x {height} pixels"
            fits = (np.abs(corners - inside) <= _SLACK_PIXELS).all(1)
            self._require(stored, fits, f'{size} (`outside = "clip"` cuts such boxes)')
        visible = visible_parts(inside, corners) if self.outside == "clip" else areas(inside) > 0
        return as_boxes(inside, visible)

    def _require(self, stored: npt.NDArray[Any], holds: Any, what: str) -> None:
        if not holds.all():
            place = int(np.argmin(holds))
            numbers = ", ".join(f"{number:g}" for number in stored[place])
            raise ValueError(f"box {place} of {self.field!r:.100} is [{numbers}], and has {what}")

    def _dtype(self, name: str) -> np.dtype[np.generic]:
        return np.dtype(np.float32 if name in self.floats else np.int64)


def _is_json(stored: Field) -> bool:
    return stored.dtype == np.uint8 and stored.shape == (None,)


def _rows(found: Any, name: str) -> npt.NDArray[np.float64]:
    """Float64 [n, 4] of lists or of an array."""
    if isinstance(found, list):
        for place, each in enumerate(found):
            is_box = isinstance(each, list) and len(each) == 4
            if not is_box or not set(map(type, each)) <= {int, float}:
                raise ValueError(
                    f"box {place} of {name!r:.100} is {each!r:.100}, and not a list of 4 numbers"
                )
    elif not isinstance(found, np.ndarray):
        raise ValueError(f"the boxes of {name!r:.100} are {found!r:.100}, and no list")
    numbers = np.asarray(found, np.float64)
    if numbers.size % 4:
        raise ValueError(f"{name!r:.100} has {numbers.size} numbers, and boxes have 4 each")
    return numbers.reshape(-1, 4)


def _corners(stored: npt.NDArray[np.float64], kind: BoxFormat) -> npt.NDArray[np.float64]:
    if kind == "xyxy":
        return stored
    place, size = stored[:, :2], stored[:, 2:]
    begin = place if kind == "xywh" else place - size / 2
    return np.hstack([begin, begin + size])


def _cast(values: list[Any], key: str, dtype: np.dtype[np.generic]) -> npt.NDArray[Any]:
    """The values of the boxes as numbers."""
    kinds = (int, float) if dtype.kind == "f" else (int, bool)
    for place, value in enumerate(values):
        if type(value) not in kinds:
            advice = {
                float: "; name the field in `floats`",
                str: "; list all its values in `classes`",
            }.get(type(value), "")
            raise ValueError(f"{key!r:.100} of box {place} is {value!r:.100}{advice}")
    return np.array(values, dtype)
