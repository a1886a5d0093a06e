"""Colours of images, augmentation at random, and images as the numbers that models take."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from gyre_daemon.transforms.built_in import Floating
from gyre_daemon.transforms.recipes import Field, Sample, dtype_of
from msgspec import Meta
from PIL import Image, ImageEnhance, ImageOps

from gyre_media.geometry import (
    ImageTransform,
    Pixels,
    Positive,
    Probability,
    check_image,
    check_left_behind,
    check_rising,
    random_sides,
    to_pillow,
)

_Factor = Annotated[float, Meta(ge=0, le=100)]
_Hue = Annotated[float, Meta(ge=0, le=0.5)]
_LEVELS = np.arange(256, dtype=np.float32)
_GRAY = np.array([0.2989, 0.587, 0.114], np.float32)  # torchvision's weights


@dataclass(frozen=True)
class ColorJitter(ImageTransform):
    """Changes brightness, contrast, saturation and hue at random, in a random order.

    The first three are multiplied by a factor from `[max(0, 1 - x), 1 + x]`.

    Attributes:
        brightness: x.
        contrast: x, around the mean of the image's gray.
        saturation: x, around each pixel's gray.
        hue: the most by which the hue turns, as a fraction of the circle.
        p: the probability that an image is changed.
    """

    is_random: ClassVar[bool] = True

    brightness: _Factor = 0.0
    contrast: _Factor = 0.0
    saturation: _Factor = 0.0
    hue: _Hue = 0.0
    p: Annotated[float, Meta(ge=0, le=1)] = 1.0

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        if check_image(self.field, fields[self.field]) != 3:
            raise ValueError(f"{self.field!r:.100} is gray; colour jitter needs colours")
        return {self.field: fields[self.field]}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        if self.p < 1 and rng.random() >= self.p:
            self.put(self.field, sample[self.field], sample, out)
            return
        image: Pixels = np.ascontiguousarray(sample[self.field])
        order, factors = self.draw(rng)
        for name in order:
            if getattr(self, name):
                image = _CHANGES[name](image, factors[name])
        self.put(self.field, image, sample, out)

    def draw(self, rng: np.random.Generator) -> tuple[Sequence[str], Mapping[str, float]]:
        """The order of the changes and the factor of each; that of hue is its turn."""
        names = list(_CHANGES)
        order = [names[place] for place in rng.permutation(len(names)).tolist()]
        factors = {
            name: rng.uniform(max(0.0, 1 - limit), 1 + limit)
            for name, limit in (
                ("brightness", self.brightness),
                ("contrast", self.contrast),
                ("saturation", self.saturation),
            )
        }
        return order, factors | {"hue": rng.uniform(-self.hue, self.hue)}


@dataclass(frozen=True)
class Normalize(ImageTransform):
    """Makes floating-point numbers of pixels: (pixel / 255 - mean) / std.

    Attributes:
        mean: of each channel; the default is that of ImageNet.
        std: of each channel.
        dtype: of the result.
        layout: `chw` for [channels, height, width], `hwc` for [height, width, channels].
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[Annotated[float, Meta(gt=0)], ...] = (0.229, 0.224, 0.225)
    dtype: Floating = "float32"
    layout: Literal["chw", "hwc"] = "chw"

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        channels = check_image(self.field, fields[self.field])
        if not len(self.mean) == len(self.std) == channels:
            raise ValueError(f"mean and std need {channels} numbers, one for each channel")
        height, width, _ = fields[self.field].shape
        shape = (channels, height, width) if self.layout == "chw" else (height, width, channels)
        return {self.field: Field(dtype_of(self.dtype), shape)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        image: Pixels = sample[self.field]
        into = out.get(self.field)
        if into is None:
            shape = image.shape if self.layout == "hwc" else (image.shape[2], *image.shape[:2])
            into = sample[self.field] = np.empty(shape, dtype_of(self.dtype))
        planes = into if self.layout == "chw" else into.transpose(2, 0, 1)
        for channel, (plane, table) in enumerate(zip(planes, self._tables, strict=True)):
            plane[...] = cv2.LUT(np.ascontiguousarray(image[:, :, channel]), table)

    @cached_property
    def _tables(self) -> list[npt.NDArray[np.float32]]:
        """The new value of each level of each channel, computed as torch does."""
        levels = _LEVELS / np.float32(255)
        pairs = zip(self.mean, self.std, strict=True)
        return [(levels - np.float32(mean)) / np.float32(std) for mean, std in pairs]


@dataclass(frozen=True)
class ToChw(ImageTransform):
    """Lays images out as [channels, height, width], as convolutions of torch take them."""

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        channels = check_image(self.field, fields[self.field])
        height, width, _ = fields[self.field].shape
        return {self.field: Field(np.dtype(np.uint8), (channels, height, width))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        image: Pixels = sample[self.field]
        into = out.get(self.field)
        if into is None or image.shape[2] != 3:
            self.put(self.field, image.transpose(2, 0, 1), sample, out)
            return
        cv2.split(image, [*into])


@dataclass(frozen=True)
class Flatten(ImageTransform):
    """Lays out the numbers of an image one after the other, so that images may differ in size.

    Attributes:
        field: the image, which becomes [n]. A field `NAME_shape`, int32, has its shape.
    """

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        before = fields[self.field]
        if len(before.shape) < 2:
            raise ValueError(f"{self.field!r:.100} has one dim; there is nothing to flatten")
        lengths = [length for length in before.shape if length is not None]
        is_known = len(lengths) == len(before.shape)
        return {
            self.field: Field(before.dtype, (math.prod(lengths) if is_known else None,)),
            self._shape: Field(np.dtype(np.int32), (len(before.shape),)),
        }

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        array: npt.NDArray[Any] = sample[self.field]
        self.put(self._shape, np.array(array.shape, np.int32), sample, out)
        self.put(self.field, np.ascontiguousarray(array).reshape(-1), sample, out)

    @property
    def _shape(self) -> str:
        return f"{self.field}_shape"


def brightened(image: Pixels, factor: float) -> Pixels:
    """The image with every level multiplied."""
    return _by_table(image, _LEVELS * np.float32(factor))


def contrasted(image: Pixels, factor: float) -> Pixels:
    """The image with its levels further from its mean gray, or nearer."""
    mean = gray_levels(image).mean(dtype=np.float64)
    return _by_table(image, _LEVELS * np.float32(factor) + np.float32((1 - factor) * mean))


def saturated(image: Pixels, factor: float) -> Pixels:
    """The image with its colours further from gray, or nearer."""
    gray = gray_levels(image)[:, :, None]
    made: npt.NDArray[Any] = image * np.float32(factor) + gray * np.float32(1 - factor)
    return made.clip(0, 255).astype(np.uint8)


def turned(image: Pixels, turn: float) -> Pixels:
    """The image with its hue turned by a fraction of the circle."""
    hsv = cv2.cvtColor(image.astype(np.float32) / np.float32(255), cv2.COLOR_RGB2HSV)
    hsv[:, :, 0] = (hsv[:, :, 0] + np.float32(turn * 360)) % np.float32(360)
    made: npt.NDArray[Any] = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB) * np.float32(255)
    rounded: Pixels = np.rint(made).clip(0, 255).astype(np.uint8)
    return rounded


def gray_levels(image: Pixels) -> npt.NDArray[np.float32]:
    """The gray of each pixel, a whole number, [height, width]."""
    gray: npt.NDArray[np.float32] = np.floor(image.astype(np.float32) @ _GRAY)
    return gray


def _by_table(image: Pixels, levels: npt.NDArray[np.float32]) -> Pixels:
    table = levels.clip(0, 255).astype(np.uint8)
    return np.asarray(cv2.LUT(image, table), np.uint8).reshape(image.shape)


_CHANGES: Mapping[str, Callable[[Pixels, float], Pixels]] = {
    "brightness": brightened,
    "contrast": contrasted,
    "saturation": saturated,
    "hue": turned,
}


# Weights of a Gaussian beyond this are below 2**-46, which changes no sum of float32. The time of a
# blur grows with the pixels times the weights. With fewer of them, pixels are no longer exact.
_MOST_SIGMAS = 8


@dataclass(frozen=True, kw_only=True)
class _Sometimes(ImageTransform):
    """A change of some images.

    Attributes:
        p: the probability that an image is changed.
    """

    is_random: ClassVar[bool] = True

    p: Probability

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        image: Pixels = sample[self.field]
        if rng.random() < self.p:
            image = self.changed(np.ascontiguousarray(image), rng)
        self.put(self.field, image, sample, out)

    @abstractmethod
    def changed(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        """The image, changed."""


@dataclass(frozen=True)
class RandomGrayscale(_Sometimes):
    """Takes the colours of some images, which keep their three channels."""

    p: Probability = 0.1

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        if check_image(self.field, fields[self.field]) != 3:
            raise ValueError(f"{self.field!r:.100} is gray already")
        return {self.field: fields[self.field]}

    def changed(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        gray = gray_levels(image).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)


@dataclass(frozen=True)
class GaussianBlur(_Sometimes):
    """Blurs some images by a Gaussian of a random width; images are mirrored at their edges.

    Attributes:
        kernel_size: the pixels that one is made of, each way; odd.
        sigma: the least and the greatest standard deviation, in pixels.
    """

    kernel_size: Annotated[int, Meta(ge=1, le=255)]
    sigma: tuple[Positive, Positive] = (0.1, 2.0)
    _: KW_ONLY
    p: Probability = 1.0

    def __post_init__(self) -> None:
        """Reject kernels without a middle, and empty ranges."""
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size is {self.kernel_size}; it must be odd")
        check_rising("sigma", self.sigma)

    def changed(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        kernel = gaussian(self.kernel_size, rng.uniform(*self.sigma))
        made = cv2.sepFilter2D(image, cv2.CV_32F, kernel, kernel, borderType=cv2.BORDER_REFLECT_101)
        blurred: Pixels = np.rint(made).clip(0, 255).astype(np.uint8)
        return blurred.reshape(image.shape)


def gaussian(kernel_size: int, sigma: float) -> npt.NDArray[np.float32]:
    """The weights of an odd kernel, or of its middle where the others add nothing to a pixel."""
    radius = min(kernel_size // 2, int(_MOST_SIGMAS * sigma) + 1)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel: npt.NDArray[np.float32] = (weights / weights.sum()).astype(np.float32)
    return kernel


@dataclass(frozen=True)
class RandomSolarize(_Sometimes):
    """Inverts the levels of some images from a threshold on.

    Attributes:
        threshold: levels from this one on are inverted.
    """

    threshold: Annotated[float, Meta(ge=0, le=255)] = 128
    _: KW_ONLY
    p: Probability = 0.5

    def changed(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        levels = np.arange(256, dtype=np.uint8)
        table = np.where(levels >= self.threshold, 255 - levels, levels)
        return np.asarray(cv2.LUT(image, table), np.uint8).reshape(image.shape)


@dataclass(frozen=True)
class RandomErasing(ImageTransform):
    """Fills a random rectangle of some images; mostly the last step, behind `normalize`.

    Where ten rectangles do not fit, an image stays as it is.

    Attributes:
        p: the probability that an image loses a rectangle.
        scale: the least and the greatest area of the rectangle, as a fraction of the image.
        ratio: the least and the greatest of its height divided by its width.
        value: of erased pixels: a number, or `random`, standard normal numbers, one per element.
        layout: of the image, `chw` or `hwc`.
    """

    is_random: ClassVar[bool] = True

    p: Probability = 0.5
    scale: tuple[Positive, Positive] = (0.02, 0.33)
    ratio: tuple[Positive, Positive] = (0.3, 3.3)
    value: float | Literal["random"] = 0.0
    layout: Literal["chw", "hwc"] = "chw"

    def __post_init__(self) -> None:
        """Reject empty ranges."""
        check_rising("scale", self.scale)
        check_rising("ratio", self.ratio)
        if self.scale[1] > 1:
            raise ValueError(f"scale goes up to {self.scale[1]}, which is more than the image")

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        before = fields[self.field]
        if len(before.shape) != 3:
            raise ValueError(f"{self.field!r:.100} has {len(before.shape)} dims, and an image 3")
        if before.dtype == np.uint8 and (
            self.value == "random" or not 0 <= self.value <= 255 or self.value % 1
        ):
            raise ValueError(
                f"value is {self.value}, and levels are whole numbers of 0 to 255; put it behind "
                "normalize"
            )
        return {self.field: before}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        image: npt.NDArray[Any] = sample[self.field]
        place = 1 if self.layout == "chw" else 0
        box = None
        if rng.random() < self.p:
            box = self.box(image.shape[place], image.shape[place + 1], rng)
        if box:
            top, left, height, width = box
            rows, columns = slice(top, top + height), slice(left, left + width)
            image = image.copy()
            part = image[:, rows, columns] if place else image[rows, columns]
            part[...] = rng.normal(size=part.shape) if self.value == "random" else self.value
        self.put(self.field, image, sample, out)

    def box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int] | None:
        """Top, left, height and width of a random rectangle, as torchvision finds one."""
        for its_height, its_width in random_sides(height * width, self.scale, self.ratio, rng):
            if its_height < height and its_width < width:
                top = int(rng.integers(height - its_height + 1))
                left = int(rng.integers(width - its_width + 1))
                return top, left, its_height, its_width
        return None


_NUM_STRENGTHS = 31  # torchvision's `num_magnitude_bins`


class Operation(NamedTuple):
    """An operation on an image.

    Attributes:
        strongest: the operand for the greatest strength of RandAugment; of `translate_x` and
            `translate_y`, a part of the width and height.
        widest: the operand for the greatest strength of TrivialAugment.
        is_signed: whether it goes either way.
        apply: takes an image and the operand for a strength.
    """

    strongest: float
    widest: float
    is_signed: bool
    apply: Callable[[Image.Image, float], Image.Image]


def _moved(image: Image.Image, *matrix: float) -> Image.Image:
    """The image whose pixel (x, y) is that at (a x + b y + c, d x + e y + f), else black."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def _enhanced(kind: Callable[[Image.Image], Any]) -> Operation:
    return Operation(0.9, 0.99, True, lambda image, by: kind(image).enhance(1 + by))


# Those of torchvision, in its order.
OPERATIONS: Mapping[str, Operation] = {
    "identity": Operation(0, 0, False, lambda image, _: image),
    "shear_x": Operation(0.3, 0.99, True, lambda image, by: _moved(image, 1, by, 0, 0, 1, 0)),
    "shear_y": Operation(0.3, 0.99, True, lambda image, by: _moved(image, 1, 0, 0, by, 1, 0)),
    "translate_x": Operation(
        150 / 331, 32, True, lambda image, by: _moved(image, 1, 0, -int(by), 0, 1, 0)
    ),
    "translate_y": Operation(
        150 / 331, 32, True, lambda image, by: _moved(image, 1, 0, 0, 0, 1, -int(by))
    ),
    "rotate": Operation(30, 135, True, lambda image, by: image.rotate(by)),
    "brightness": _enhanced(ImageEnhance.Brightness),
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "posterize": Operation(
        4, 6, False, lambda image, bits: ImageOps.posterize(image, 8 - round(bits))
    ),
    "solarize": Operation(
        255, 255, False, lambda image, by: ImageOps.solarize(image, math.ceil(255 - by))
    ),
    "autocontrast": Operation(0, 0, False, lambda image, _: ImageOps.autocontrast(image)),
    "equalize": Operation(0, 0, False, lambda image, _: ImageOps.equalize(image)),
}
_NAMES = tuple(OPERATIONS)


class _Policy(ImageTransform):
    """Does some of `OPERATIONS`, drawn at random; these take no boxes or masks along."""

    is_random: ClassVar[bool] = True

    num_ops: int

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        before = fields[self.field]
        check_image(self.field, before)
        others = {name: field for name, field in fields.items() if name != self.field}
        check_left_behind(self.field, others, is_whole=before.is_whole, can_take=False)
        return {self.field: replace(before, is_whole=False)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        pixels: Pixels = sample[self.field]
        image = to_pillow(pixels)
        for _ in range(self.num_ops):
            name, by = self.draw(pixels.shape[0], pixels.shape[1], rng)
            image = OPERATIONS[name].apply(image, by)
        self.put(self.field, np.asarray(image).reshape(pixels.shape), sample, out)

    @abstractmethod
    def draw(self, height: int, width: int, rng: np.random.Generator) -> tuple[str, float]:
        """The name of an operation, and its operand for this size of an image."""


@dataclass(frozen=True)
class RandAugment(_Policy):
    """Does some operations, as `RandAugment` of torchvision does (arXiv 1909.13719).

    Attributes:
        num_ops: how many.
        magnitude: their strength, from 0 to 30.
    """

    num_ops: Annotated[int, Meta(ge=0, le=16)] = 2
    magnitude: Annotated[int, Meta(ge=0, lt=_NUM_STRENGTHS)] = 9

    def draw(self, height: int, width: int, rng: np.random.Generator) -> tuple[str, float]:
        name = _NAMES[int(rng.integers(len(_NAMES)))]
        operation = OPERATIONS[name]
        strength = self.magnitude / (_NUM_STRENGTHS - 1)
        if operation.is_signed and rng.random() <= 0.5:
            strength = -strength
        size = {"translate_x": width, "translate_y": height}.get(name, 1)
        return name, strength * (operation.strongest * size)


@dataclass(frozen=True)
class TrivialAugment(_Policy):
    """Does one operation, as `TrivialAugmentWide` of torchvision does (arXiv 2103.10158)."""

    num_ops = 1

    def draw(self, height: int, width: int, rng: np.random.Generator) -> tuple[str, float]:
        name = _NAMES[int(rng.integers(len(_NAMES)))]
        strength = int(rng.integers(_NUM_STRENGTHS)) / (_NUM_STRENGTHS - 1)
        by = strength * OPERATIONS[name].widest
        return name, -by if OPERATIONS[name].is_signed and rng.random() <= 0.5 else by
