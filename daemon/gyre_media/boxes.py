"""Bounding boxes of objects in images: where they come from, how they move, which of them stay.

In: lists of numbers or JSON, next to an image. Out: [n, 4] or [max_boxes, 4] and the number of
visible boxes.

[Note: Boxes between transforms] The boxes of a sample are float32 [n, 5]: left, top, right and
bottom in pixels of their image, from its upper left corner, and the visible fraction of the box,
from 0 to 1. Pixel (0, 0) reaches from 0 to 1 both ways. A transform that cuts an image
cuts its boxes and multiplies the visible parts. It drops none, so that the number of boxes never
depends on chance: `SanitizeBoxes` drops them at the end, and counts those that stay.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as option
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from gyre_daemon.transforms.recipes import Cost, Field, Sample, Transform, shown
from msgspec import Meta

_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def _parsed(data: npt.NDArray[np.uint8]) -> Any:
    try:
        return _JSON.decode(data.data)
    except msgspec.DecodeError:
        return json.loads(data.tobytes())  # reads the NaN that Python writes, or raises the error


def _values_at(value: Any, key: str) -> Any:
    """The value at a key, with dots between the keys of nested objects.

    In a list, the key is looked up in each element. So `objects.bbox` finds the boxes of
    `{"objects": {"bbox": [...]}}` and of `{"objects": [{"bbox": ...}, ...]}`.
    """

    def at(value: Any, keys: Sequence[str]) -> Any:
        for place, each in enumerate(keys):
            if isinstance(value, list):
                return [at(element, keys[place:]) for element in value]
            if not isinstance(value, dict) or each not in value:
                where = f"{each!r:.100} of the key {key!r:.200}"
                raise ValueError(f"its JSON has nothing under {where}")
            value = value[each]
        return value

    return at(value, key.split(".") if key else [])


def _column(
    found: Any, key: str, num_boxes: int, classes: Sequence[int | str] | None = None
) -> list[Any]:
    """The values of boxes, or their places in a list of classes."""
    if not isinstance(found, list) or len(found) != num_boxes:
        has = f"{len(found)} values" if isinstance(found, list) else f"{found!r:.100}"
        raise ValueError(f"the key {key!r:.100} has {has} for {num_boxes} boxes")
    if classes is None:
        return found
    places = {value: place for place, value in enumerate(classes)}
    for place, value in enumerate(found):
        if not isinstance(value, int | str) or value not in places:
            raise ValueError(f"{key!r:.100} of box {place} is {value!r:.100}, none of `classes`")
    return [places[value] for value in found]


Boxes = npt.NDArray[np.float32]
# From points (x, y, 1) of one image to points of another, which are divided by their last number.
Matrix = npt.NDArray[np.float64]
NUM_COLUMNS = 5
_CORNERS_X, _CORNERS_Y = [0, 2, 2, 0], [1, 1, 3, 3]
_LEAST_DEPTH = 1e-9  # of points that a perspective sends behind the eye


def _boxes_field(length: int | None, image: str) -> Field:
    """The field of boxes with this many per sample."""
    return Field(np.dtype(np.float32), (length, NUM_COLUMNS), is_whole=True, image=image)


def _check_boxes(name: str, field: Field) -> None:
    """Refuse a field that breaks [Note: Boxes between transforms]."""
    if field.dtype != np.float32 or len(field.shape) != 2 or field.shape[1] != NUM_COLUMNS:
        raise ValueError(
            f"{name!r:.100} is {field.dtype.name} {shown(field.shape)}, and boxes that move with "
            "their image are float32 [*, 5], as decode_boxes makes them"
        )


def moved_field(name: str, fields: Mapping[str, Field], image: str) -> Field:
    """The field of boxes that a transform of an image takes along.

    Raises:
        ValueError: they are not boxes, or not of this image.
    """
    field = fields[name]
    _check_boxes(name, field)
    if field.image not in ("", image) and not field.is_whole and fields[image].is_whole:
        raise ValueError(
            f"the boxes {name!r:.100} have moved with {field.image!r:.100}, and {image!r:.100} has "
            "not. Take a copy of the boxes along, made where the image was copied."
        )
    return replace(field, image=image, is_whole=False)


def shifted(x: float, y: float) -> Matrix:
    """The pixels go right and down."""
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


def scaled(x: float, y: float) -> Matrix:
    """Points are that many times further right and down; those of -1 are mirrored at the corner."""
    return np.diag([x, y, 1.0])


def moved(boxes: npt.NDArray[Any], matrix: Matrix, height: int, width: int) -> Boxes:
    """Boxes in the image that their image becomes.

    A box becomes the smallest one around its four corners, cut at the edges of the image.

    Args:
        boxes: float32 [n, 5].
        matrix: where a point of the image goes.
        height: of the image that it becomes.
        width: of the same.
    """
    before = boxes.astype(np.float64)
    around = _around(before[:, :4], matrix)
    inside = _clipped(around, height, width)
    return _as_boxes(inside, before[:, 4] * _visible_parts(inside, around))


def _around(corners: npt.NDArray[np.float64], matrix: Matrix) -> npt.NDArray[np.float64]:
    """The smallest boxes [n, 4] around boxes that a matrix moves."""
    (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
    if b == d == g == h == 0 and i == 1:  # most are, in a third of the time
        made: npt.NDArray[np.float64] = corners * (a, e, a, e) + (c, f, c, f)
        if a < 0 or e < 0:
            left, top = 2 * (a < 0), 1 + 2 * (e < 0)
            made = made[:, [left, top, 2 - left, 4 - top]]
        return made
    x, y = corners[:, _CORNERS_X], corners[:, _CORNERS_Y]
    depth = np.maximum(g * x + h * y + i, _LEAST_DEPTH)
    to_x, to_y = (a * x + b * y + c) / depth, (d * x + e * y + f) / depth
    return np.stack([to_x.min(1), to_y.min(1), to_x.max(1), to_y.max(1)], 1)


def _as_boxes(corners: npt.NDArray[Any], visible: npt.NDArray[Any]) -> Boxes:
    """Boxes of their corners, [n, 4], and of their visible fractions, [n]."""
    made = np.empty((len(corners), NUM_COLUMNS), np.float32)
    made[:, :4], made[:, 4] = corners, visible
    return made


def _clipped(corners: npt.NDArray[Any], height: int, width: int) -> npt.NDArray[Any]:
    """Boxes [n, 4], cut at the edges of an image."""
    inside: npt.NDArray[Any] = np.minimum(np.maximum(corners, 0), (width, height, width, height))
    return inside


def _visible_parts(inside: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The areas [n] of boxes divided by those of others; 0 where the others' are 0."""
    all_of_it = _areas(whole)
    parts = np.zeros(len(whole))
    np.divide(_areas(inside), all_of_it, out=parts, where=all_of_it > 0)
    return parts


def _areas(corners: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The areas [n] of boxes [n, 4], in pixels."""
    found: npt.NDArray[Any] = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    return found


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
    is_random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse names that stand for two fields, or for none."""
        for key, names in (("floats", self.floats), ("classes", self.classes)):
            if unknown := set(names) - self.fields.keys():
                raise ValueError(f"{key} names {min(unknown)!r:.100}, which is not in `fields`")
        if self.to in self.fields:
            raise ValueError(f"`fields` has {self.to!r:.100}, as the boxes are called")

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field, self.image]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        if not fields[self.image].is_whole:
            raise ValueError(
                f"boxes are places in the file of an image, and {self.image!r:.100} has "
                "changed since. Put decode_boxes behind decode_image, which must have no min_size, "
                "and before transforms that cut, resize or mirror."
            )
        stored = fields[self.field]
        if stored.dtype == np.uint8 and stored.shape == (None,):
            made = {name: Field(self._dtype(name), (None,)) for name in self.fields}
            return {self.to: _boxes_field(None, self.image), **made}
        if self.key or self.fields:
            raise ValueError(f"`key` and `fields` are for JSON, and {self.field!r:.100} is numbers")
        is_number = stored.dtype.kind in "iuf"
        if not is_number or len(stored.shape) not in (1, 2) or stored.shape[1:] not in ((), (4,)):
            raise ValueError(
                f"{self.field!r:.100} is {stored.dtype.name} {shown(stored.shape)}, and boxes are "
                "numbers [n, 4] or [n * 4], or JSON"
            )
        length = stored.shape[0]
        if length is not None and len(stored.shape) == 1:
            length //= 4
        return {self.to: _boxes_field(length, self.image)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        stored = sample[self.field]
        height, width = sample[self.image].shape[:2]
        is_json = stored.dtype == np.uint8 and stored.ndim == 1
        document = _parsed(stored) if is_json else None
        found = _values_at(document, self.key) if is_json else stored
        boxes = self._boxes(found, height, width)
        self.put(self.to, boxes, sample, out)
        for name, key in self.fields.items():
            values = _column(_values_at(document, key), key, len(boxes), self.classes.get(name))
            self.put(name, _cast(values, key, self._dtype(name)), sample, out)

    def _boxes(self, found: Any, height: int, width: int) -> npt.NDArray[np.float32]:
        stored = _rows(found, self.field)
        self._require(stored, np.isfinite(stored).all(1), "what is no number")
        corners = _corners(stored, self.format)
        if self.normalized:
            corners = corners * (width, height, width, height)
        self._require(stored, (corners[:, 2:] >= corners[:, :2]).all(1), "a negative length")
        inside = _clipped(corners, height, width)
        if self.outside == "refuse":
            size = f"places outside of the image of {width} x {height} pixels"
            fits = (np.abs(corners - inside) <= _SLACK_PIXELS).all(1)
            self._require(stored, fits, f'{size} (`outside = "clip"` cuts such boxes)')
        visible = _visible_parts(inside, corners) if self.outside == "clip" else _areas(inside) > 0
        return _as_boxes(inside, visible)

    def _require(self, stored: npt.NDArray[Any], holds: Any, what: str) -> None:
        if not holds.all():
            place = int(np.argmin(holds))
            numbers = ", ".join(f"{number:g}" for number in stored[place])
            raise ValueError(f"box {place} of {self.field!r:.100} is [{numbers}], and has {what}")

    def _dtype(self, name: str) -> np.dtype[np.generic]:
        return np.dtype(np.float32 if name in self.floats else np.int64)


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


_ROUNDING = 1e-6  # a box that was only resized may have lost this part of it
_FILL = -1  # no class, so that a loss that takes it for one fails


@dataclass(frozen=True)
class SanitizeBoxes(Transform):
    """Drops boxes that can no longer be seen, and ends their way with their image.

    The others come first, in their order, and `count` says how many they are. Behind them a
    sample has rows without a box, which are 0, and -1 in fields that have negative numbers. So a
    sample has as many rows as it has boxes in storage, which does not depend on chance; or
    `max_boxes`, the same for all samples.

    Attributes:
        boxes: as transforms of images move them, float32 [n, 5]; they become float32 [n, 4].
        fields: others that have a value for each box, [n, ...], such as its class.
        max_boxes: if not 0, how many rows all samples have. One with more boxes is refused.
        min_size: the least width and height of a box, in pixels of the image as it is now.
        min_area: the least area of a box, in such pixels.
        min_visible: the least visible fraction of a box.
        format: of the result, see `DecodeBoxes`.
        normalized: whether the results are parts of the width and the height of the image.
        image: the field with the image, which must still be [height, width, channels] where results
            are normalized; else it is not looked at.
        count: how many boxes stay, int32.
    """

    boxes: str = "boxes"
    fields: tuple[str, ...] = ()
    max_boxes: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    min_size: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    min_area: Annotated[float, Meta(ge=0, le=1e12)] = 1.0
    min_visible: Annotated[float, Meta(ge=0, le=1)] = 0.0
    format: BoxFormat = "xyxy"
    normalized: bool = False
    image: str = "image"
    count: str = "num_boxes"

    cost: ClassVar[Cost] = "light"
    is_random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse a name that stands for two fields."""
        names = [self.boxes, *self.fields, self.count]
        if len(set(names)) < len(names):
            raise ValueError(f"boxes, fields and count are {', '.join(names):.200}; each once")

    @property
    def inputs(self) -> Sequence[str]:
        return [self.boxes, *self.fields, *([self.image] if self.normalized else [])]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        _check_boxes(self.boxes, fields[self.boxes])
        if self.normalized and len(fields[self.image].shape) != 3:
            raise ValueError(f"{self.image!r:.100} is no image; put this before the layout changes")
        length = self.max_boxes or fields[self.boxes].shape[0]
        made = {
            self.boxes: Field(
                np.dtype(np.float32),
                (length, 4),
                image=fields[self.boxes].image,
                is_final=True,
                is_normalized=self.normalized,
            )
        }
        for name in self.fields:
            before = fields[name]
            if not before.shape:
                raise ValueError(f"{name!r:.100} has one number for a sample, none for each box")
            made[name] = Field(before.dtype, (length, *before.shape[1:]))
        return made | {self.count: Field(np.dtype(np.int32), ())}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        boxes: Boxes = sample[self.boxes]
        length = self.max_boxes or len(boxes)
        if len(boxes) > length:
            raise ValueError(
                f"the sample has {len(boxes)} boxes, and max_boxes is {length}; raise max_boxes"
            )
        for name in self.fields:
            if len(sample[name]) != len(boxes):
                raise ValueError(
                    f"{name!r:.100} has {len(sample[name])} values for {len(boxes)} boxes"
                )
        stay = self._stay(boxes)
        left = self._formatted(boxes[stay, :4], sample)
        self.put(self.boxes, _filled(left, length, 0), sample, out)
        for name in self.fields:
            values = sample[name]
            fill = 0 if values.dtype.kind in ("b", "u") else _FILL
            self.put(name, _filled(values[stay], length, fill), sample, out)
        self.put(self.count, np.array(len(left), np.int32), sample, out)

    def _stay(self, boxes: Boxes) -> npt.NDArray[np.bool_]:
        corners = boxes[:, :4].astype(np.float64)
        # float32 rounds both edges, and a box as small as is allowed stays
        sizes = corners[:, 2:] - corners[:, :2] + np.spacing(boxes[:, 2:4])
        visible = boxes[:, NUM_COLUMNS - 1]
        stay: npt.NDArray[np.bool_] = (visible > 0) & (visible >= self.min_visible - _ROUNDING)
        stay &= (sizes >= self.min_size).all(1) & (sizes.prod(1) >= self.min_area)
        return stay

    def _formatted(self, corners: Boxes, sample: Sample) -> Boxes:
        made = corners.astype(np.float64)
        if self.normalized:
            height, width = sample[self.image].shape[:2]
            made /= [width, height, width, height]
        if self.format != "xyxy":
            size = made[:, 2:] - made[:, :2]
            place = made[:, :2] if self.format == "xywh" else (made[:, :2] + made[:, 2:]) / 2
            made = np.hstack([place, size])
        return made.astype(np.float32)


def _filled(values: npt.NDArray[Any], length: int, fill: int) -> npt.NDArray[Any]:
    rows = np.full((length, *values.shape[1:]), fill, values.dtype)
    rows[: len(values)] = values
    return rows
