"""Operations drawn at random: RandAugment (arXiv 1909.13719), TrivialAugment (2103.10158)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from gyre_daemon.transforms.recipes import Sample
from msgspec import Meta
from PIL import Image, ImageEnhance, ImageOps

from gyre_media.images.pixels import MovesAlone, Pixels, to_pillow

_NUM_STRENGTHS = 31  # torchvision's `num_magnitude_bins`


class Operation(NamedTuple):
    """An operation on an image.

    Attributes:
        strongest: takes height and width, and returns the operand for the greatest strength.
        is_signed: whether it goes either way.
        apply: takes an image and the operand for a strength.
    """

    strongest: Callable[[int, int], float]
    is_signed: bool
    apply: Callable[[Image.Image, float], Image.Image]


def _moved(image: Image.Image, *matrix: float) -> Image.Image:
    """The image whose pixel (x, y) is that at (a x + b y + c, d x + e y + f), else black."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def _posterized(image: Image.Image, bits: float) -> Image.Image:
    return ImageOps.posterize(image, 8 - round(bits))


# Those of torchvision, in its order: names, greatest strengths, and functions of Pillow.
OPERATIONS: Mapping[str, Operation] = {
    "identity": Operation(lambda h, w: 0, False, lambda image, _: image),
    "shear_x": Operation(
        lambda h, w: 0.3, True, lambda image, by: _moved(image, 1, by, 0, 0, 1, 0)
    ),
    "shear_y": Operation(
        lambda h, w: 0.3, True, lambda image, by: _moved(image, 1, 0, 0, by, 1, 0)
    ),
    "translate_x": Operation(
        lambda h, w: 150 / 331 * w, True, lambda image, by: _moved(image, 1, 0, -int(by), 0, 1, 0)
    ),
    "translate_y": Operation(
        lambda h, w: 150 / 331 * h, True, lambda image, by: _moved(image, 1, 0, 0, 0, 1, -int(by))
    ),
    "rotate": Operation(lambda h, w: 30, True, lambda image, by: image.rotate(by)),
    "brightness": Operation(
        lambda h, w: 0.9, True, lambda image, by: ImageEnhance.Brightness(image).enhance(1 + by)
    ),
    "color": Operation(
        lambda h, w: 0.9, True, lambda image, by: ImageEnhance.Color(image).enhance(1 + by)
    ),
    "contrast": Operation(
        lambda h, w: 0.9, True, lambda image, by: ImageEnhance.Contrast(image).enhance(1 + by)
    ),
    "sharpness": Operation(
        lambda h, w: 0.9, True, lambda image, by: ImageEnhance.Sharpness(image).enhance(1 + by)
    ),
    "posterize": Operation(lambda h, w: 4, False, _posterized),
    "solarize": Operation(
        lambda h, w: 255, False, lambda image, by: ImageOps.solarize(image, math.ceil(255 - by))
    ),
    "autocontrast": Operation(lambda h, w: 0, False, lambda image, _: ImageOps.autocontrast(image)),
    "equalize": Operation(lambda h, w: 0, False, lambda image, _: ImageOps.equalize(image)),
}
# The operands for the greatest strength of TrivialAugment; the others have none.
WIDEST: Mapping[str, float] = {
    "shear_x": 0.99,
    "shear_y": 0.99,
    "translate_x": 32,
    "translate_y": 32,
    "rotate": 135,
    "brightness": 0.99,
    "color": 0.99,
    "contrast": 0.99,
    "sharpness": 0.99,
    "posterize": 6,
    "solarize": 255,
}
_NAMES = tuple(OPERATIONS)


@dataclass(frozen=True)
class RandAugment(MovesAlone):
    """Does some of `OPERATIONS`, drawn at random, as `RandAugment` of torchvision does.

    Attributes:
        num_ops: how many.
        magnitude: their strength, from 0 to 30.
        field: the image.
    """

    num_ops: Annotated[int, Meta(ge=0, le=16)] = 2
    magnitude: Annotated[int, Meta(ge=0, lt=_NUM_STRENGTHS)] = 9
    field: str = "image"

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        pixels: Pixels = sample[self.field]
        image = to_pillow(pixels)
        for _ in range(self.num_ops):
            name, by = self.draw(pixels.shape[0], pixels.shape[1], rng)
            image = OPERATIONS[name].apply(image, by)
        made = np.asarray(image).reshape(pixels.shape)
        self.put(self.field, made, sample, out)

    def draw(self, height: int, width: int, rng: np.random.Generator) -> tuple[str, float]:
        """The name of an operation, and its operand for this strength and size of an image."""
        name = _NAMES[int(rng.integers(len(_NAMES)))]
        operation = OPERATIONS[name]
        strength = self.magnitude / (_NUM_STRENGTHS - 1)
        if operation.is_signed and rng.random() <= 0.5:
            strength = -strength
        return name, strength * operation.strongest(height, width)


@dataclass(frozen=True)
class TrivialAugment(MovesAlone):
    """Does one operation at a random strength, as `TrivialAugmentWide` of torchvision does.

    Attributes:
        field: the image.
    """

    field: str = "image"

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        pixels: Pixels = sample[self.field]
        name, by = self.draw(rng)
        image = OPERATIONS[name].apply(to_pillow(pixels), by)
        self.put(self.field, np.asarray(image).reshape(pixels.shape), sample, out)

    def draw(self, rng: np.random.Generator) -> tuple[str, float]:
        """The name of an operation, and its operand."""
        name = _NAMES[int(rng.integers(len(_NAMES)))]
        strength = int(rng.integers(_NUM_STRENGTHS)) / (_NUM_STRENGTHS - 1)
        by = strength * WIDEST.get(name, 0)
        return name, -by if OPERATIONS[name].is_signed and rng.random() <= 0.5 else by
