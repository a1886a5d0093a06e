"""Images as arrays: transforms that cut, resize, mirror and warp them, with their masks and boxes.

[Note: Ways to resize] With `antialias`, images are convolved in whole numbers, so that machines all
get the same bits: by fast_image_resize where `bilinear` is asked for, which takes a quarter of
Pillow's time, and by Pillow for `bicubic`. A bilinear pixel is within 1 of the exact one, as those
of Pillow and of torch are, and so within 2 of theirs. A bicubic one is Pillow's, and within 2 of
the exact one. Without, OpenCV interpolates, and images that become smaller get jagged edges.
A rectangle of an image that was decoded smaller begins and ends within pixels: `resized_part`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, ClassVar, Literal

import cv2
import numpy as np
import numpy.typing as npt
from cykooz_resizer import (
    CropBox,
    FilterType,
    ImageData,
    PixelType,
    ResizeAlg,
    ResizeOptions,
    Resizer,
)
from gyre_daemon.transforms.recipes import Field, OneField, Sample, shown
from msgspec import Meta
from PIL import Image

from gyre_media.boxes import Matrix, moved, moved_field, scaled, shifted

Pixels = npt.NDArray[np.uint8]
Interpolation = Literal["nearest", "bilinear", "bicubic"]

cv2.setNumThreads(0)  # there is one process for each core

RESIZER = Resizer()
_CONVOLUTION = ResizeAlg.convolution(FilterType.bilinear)
_BILINEAR = ResizeOptions(_CONVOLUTION)
_PIXEL_TYPES = {1: PixelType.U8, 3: PixelType.U8x3}
_OPENCV = {
    "nearest": cv2.INTER_NEAREST_EXACT,
    "bilinear": cv2.INTER_LINEAR,
    "bicubic": cv2.INTER_CUBIC,
}


@dataclass(frozen=True, kw_only=True)
class ImageTransform(OneField):
    """A transform of one image that keeps its shape and draws no random numbers, by default."""

    field: str = "image"

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        check_image(self.field, fields[self.field])
        return {self.field: fields[self.field]}


def check_image(name: str, field: Field) -> int:
    """The number of channels of a field that must be an image.

    Raises:
        ValueError: it is not an image.
    """
    if field.dtype != np.uint8 or len(field.shape) != 3 or field.shape[2] not in (1, 3):
        raise ValueError(
            f"{name!r:.100} is {field.dtype.name} {shown(field.shape)}, and an image is uint8 "
            "[height, width, channels] with 1 or 3 channels. Begin with decode_image."
        )
    return field.shape[2]


def resized(
    image: Pixels, height: int, width: int, interpolation: Interpolation, *, antialias: bool
) -> Pixels:
    """An image in another size; see [Note: Ways to resize]."""
    if image.shape[:2] == (height, width):
        return image
    if antialias and interpolation != "nearest":
        return resized_part(image, None, height, width, interpolation)
    flat = cv2.resize(image, (width, height), interpolation=_OPENCV[interpolation])
    return flat.reshape(height, width, image.shape[2])  # type: ignore[return-value]


def resized_part(
    image: Pixels,
    box: tuple[float, float, float, float] | None,
    height: int,
    width: int,
    interpolation: Literal["bilinear", "bicubic"],
) -> Pixels:
    """A rectangle of an image in another size, with `antialias`; see [Note: Ways to resize].

    `box` is its top, left, height and width in pixels, which may be fractions; None for all of it.
    """
    inside, options = None, _BILINEAR
    if box:
        first, left = math.floor(box[0]), math.floor(box[1])
        image = image[first : math.ceil(box[0] + box[2]), left : math.ceil(box[1] + box[3])]
        x, y = box[1] - left, box[0] - first
        inside = x, y, x + box[3], y + box[2]
        options = ResizeOptions(_CONVOLUTION, crop_box=CropBox(x, y, box[3], box[2]))
    if interpolation == "bicubic":
        made = to_pillow(image).resize((width, height), Image.Resampling.BICUBIC, inside)
        return np.frombuffer(made.tobytes(), np.uint8).reshape(height, width, image.shape[2])
    kind = _PIXEL_TYPES[image.shape[2]]
    before = ImageData(image.shape[1], image.shape[0], kind, image.tobytes())
    after = ImageData(width, height, kind)
    RESIZER.resize(before, after, options)
    return np.frombuffer(after.get_buffer(), np.uint8).reshape(height, width, -1)


def to_pillow(image: Pixels) -> Image.Image:
    """The image as Pillow has it."""
    return Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0])


def check_left_behind(
    image: str,
    others: Mapping[str, Field],
    *,
    is_whole: bool = False,
    is_random: bool = True,
    is_resize: bool = False,
    can_take: bool = True,
) -> None:
    """Refuse a transform that moves the pixels of an image but not its boxes or masks.

    Boxes have no other way to move. A mask has one where nothing is random: the same transform once
    more. An image decoded with `colors = "index"` is a mask, unless it could belong to several.

    Args:
        image: its name.
        others: the fields that the transform does not take along.
        is_whole: whether the image has been as its file has it until now.
        is_random: whether the pixels move at random.
        is_resize: whether they only get another size.
        can_take: whether the transform could take something along.

    Raises:
        ValueError: it names the field that would stay.
    """
    for name, field in others.items():
        if field.image != image or (is_resize and field.is_normalized):
            continue
        if field.is_final and not _is_image(field):
            raise ValueError(
                f"the boxes {name!r:.100} lie in {image!r:.100}, and no longer move with it; put "
                "sanitize_boxes behind all that moves its pixels"
            )
        if is_random or not _is_image(field):
            raise ValueError(_left(name, field, image, can_take=can_take))
    images = {name: field for name, field in others.items() if _is_image(field)}
    if is_random and is_whole and all(field.is_index for field in images.values()):
        for name, field in images.items():
            if field.is_whole and not field.image:
                text = _left(name, field, image, can_take=can_take)
                raise ValueError(f"{text}; if it is no mask of it, decode it behind this")


def _is_image(field: Field) -> bool:
    return len(field.shape) == 3


def _left(name: str, field: Field, image: str, *, can_take: bool) -> str:
    words = ("masks", "mask", "lies", "it is", "it")
    if not _is_image(field):
        words = ("boxes", "boxes", "lie", "they are", "them")
    option, kind, lies, stays, it = words
    advice = f'take {it} along: {option} = ["{name:.100}"]'
    if not can_take:
        advice = f"this transform takes no {option} along; leave it out, or drop {name!r:.100}"
    where = f"the {kind} {name!r:.100} {lies} in {image!r:.100}"
    return f"{where} and would stay where {stays} while its pixels move; {advice}"


@dataclass(frozen=True, kw_only=True)
class AnnotatedTransform(ImageTransform):
    """A transform that moves the pixels of an image, and does the same to its masks and boxes.

    Masks are images themselves, such as the class of each pixel, with the height and width of their
    image: their levels are never mixed. Boxes are outputs of `decode_boxes`.

    Attributes:
        masks: the fields of masks.
        boxes: the fields of boxes.
        is_resize: whether points stay where they are as parts of the width and height.
    """

    is_resize: ClassVar[bool] = False

    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field, *self.masks, *self.boxes]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        if len(set(self.inputs)) < len(self.inputs):
            names = ", ".join([*self.masks, *self.boxes])
            raise ValueError(
                f"masks and boxes are {names:.200}; name each of them once, and none of them "
                f"{self.field!r:.100}"
            )
        check_left_behind(
            self.field,
            {name: field for name, field in fields.items() if name not in self.inputs},
            is_whole=fields[self.field].is_whole,
            is_random=self.is_random,
            is_resize=self.is_resize,
        )
        made = {self.field: self._made_of(self.field, fields, fields[self.field].image)}
        made |= {name: self._made_of(name, fields, self.field) for name in self.masks}
        return made | {name: moved_field(name, fields, self.field) for name in self.boxes}

    def _made_of(self, name: str, fields: Mapping[str, Field], image: str) -> Field:
        """The image or a mask, which no longer has the pixels of its file."""
        before = fields[name]
        channels = check_image(name, before)
        shape = (*(self._lengths or before.shape[:2]), channels)
        return replace(before, shape=shape, is_whole=False, image=image)

    @property
    def _lengths(self) -> tuple[int | None, int | None] | None:
        """The height and width of the outputs; None for those of the inputs."""
        return None

    def _put_all(
        self,
        change: Callable[[Pixels, bool], Pixels],
        matrix: Matrix,
        sample: Sample,
        out: Sample,
    ) -> None:
        """Store the image, its masks and its boxes, changed.

        Args:
            change: takes pixels, and whether they are a mask.
            matrix: where it sends points of the image.
            sample: see `Transform.apply`.
            out: see `Transform.apply`.
        """
        height, width = sample[self.field].shape[:2]
        for name in self.masks:
            if sample[name].shape[:2] != (height, width):
                its_height, its_width = sample[name].shape[:2]
                raise ValueError(
                    f"the mask {name!r:.100} has {its_width} x {its_height} pixels, and the image "
                    f"{width} x {height}"
                )
        pixels = [self.field, *self.masks]
        made = {name: change(sample[name], name != self.field) for name in pixels}
        size = made[self.field].shape[:2]
        for name, value in made.items():
            self.put(name, value, sample, out)
        for name in self.boxes:
            self.put(name, moved(sample[name], matrix, *size), sample, out)


Size = int | tuple[int, int]  # with bounds, msgspec 0.22 crashes on this union
_MAX_LENGTH = 1 << 16
Positive = Annotated[float, Meta(gt=0, le=1e6)]
Probability = Annotated[float, Meta(ge=0, le=1)]
_MAX_TRIES = 10  # torchvision's
# Pixels of an image that becomes as large as its own proportion makes it.
_MAX_PIXELS = 100_000_000


@dataclass(frozen=True)
class _Crop(AnnotatedTransform):
    """An image becomes a part of it, of one size.

    Attributes:
        size: of a square, or height and width.
    """

    size: Size

    def __post_init__(self) -> None:
        """Reject invalid sizes."""
        pair(self.size)

    @property
    def _lengths(self) -> tuple[int | None, int | None]:
        return pair(self.size)

    def _put_part(
        self,
        begin: Sequence[int],
        sides: Sequence[tuple[int, int]],
        sample: Sample,
        out: Sample,
        mode: str = "constant",
        levels: tuple[int, int] = (0, 0),
    ) -> None:
        """Store a rectangle of the image, its masks and its boxes.

        The image first gets rows and columns before and behind, `sides`; `begin` is a row and
        column of that. `mode` of `np.pad` fills them, with a level for the image and one for masks.
        """
        (top, left), (height, width) = begin, pair(self.size)
        (above, _), (before, _) = sides

        def change(pixels: Pixels, is_mask: bool) -> Pixels:
            bordered = _bordered(pixels, sides, mode, levels[is_mask])
            return bordered[top : top + height, left : left + width]

        self._put_all(change, shifted(before - left, above - top), sample, out)


@dataclass(frozen=True)
class RandomResizedCrop(_Crop):
    """Cuts out a random rectangle and gives it one size.

    Attributes:
        scale: the least and the greatest area of the rectangle, as a fraction of the image.
        ratio: the least and the greatest of its width divided by its height.
        interpolation: see `resized`.
        antialias: see `resized`.
    """

    version: ClassVar[int] = 2  # 1 was resized by Pillow
    is_random: ClassVar[bool] = True

    scale: tuple[Positive, Positive] = (0.08, 1.0)
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        """Reject invalid sizes and empty ranges."""
        super().__post_init__()
        check_rising("scale", self.scale)
        check_rising("ratio", self.ratio)

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        image: Pixels = sample[self.field]
        box = self.box(image.shape[0], image.shape[1], rng)
        (top, left, tall, wide), (height, width) = box, pair(self.size)
        matrix = scaled(width / wide, height / tall) @ shifted(-left, -top)
        self._put_all(lambda pixels, is_mask: self.cut(pixels, box, is_mask), matrix, sample, out)

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
        for its_width, its_height in random_sides(height * width, self.scale, self.ratio, rng):
            if 0 < its_width <= width and 0 < its_height <= height:
                top = int(rng.integers(height - its_height + 1))
                left = int(rng.integers(width - its_width + 1))
                return top, left, its_height, its_width
        (least, greatest), its_height, its_width = self.ratio, height, width
        if width / height < least:
            its_height = round(width / least)
        elif width / height > greatest:
            its_width = round(height * greatest)
        return (height - its_height) // 2, (width - its_width) // 2, its_height, its_width


def check_rising(name: str, bounds: tuple[float, float]) -> None:
    """Reject an empty range.

    Raises:
        ValueError: with the name of the option.
    """
    least, greatest = bounds
    if not least <= greatest:
        raise ValueError(f"{name} goes from {least} to {greatest}, which is less")


def random_sides(
    area: int, scale: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """The two sides of ten random rectangles; the first is `ratio` times the second.

    Their areas are `scale` times the `area` of an image, in pixels; each is drawn when asked for.
    """
    logarithms = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_MAX_TRIES):
        wanted = area * rng.uniform(*scale)
        its_ratio = math.exp(rng.uniform(*logarithms))
        yield round(math.sqrt(wanted * its_ratio)), round(math.sqrt(wanted / its_ratio))


@dataclass(frozen=True)
class Resize(AnnotatedTransform):
    """Gives images another size.

    Attributes:
        size: height and width; or the shorter of both, where the other keeps its proportion.
        interpolation: see `resized`.
        antialias: see `resized`.
    """

    version: ClassVar[int] = 2  # 1 was resized by Pillow
    is_resize: ClassVar[bool] = True

    size: Size
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        """Reject invalid sizes."""
        pair(self.size)

    @property
    def _lengths(self) -> tuple[int | None, int | None]:
        return (None, None) if isinstance(self.size, int) else self.size

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
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
        self._put_all(change, matrix, sample, out)


@dataclass(frozen=True)
class CenterCrop(_Crop):
    """Cuts out the middle of images; smaller ones get a black border."""

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        image: Pixels = sample[self.field]
        sides, begin = [], []
        for wanted, length in zip(pair(self.size), image.shape, strict=False):
            added = max(0, wanted - length)
            sides.append((added // 2, added - added // 2))
            begin.append(round((length + added - wanted) / 2))
        self._put_part(begin, sides, sample, out)


@dataclass(frozen=True)
class RandomCrop(_Crop):
    """Cuts out a rectangle of one size at a random place, as for CIFAR.

    Attributes:
        padding: pixels to add at each side before.
        pad_if_needed: whether images smaller than the result get as many more, at both
            sides, as they lack; else they are refused.
        fill: the level of added pixels, where `padding_mode` is `constant`.
        padding_mode: `constant`, or how the image goes on: with its edge, or mirrored without
            (`reflect`) or with its edge (`symmetric`).
        mask_fill: the level of pixels that masks get in place of `fill`.
    """

    is_random: ClassVar[bool] = True

    padding: Annotated[int, Meta(ge=0, le=4096)] = 0
    pad_if_needed: bool = False
    fill: Annotated[int, Meta(ge=0, le=255)] = 0
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"
    mask_fill: Annotated[int, Meta(ge=0, le=255)] = 0

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
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
        levels = self.fill, self.mask_fill
        self._put_part(begin, sides, sample, out, self.padding_mode, levels)


def _bordered(image: Pixels, sides: Sequence[tuple[int, int]], mode: str, level: int) -> Pixels:
    """The image with more pixels at its sides; `level` fills them where `mode` is constant."""
    if not any(map(any, sides)):
        return image
    level_of = {"constant_values": level} if mode == "constant" else {}
    padded: Pixels = np.pad(image, [*sides, (0, 0)], mode, **level_of)  # type: ignore[call-overload]
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


@dataclass(frozen=True)
class HorizontalFlip(AnnotatedTransform):
    """Mirrors some images.

    Attributes:
        p: the probability that an image is mirrored.
    """

    p: Probability = 0.5

    _axis: ClassVar[int] = 1  # as OpenCV numbers them
    is_random: ClassVar[bool] = True

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        if rng.random() >= self.p:
            self._put_all(lambda pixels, _: pixels, shifted(0, 0), sample, out)
            return
        height, width = sample[self.field].shape[:2]
        matrix = shifted(width, 0) @ scaled(-1, 1)
        if self._axis == 0:
            matrix = shifted(0, height) @ scaled(1, -1)
        self._put_all(self._mirrored, matrix, sample, out)

    def _mirrored(self, pixels: Pixels, is_mask: bool) -> Pixels:
        flipped: Pixels = cv2.flip(pixels, self._axis).reshape(pixels.shape)  # type: ignore[assignment]
        return flipped


@dataclass(frozen=True)
class VerticalFlip(HorizontalFlip):
    """Turns some images upside down by mirroring them."""

    _axis: ClassVar[int] = 0


Range = tuple[float, float]
Level = Annotated[int, Meta(ge=0, le=255)]
Point = tuple[float, float]
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


@dataclass(frozen=True, kw_only=True)
class _Warp(AnnotatedTransform):
    """An image keeps its size, and a matrix says where its points go.

    Attributes:
        interpolation: between pixels; masks always have "nearest".
        fill: the level where the image has nothing.
        mask_fill: the same of masks.
    """

    is_random: ClassVar[bool] = True

    interpolation: Interpolation = "nearest"
    fill: Level = 0
    mask_fill: Level = 0

    def warp(self, matrix: Matrix, sample: Sample, out: Sample) -> None:
        """Store the image, its masks and its boxes, moved by a matrix."""

        def change(pixels: Pixels, is_mask: bool) -> Pixels:
            how: Interpolation = "nearest" if is_mask else self.interpolation
            return warped(pixels, matrix, how, self.mask_fill if is_mask else self.fill)

        self._put_all(change, matrix, sample, out)


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
    """

    degrees: float | Range
    translate: tuple[Probability, Probability] = (0.0, 0.0)
    scale: tuple[Positive, Positive] = (1.0, 1.0)
    shear: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        """Reject empty ranges."""
        for name, each in zip(("shear", "shear of columns"), self._shears, strict=True):
            if not -90 < each[0] <= each[1] < 90:
                raise ValueError(f"{name} is {each}; angles must be between -90 and 90, in order")
        check_rising("degrees", _range(self.degrees))
        check_rising("scale", self.scale)

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
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
    """

    distortion_scale: Probability = 0.5
    p: Probability = 0.5
    _: KW_ONLY
    interpolation: Interpolation = "bilinear"

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
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
    (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
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
