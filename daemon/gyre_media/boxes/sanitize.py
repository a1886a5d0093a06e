"""Drops boxes that are too small or barely visible, and converts the others for a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from gyre_daemon.transforms.transform import Cost, Field, Sample, Transform
from msgspec import Meta

from gyre_media.boxes.decode_boxes import BoxFormat
from gyre_media.boxes.moving import NUM_COLUMNS, Boxes, check_boxes

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

    def __post_init__(self) -> None:
        """Refuse a name that stands for two fields."""
        names = [self.boxes, *self.fields, self.count]
        if len(set(names)) < len(names):
            raise ValueError(f"boxes, fields and count are {', '.join(names):.200}; each once")

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`."""
        return [self.boxes, *self.fields, *([self.image] if self.normalized else [])]

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return False

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        check_boxes(self.boxes, fields[self.boxes])
        if self.normalized and len(fields[self.image].shape) != 3:
            raise ValueError(f"{self.image!r:.100} is no image; put it before what lays it out")
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
        """See `Transform.apply`."""
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
