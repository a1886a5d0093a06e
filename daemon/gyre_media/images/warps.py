"""Rotates, shears, shifts and tilts images, as torchvision does with Pillow."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from gyre_daemon.transforms.transform import Sample
from msgspec import Meta
from PIL import Image

from gyre_media.boxes.moving import Matrix, scaled, shifted
from gyre_media.images.annotated import AnnotatedTransform
from gyre_media.images.geometry import Positive, Probability
from gyre_media.images.pixels import Interpolation, Pixels, to_pillow

Range = tuple[float, float]
Level = Annotated[int, Meta(ge=0, le=255)]
Point = tuple[float, float]
_MAX_TRIES = 10
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


class _Warp(AnnotatedTransform):
    """An image keeps its size, and a matrix says where its points go.

    Attributes:
        interpolation: between pixels; masks always have "nearest".
        fill: the level where the image has nothing.
        mask_fill: the same of masks.
    """

    interpolation: Interpolation
    fill: int
    mask_fill: int

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return True

    def warp(self, matrix: Matrix, sample: Sample, out: Sample) -> None:
        """Store the image, its masks and its boxes, moved by a matrix."""

        def change(pixels: Pixels, is_mask: bool) -> Pixels:
            how: Interpolation = "nearest" if is_mask else self.interpolation
            return warped(pixels, matrix, how, self.mask_fill if is_mask else self.fill)

        self.put_all(change, matrix, sample, out)


@dataclass(frozen=True)
class RandomAffine(_Warp):
    """Turns, moves, scales and shears images at random, around their middle.

    Attributes:
        degrees: the least and the greatest angle, clockwise; a number is that way and back.
        translate: at most how far it goes right or left, and down or up, as a part of its width and
            height; a whole number of pixels is drawn.
        scale: the least and the greatest factor.
        shear: the least and the greatest angle of shear along the rows, and perhaps two along the
            columns behind them; a number is that way and back, along the rows.
        interpolation: see `_Warp`.
        fill: see `_Warp`.
        field: the image.
        masks: see `AnnotatedTransform`.
        mask_fill: see `_Warp`.
        boxes: see `AnnotatedTransform`.
    """

    degrees: float | Range
    translate: tuple[Probability, Probability] = (0.0, 0.0)
    scale: tuple[Positive, Positive] = (1.0, 1.0)
    shear: float | tuple[float, ...] = 0.0
    interpolation: Interpolation = "nearest"
    fill: Level = 0
    field: str = "image"
    masks: tuple[str, ...] = ()
    mask_fill: Level = 0
    boxes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Reject empty ranges."""
        ranges = {"degrees": _range(self.degrees), "scale": self.scale}
        for name, each in zip(("shear", "shear of columns"), self._shears, strict=True):
            if not -90 < each[0] <= each[1] < 90:
                raise ValueError(f"{name} is {each}; angles must be between -90 and 90, in order")
        for name, (least, greatest) in ranges.items():
            if not least <= greatest:
                raise ValueError(f"{name} goes from {least} to {greatest}, which is less")

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        height, width = sample[self.field].shape[:2]
        angle = rng.uniform(*_range(self.degrees))
        across, down = self.translate[0] * width, self.translate[1] * height
        moved = round(rng.uniform(-across, across)), round(rng.uniform(-down, down))
        scale = rng.uniform(*self.scale)
        shears = [rng.uniform(*each) for each in self._shears]
        linear = rotated_and_sheared(angle, *shears) @ scaled(scale, scale)
        x, y = width / 2, height / 2
        to_middle = shifted(x + moved[0], y + moved[1])
        self.warp(to_middle @ linear @ shifted(-x, -y), sample, out)

    @property
    def _shears(self) -> tuple[Range, Range]:
        shear = self.shear if isinstance(self.shear, tuple) else _range(self.shear)
        if len(shear) not in (2, 4):
            raise ValueError(f"shear has {len(shear)} angles; give it 2 or 4")
        return (shear[0], shear[1]), (shear[2], shear[3]) if len(shear) == 4 else (0.0, 0.0)


@dataclass(frozen=True)
class RandomPerspective(_Warp):
    """Moves the corners of some images inwards at random.

    Attributes:
        distortion_scale: at most how far, as a part of the way to the middle.
        p: the probability that an image is changed.
        interpolation: see `_Warp`.
        fill: see `_Warp`.
        field: the image.
        masks: see `AnnotatedTransform`.
        mask_fill: see `_Warp`.
        boxes: see `AnnotatedTransform`.
    """

    distortion_scale: Probability = 0.5
    p: Probability = 0.5
    interpolation: Interpolation = "bilinear"
    fill: Level = 0
    field: str = "image"
    masks: tuple[str, ...] = ()
    mask_fill: Level = 0
    boxes: tuple[str, ...] = ()

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        height, width = sample[self.field].shape[:2]
        corners = self.corners(height, width, rng) if rng.random() < self.p else None
        self.warp(perspective(height, width, corners) if corners else shifted(0, 0), sample, out)

    def corners(self, height: int, width: int, rng: np.random.Generator) -> list[Point] | None:
        """Where the middles of the corner pixels go, clockwise from the upper left one.

        With a large `distortion_scale` a corner may cross the line between its neighbours.
        Such corners are drawn again; None if ten are such, or the image is a line.
        """
        most = int(self.distortion_scale * (width // 2)), int(self.distortion_scale * (height // 2))
        for _ in range(_MAX_TRIES if min(height, width) > 1 else 0):
            inward = [[int(rng.integers(each + 1)) for each in most] for _ in range(4)]
            left_right, up_down = (0, 1, 1, 0), (0, 0, 1, 1)
            corners = [
                (float(width - 1 - x if right else x), float(height - 1 - y if lower else y))
                for (x, y), right, lower in zip(inward, left_right, up_down, strict=True)
            ]
            if _is_convex(corners):
                return corners
        return None


def warped(image: Pixels, matrix: Matrix, interpolation: Interpolation, fill: int) -> Pixels:
    """An image of the same size whose points have gone where a matrix sends them; by Pillow."""
    if np.array_equal(matrix, shifted(0, 0)):
        return image
    height, width, channels = image.shape
    (a, b, c), (d, e, f), (g, h, i) = inverted(matrix).tolist()
    kind, numbers = Image.Transform.PERSPECTIVE, [each / i for each in (a, b, c, d, e, f, g, h)]
    if g == h == 0:
        kind, numbers = Image.Transform.AFFINE, numbers[:6]
    made = to_pillow(image).transform(
        (width, height),
        kind,
        numbers,
        _RESAMPLING[interpolation],
        fillcolor=(fill,) * channels if channels > 1 else fill,
    )
    return np.frombuffer(made.tobytes(), np.uint8).reshape(height, width, channels)


def rotated_and_sheared(angle: float, across: float, down: float) -> Matrix:
    """Points sheared along the rows and the columns and then turned clockwise, in degrees.

    The order is that of torchvision: R(angle) ShearY(down) ShearX(across).
    """
    turn, x, y = (math.radians(each) for each in (angle, across, down))
    cosine, sine = math.cos(turn - y) / math.cos(y), math.sin(turn - y) / math.cos(y)
    return np.array(
        [
            [cosine, -cosine * math.tan(x) - math.sin(turn), 0.0],
            [sine, -sine * math.tan(x) + math.cos(turn), 0.0],
            [0.0, 0.0, 1.0],
        ]
    )


def perspective(height: int, width: int, corners: list[Point]) -> Matrix:
    """The corners of a rectangle of height - 1 and width - 1 go to others.

    As in torchvision, they are numbers of pixels, and then count as places, where pixel 0 begins.

    The square is mapped as in section 2.2 of Heckbert, Fundamentals of Texture Mapping and Image
    Warping, 1989.
    """
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = corners
    sum_x, sum_y = x0 - x1 + x2 - x3, y0 - y1 + y2 - y3
    area = (x1 - x2) * (y3 - y2) - (x3 - x2) * (y1 - y2)
    g = (sum_x * (y3 - y2) - (x3 - x2) * sum_y) / area
    h = ((x1 - x2) * sum_y - sum_x * (y1 - y2)) / area
    of_square = np.array(
        [
            [x1 - x0 + g * x1, x3 - x0 + h * x3, x0],
            [y1 - y0 + g * y1, y3 - y0 + h * y3, y0],
            [g, h, 1.0],
        ]
    )
    return of_square @ scaled(1 / (width - 1), 1 / (height - 1))


def inverted(matrix: Matrix) -> Matrix:
    """The way back, by the same operations on every machine; up to a factor."""
    rows = matrix.tolist()
    (a, b, c), (d, e, f), (g, h, i) = rows
    return np.array(
        [
            [e * i - f * h, c * h - b * i, b * f - c * e],
            [f * g - d * i, a * i - c * g, c * d - a * f],
            [d * h - e * g, b * g - a * h, a * e - b * d],
        ]
    )


def _range(angle: float | Range) -> Range:
    return angle if isinstance(angle, tuple) else (-angle, angle)


def _is_convex(corners: list[Point]) -> bool:
    around = zip(corners, corners[1:] + corners[:1], corners[2:] + corners[:2], strict=True)
    return all(
        (x1 - x0) * (y2 - y1) - (y1 - y0) * (x2 - x1) > 0 for (x0, y0), (x1, y1), (x2, y2) in around
    )
