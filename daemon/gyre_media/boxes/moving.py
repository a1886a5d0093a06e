"""Boxes between transforms, and how they move with the pixels of their image. Pure.

[Note: Boxes between transforms] The boxes of a sample are float32 [n, 5]: left, top, right and
bottom in pixels of their image, from its upper left corner, and the visible fraction of the box,
from 0 to 1. Pixel (0, 0) reaches from 0 to 1 both ways. A transform that cuts an image
cuts its boxes and multiplies the visible parts. It drops none, so that the number of boxes never
depends on chance: `SanitizeBoxes` drops them at the end, and counts those that stay.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from gyre_daemon.transforms.transform import Field

Boxes = npt.NDArray[np.float32]
# From points (x, y, 1) of one image to points of another, which are divided by their last number.
Matrix = npt.NDArray[np.float64]
NUM_COLUMNS = 5
_CORNERS_X, _CORNERS_Y = [0, 2, 2, 0], [1, 1, 3, 3]
_LEAST_DEPTH = 1e-9  # of points that a perspective sends behind the eye


def boxes_field(length: int | None, image: str) -> Field:
    """The field of boxes with this many per sample."""
    return Field(np.dtype(np.float32), (length, NUM_COLUMNS), is_whole=True, image=image)


def check_boxes(name: str, field: Field) -> None:
    """Refuse a field that breaks [Note: Boxes between transforms].

    Raises:
        ValueError: it is not.
    """
    if field.dtype != np.float32 or len(field.shape) != 2 or field.shape[1] != NUM_COLUMNS:
        shape = ", ".join("*" if length is None else str(length) for length in field.shape)
        raise ValueError(
            f"{name!r:.100} is {field.dtype.name} [{shape}], and boxes that move with their image "
            "are float32 [*, 5], as decode_boxes makes them"
        )


def moved_field(name: str, fields: Mapping[str, Field], image: str) -> Field:
    """The field of boxes that a transform of an image takes along.

    Raises:
        ValueError: they are not boxes, or not of this image.
    """
    field = fields[name]
    check_boxes(name, field)
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
    inside = clipped(around, height, width)
    return as_boxes(inside, before[:, 4] * visible_parts(inside, around))


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


def as_boxes(corners: npt.NDArray[Any], visible: npt.NDArray[Any]) -> Boxes:
    """Boxes of their corners, [n, 4], and of their visible fractions, [n]."""
    made = np.empty((len(corners), NUM_COLUMNS), np.float32)
    made[:, :4], made[:, 4] = corners, visible
    return made


def clipped(corners: npt.NDArray[Any], height: int, width: int) -> npt.NDArray[Any]:
    """Boxes [n, 4], cut at the edges of an image."""
    inside: npt.NDArray[Any] = np.minimum(np.maximum(corners, 0), (width, height, width, height))
    return inside


def visible_parts(inside: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The areas [n] of boxes divided by those of others; 0 where the others' are 0."""
    all_of_it = areas(whole)
    parts = np.zeros(len(whole))
    np.divide(areas(inside), all_of_it, out=parts, where=all_of_it > 0)
    return parts


def areas(corners: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The areas [n] of boxes [n, 4], in pixels."""
    found: npt.NDArray[Any] = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    return found
