"""Turned and tilted images and their boxes, compared with Pillow by formulas of torchvision."""

import math
from typing import Any

import numpy as np
import pytest
from gyre_daemon.config.schema import parse_options
from gyre_daemon.errors import ConfigError
from gyre_daemon.transforms import Field, Transform
from gyre_media.boxes import moved
from gyre_media.geometry import (
    RandomAffine,
    RandomPerspective,
    perspective,
    warped,
)
from PIL import Image

from tests.unit.transforms.test_daemon_boxes import CORNERS, HEIGHT, WIDTH, painted
from tests.unit.transforms.test_daemon_images import picture

Array = np.ndarray[Any, Any]
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def inverse_of_torchvision(
    center: tuple[float, float],
    angle: float,
    translate: tuple[float, float],
    scale: float,
    shear: tuple[float, float],
) -> list[float]:
    """`_get_inverse_affine_matrix` of torchvision.transforms.functional, as it is written there."""
    rot, sx, sy = math.radians(angle), math.radians(shear[0]), math.radians(shear[1])
    (cx, cy), (tx, ty) = center, translate
    a = math.cos(rot - sy) / math.cos(sy)
    b = -math.cos(rot - sy) * math.tan(sx) / math.cos(sy) - math.sin(rot)
    c = math.sin(rot - sy) / math.cos(sy)
    d = -math.sin(rot - sy) * math.tan(sx) / math.cos(sy) + math.cos(rot)
    matrix = [x / scale for x in (d, -b, 0.0, -c, a, 0.0)]
    matrix[2] += matrix[0] * (-cx - tx) + matrix[1] * (-cy - ty) + cx
    matrix[5] += matrix[3] * (-cx - tx) + matrix[4] * (-cy - ty) + cy
    return matrix


class Drawing:
    """A generator that returns what it is told, and remembers what it was asked for."""

    def __init__(self, *numbers: float) -> None:
        self.numbers, self.ranges = list(numbers), list[tuple[float, float]]()

    def uniform(self, least: float, greatest: float) -> float:
        self.ranges.append((least, greatest))
        return self.numbers.pop(0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("angle", "translate", "scale", "shear"),
    [
        (30.0, (0, 0), 1.0, (0, 0)),
        (-77.5, (5, -3), 0.7, (0, 0)),
        (12.0, (-4, 9), 1.4, (20.0, -15.0)),
        (0.0, (3, 2), 1.0, (0, 0)),
    ],
)
def test_pixels_are_those_of_pillow_by_the_matrix_of_torchvision(
    angle: float,
    translate: tuple[int, int],
    scale: float,
    shear: tuple[float, float],
    interpolation: Any,
    channels: int,
) -> None:
    image = picture(50, 71)[:, :, :channels]
    sides = (-40.0, 40.0, -50.0, 50.0)
    transform = RandomAffine(90, (0.2, 0.3), (0.5, 2), sides, interpolation=interpolation, fill=9)
    rng: Any = Drawing(angle, translate[0] + 0.4, translate[1] - 0.4, scale, *shear)
    sample: dict[str, Array] = {"image": image}
    transform.apply(sample, rng, {})
    pairs = [(-90, 90), (-14.2, 14.2), (-15, 15), (0.5, 2), (-40, 40), (-50, 50)]
    assert rng.ranges == [pytest.approx(each) for each in pairs]
    source = Image.fromarray(image if channels == 3 else image[:, :, 0])
    matrix = inverse_of_torchvision((35.5, 25), angle, translate, scale, shear)
    wanted = source.transform(
        source.size,
        Image.Transform.AFFINE,
        matrix,
        RESAMPLING[interpolation],
        fillcolor=(9,) * 3 if channels == 3 else 9,
    )
    found, expected = sample["image"], np.asarray(wanted).reshape(image.shape)
    # the matrices differ in their last bits, so a few pixels on an edge may be others
    assert (found != expected).any(axis=2).mean() < 0.002


def coefficients_of_torchvision(start: Any, end: Any) -> list[float]:
    """`_get_perspective_coeffs` of torchvision, by NumPy's least squares in place of torch's."""
    rows = []
    for (to_x, to_y), (x, y) in zip(end, start, strict=True):
        rows.append([to_x, to_y, 1, 0, 0, 0, -x * to_x, -x * to_y])
        rows.append([0, 0, 0, to_x, to_y, 1, -y * to_x, -y * to_y])
    found, *_ = np.linalg.lstsq(np.array(rows, float), np.array(start, float).reshape(-1))
    return [float(each) for each in found]


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_a_perspective_is_that_of_torchvision(interpolation: Any) -> None:
    image = picture(50, 71)
    transform = RandomPerspective(0.6, 1.0, interpolation=interpolation, fill=200)
    start = [[0, 0], [70, 0], [70, 49], [0, 49]]
    lowest: list[Any] = [[99, 99] for _ in start]
    highest: list[Any] = [[-99, -99] for _ in start]
    for seed in range(300):
        rng = np.random.default_rng(seed)
        rng.random()
        corners = transform.corners(50, 71, rng)
        assert corners
        lowest = np.minimum(lowest, corners).tolist()
        highest = np.maximum(highest, corners).tolist()
        if seed >= 10:
            continue
        sample: dict[str, Array] = {"image": image}
        transform.apply(sample, np.random.default_rng(seed), {})
        wanted = Image.fromarray(image).transform(
            (71, 50),
            Image.Transform.PERSPECTIVE,
            coefficients_of_torchvision(start, corners),
            RESAMPLING[interpolation],
            fillcolor=(200,) * 3,
        )
        assert (sample["image"] != np.asarray(wanted)).any(axis=2).mean() < 0.002
    # the ranges of `RandomPerspective.get_params`: int(0.6 * 35) = 21 and int(0.6 * 25) = 15
    assert lowest == [[0, 0], [70 - 21, 0], [70 - 21, 49 - 15], [0, 49 - 15]]
    assert highest == [[21, 15], [70, 15], [70, 49], [21, 49]]


def test_corners_on_the_wrong_side_are_drawn_again() -> None:
    transform = RandomPerspective(1.0, 1.0)
    for size in ((50, 71), (4, 4), (2, 3)):
        for seed in range(300):
            corners = transform.corners(*size, np.random.default_rng(seed))
            if corners:
                back = perspective(*size, corners)
                assert abs(np.linalg.det(back)) > 1e-9
    for size in ((1, 9), (9, 1), (1, 1)):
        image = np.ones((*size, 3), np.uint8)
        sample: dict[str, Array] = {"image": image}
        transform.apply(sample, np.random.default_rng(0), {})
        assert sample["image"] is image


def test_a_quarter_turn_is_clockwise_and_exact() -> None:
    """Of pixels and of boxes, on a square image; a move by whole pixels is exact, too."""
    image = painted()[:, :HEIGHT]
    corners = [box for box in CORNERS if box[2] <= HEIGHT]
    boxes = np.array([[*box, 1.0] for box in corners], np.float32)
    sample: dict[str, Array] = {"image": image, "boxes": boxes}
    RandomAffine((90.0, 90.0), boxes=("boxes",)).apply(sample, np.random.default_rng(0), {})
    assert np.array_equal(sample["image"], np.rot90(image, -1))
    wanted = [[HEIGHT - y2, x1, HEIGHT - y1, x2, 1] for x1, y1, x2, y2 in corners]
    assert np.abs(sample["boxes"] - wanted).max() < 1e-5
    moving: Any = Drawing(0, 7.2, -4.4, 1, 0, 0)
    sample = {"image": image, "boxes": boxes}
    RandomAffine(0, (0.5, 0.5), boxes=("boxes",)).apply(sample, moving, {})
    assert np.array_equal(sample["image"][:-4, 7:], image[4:, :-7])
    assert not sample["image"][:, :7].any()
    assert not sample["image"][-4:].any()
    assert sample["boxes"][0].tolist() == [9, 0, 27, 27, pytest.approx(27 / 28)]


@pytest.mark.parametrize(
    "transform",
    [
        RandomAffine(25, (0.2, 0.2), (0.8, 1.3), 10, masks=("mask",), boxes=("boxes",)),
        RandomAffine((0.0, 180.0), shear=(-9.0, 9.0, -8.0, 8.0), masks=("mask",), boxes=("boxes",)),
        RandomPerspective(0.5, 1.0, interpolation="nearest", masks=("mask",), boxes=("boxes",)),
    ],
)
def test_boxes_and_masks_go_where_their_pixels_go(transform: Transform) -> None:
    """A box is the smallest around its corners, so its painted pixels lie in it and touch it."""
    kinds = {
        "image": Field(np.dtype(np.uint8), (None, None, 3), is_whole=True),
        "mask": Field(np.dtype(np.uint8), (None, None, 1)),
        "boxes": Field(np.dtype(np.float32), (None, 5), image="image"),
    }
    made = transform.outputs(kinds)
    assert {name: field.shape for name, field in made.items()} == {
        name: field.shape for name, field in kinds.items()
    }
    assert transform.is_random
    image = painted()
    boxes = np.array([[*box, 1.0] for box in CORNERS], np.float32)
    compared = 0
    for seed in range(30):
        sample: dict[str, Array] = {"image": image, "mask": image[:, :, :1], "boxes": boxes}
        transform.apply(sample, np.random.default_rng(seed), {})
        pixels, moved_boxes = sample["image"][:, :, 0], sample["boxes"]
        assert np.array_equal(sample["mask"][:, :, 0], pixels)
        for number, (left, top, right, bottom, visible) in enumerate(moved_boxes.tolist()):
            assert 0 <= left <= right <= WIDTH
            assert 0 <= top <= bottom <= HEIGHT
            y, x = np.nonzero(pixels == number + 1)
            is_thin = min(right - left, bottom - top) < 3  # "nearest" may miss it
            if visible < 0.999 or is_thin:
                continue
            edges = np.array([x.min(), y.min(), x.max() + 1, y.max() + 1])
            assert (np.abs(edges - [left, top, right, bottom]) <= 2).all()
            assert (edges[:2] >= [left - 1, top - 1]).all()
            assert (edges[2:] <= [right + 1, bottom + 1]).all()
            compared += 1
    assert compared > 20


def test_points_are_moved_as_by_the_matrix() -> None:
    """Boxes by a perspective, against the equations of its corners."""
    corners = [(3.0, 2.0), (60.0, 9.0), (69.0, 40.0), (8.0, 47.0)]
    matrix = perspective(50, 71, corners)
    whole = moved(np.array([[0, 0, 70, 49, 1]], np.float32), matrix, 50, 71)
    assert whole[0].tolist() == pytest.approx([3, 2, 69, 47, 1])
    image = np.zeros((50, 71, 1), np.uint8)
    assert np.array_equal(warped(image, matrix, "bilinear", 0), image)
    assert warped(image, matrix, "nearest", 5).max() == 5


def test_wrong_ranges_are_refused() -> None:
    for options, reason in (
        ({"degrees": [3, 2]}, "degrees goes from 3.0 to 2.0, which is less"),
        ({"degrees": 3, "scale": [2, 1]}, "scale goes from 2.0 to 1.0"),
        ({"degrees": 3, "shear": [1, 2, 3]}, "shear has 3 angles"),
        ({"degrees": 3, "shear": 90}, "shear is .-90.0, 90.0.; angles must be between"),
        ({"degrees": 3, "shear": [0, 0, 4, 2]}, "shear of columns is .4.0, 2.0."),
        ({"degrees": 3, "translate": [0, 2]}, "translate"),
        ({"degrees": -3}, "degrees goes from 3.0 to -3.0"),
    ):
        with pytest.raises((ConfigError, ValueError), match=reason):
            parse_options(RandomAffine, options, "transforms[0]")
    made = parse_options(RandomAffine, {"degrees": 10, "shear": [1, 2, 3, 4]}, "transforms[0]")
    assert made == RandomAffine(10, shear=(1, 2, 3, 4))
