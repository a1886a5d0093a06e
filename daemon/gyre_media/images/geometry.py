"""Crops and sizes of images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from gyre_daemon.transforms.transform import Field, Sample
from msgspec import Meta

from gyre_media.boxes.moving import scaled, shifted
from gyre_media.images.annotated import AnnotatedTransform
from gyre_media.images.pixels import (
    Interpolation,
    Pixels,
    check_image,
    resized,
)

Size = int | tuple[int, int]  # with bounds, msgspec 0.22 crashes on this union
_MAX_LENGTH = 1 << 16
Positive = Annotated[float, Meta(gt=0, le=1e6)]
Probability = Annotated[float, Meta(ge=0, le=1)]
_MAX_TRIES = 10  # torchvision's
# Pixels of an image that becomes as large as its own proportion makes it.
_MAX_PIXELS = 100_000_000


class _Crop(AnnotatedTransform):
    """An image becomes a part of it, of one size.

    Attributes:
        size: of a square, or height and width.
    """

    size: Size

    def __post_init__(self) -> None:
        """Reject invalid sizes."""
        pair(self.size)

    def made_of(self, name: str, before: Field) -> Field:
        """See `AnnotatedTransform.made_of`."""
        channels = check_image(name, before)
        return Field(before.dtype, (*pair(self.size), channels))

    def put_part(
        self,
        begin: Sequence[int],
        sides: Sequence[tuple[int, int]],
        border: Callable[[bool], tuple[str, int]],
        sample: Sample,
        out: Sample,
    ) -> None:
        """Store a rectangle of the image, its masks and its boxes.

        Args:
            begin: row and column of its first pixel, behind the border.
            sides: how many rows and columns are added before and behind.
            border: how, and with which level; takes whether pixels are a mask.
            sample: see `Transform.apply`.
            out: see `Transform.apply`.
        """
        (top, left), (height, width) = begin, pair(self.size)
        (above, _), (before, _) = sides

        def change(pixels: Pixels, is_mask: bool) -> Pixels:
            bordered = _bordered(pixels, sides, *border(is_mask))
            return bordered[top : top + height, left : left + width]

        self.put_all(change, shifted(before - left, above - top), sample, out)


@dataclass(frozen=True)
class RandomResizedCrop(_Crop):
    """Cuts out a random rectangle and gives it one size.

    Attributes:
        size: of the result: of a square, or height and width.
        field: the image.
        scale: the least and the greatest area of the rectangle, as a fraction of the image.
        ratio: the least and the greatest of its width divided by its height.
        interpolation: see `resized`.
        antialias: see `resized`.
        masks: see `AnnotatedTransform`.
        boxes: see `AnnotatedTransform`.
    """

    version: ClassVar[int] = 2  # 1 was resized by Pillow

    size: Size
    field: str = "image"
    scale: tuple[Positive, Positive] = (0.08, 1.0)
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Reject invalid sizes and empty ranges."""
        super().__post_init__()
        for name in ("scale", "ratio"):
            least, greatest = getattr(self, name)
            if least > greatest:
                raise ValueError(f"{name} goes from {least} to {greatest}, which is less")

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return True

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        image: Pixels = sample[self.field]
        box = self.box(image.shape[0], image.shape[1], rng)
        (top, left, tall, wide), (height, width) = box, pair(self.size)
        matrix = scaled(width / wide, height / tall) @ shifted(-left, -top)
        self.put_all(lambda pixels, is_mask: self.cut(pixels, box, is_mask), matrix, sample, out)

    def cut(self, image: Pixels, box: tuple[int, int, int, int], is_mask: bool = False) -> Pixels:
        """A rectangle of an image or of a mask, in the size of the result."""
        top, left, height, width = box
        part = image[top : top + height, left : left + width]
        how: Interpolation = "nearest" if is_mask else self.interpolation
        return resized(part, *pair(self.size), how, antialias=self.antialias)

    def box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Top, left, height and width of a random rectangle, as torchvision finds one.

        Where ten rectangles do not fit, it is in the middle, as large as its ratio allows.
        """
        area, (least, greatest) = height * width, self.ratio
        logarithms = math.log(least), math.log(greatest)
        for _ in range(_MAX_TRIES):
            wanted = area * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(*logarithms))
            its_width, its_height = (
                round(math.sqrt(wanted * ratio)),
                round(math.sqrt(wanted / ratio)),
            )
            if 0 < its_width <= width and 0 < its_height <= height:
                top = int(rng.integers(height - its_height + 1))
                left = int(rng.integers(width - its_width + 1))
                return top, left, its_height, its_width
        its_height, its_width = height, width
        if width / height < least:
            its_height = round(width / least)
        elif width / height > greatest:
            its_width = round(height * greatest)
        return (height - its_height) // 2, (width - its_width) // 2, its_height, its_width


@dataclass(frozen=True)
class Resize(AnnotatedTransform):
    """Gives images another size.

    Attributes:
        size: height and width; or the shorter of both, where the other keeps its proportion.
        field: the image.
        interpolation: see `resized`.
        antialias: see `resized`.
        masks: see `AnnotatedTransform`.
        boxes: see `AnnotatedTransform`.
    """

    version: ClassVar[int] = 2  # 1 was resized by Pillow

    size: Size
    field: str = "image"
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Reject invalid sizes."""
        pair(self.size)

    @property
    def is_resize(self) -> bool:
        """See `AnnotatedTransform.is_resize`."""
        return True

    def made_of(self, name: str, before: Field) -> Field:
        """See `AnnotatedTransform.made_of`."""
        channels = check_image(name, before)
        height, width = (None, None) if isinstance(self.size, int) else self.size
        return Field(before.dtype, (height, width, channels))

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        image: Pixels = sample[self.field]
        height, width, _ = image.shape
        if not isinstance(self.size, int):
            height, width = self.size
        elif height < width:
            height, width = self.size, int(self.size * width / height)
        else:
            height, width = int(self.size * height / width), self.size
        if height * width > _MAX_PIXELS:
            raise ValueError(
                f"an image of {image.shape[1]} x {image.shape[0]} pixels would become one of "
                f"{width} x {height}; at most {_MAX_PIXELS} pixels are made"
            )

        def change(pixels: Pixels, is_mask: bool) -> Pixels:
            how: Interpolation = "nearest" if is_mask else self.interpolation
            return resized(pixels, height, width, how, antialias=self.antialias)

        matrix = scaled(width / image.shape[1], height / image.shape[0])
        self.put_all(change, matrix, sample, out)


@dataclass(frozen=True)
class CenterCrop(_Crop):
    """Cuts out the middle of images; smaller ones get a black border.

    Attributes:
        size: of the result: of a square, or height and width.
        field: the image.
        masks: see `AnnotatedTransform`.
        boxes: see `AnnotatedTransform`.
    """

    size: Size
    field: str = "image"
    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        image: Pixels = sample[self.field]
        sides, begin = [], []
        for wanted, length in zip(pair(self.size), image.shape, strict=False):
            added = max(0, wanted - length)
            sides.append((added // 2, added - added // 2))
            begin.append(round((length + added - wanted) / 2))
        self.put_part(begin, sides, lambda _: ("constant", 0), sample, out)


@dataclass(frozen=True)
class RandomCrop(_Crop):
    """Cuts out a rectangle of one size at a random place, as for CIFAR.

    Attributes:
        size: of the result: of a square, or height and width.
        padding: pixels to add at each side before.
        pad_if_needed: whether images smaller than the result get as many more, at both
            sides, as they lack; else they are refused.
        fill: the level of added pixels, where `padding_mode` is `constant`.
        padding_mode: `constant`, or how the image goes on: with its edge, or mirrored without
            (`reflect`) or with its edge (`symmetric`).
        field: the image.
        masks: see `AnnotatedTransform`.
        boxes: see `AnnotatedTransform`.
        mask_fill: the level of pixels that masks get in place of `fill`.
    """

    size: Size
    padding: Annotated[int, Meta(ge=0, le=4096)] = 0
    pad_if_needed: bool = False
    fill: Annotated[int, Meta(ge=0, le=255)] = 0
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"
    field: str = "image"
    masks: tuple[str, ...] = ()
    mask_fill: Annotated[int, Meta(ge=0, le=255)] = 0
    boxes: tuple[str, ...] = ()

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return True

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        image: Pixels = sample[self.field]
        height, width = pair(self.size)
        lacking = [
            max(0, wanted - length - 2 * self.padding)
            for wanted, length in zip((height, width), image.shape, strict=False)
        ]
        if any(lacking) and not self.pad_if_needed:
            raise ValueError(
                f"an image of {image.shape[1]} x {image.shape[0]} pixels is smaller than the crop "
                f"of {width} x {height}. Set pad_if_needed, or resize before."
            )
        sides = [(self.padding + more,) * 2 for more in lacking]
        spare = [
            length + 2 * side - wanted
            for length, (side, _), wanted in zip(image.shape, sides, (height, width), strict=False)
        ]
        begin = [int(rng.integers(each + 1)) for each in spare]

        def border(is_mask: bool) -> tuple[str, int]:
            return self.padding_mode, self.mask_fill if is_mask else self.fill

        self.put_part(begin, sides, border, sample, out)


def _bordered(image: Pixels, sides: Sequence[tuple[int, int]], mode: str, level: int) -> Pixels:
    """The image with more pixels at its sides; `level` fills them where `mode` is constant."""
    if not any(map(any, sides)):
        return image
    if mode == "constant":
        return np.pad(image, [*sides, (0, 0)], constant_values=level)
    padded: Pixels = np.pad(image, [*sides, (0, 0)], mode)  # type: ignore[call-overload]
    return padded


def pair(size: Size) -> tuple[int, int]:
    """Height and width.

    Raises:
        ValueError: no image has them.
    """
    pair = (size, size) if isinstance(size, int) else size
    if not all(1 <= length <= _MAX_LENGTH for length in pair):
        raise ValueError(f"size is {size}; each length must be from 1 to {_MAX_LENGTH}")
    return pair
