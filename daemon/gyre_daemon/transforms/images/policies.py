"""TrivialAugment (arXiv 2103.10158) and AutoAugment (1805.09501), by operations of `augment`."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from gyre_daemon.transforms.images.augment import OPERATIONS
from gyre_daemon.transforms.images.left_behind import MovesAlone
from gyre_daemon.transforms.images.pixels import Pixels, to_pillow
from gyre_daemon.transforms.transform import Sample

_NUM_WIDE = 31  # strengths of TrivialAugment, torchvision's `num_magnitude_bins`
_NUM_LEARNED = 10  # of AutoAugment
# The operands for the greatest strength of TrivialAugment; of the others as for RandAugment.
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


class Change(NamedTuple):
    """One change of a learned pair: an operation, its probability, and its strength of 0 to 9."""

    name: str
    p: float
    strength: int = 0


def _pair(first: tuple[str, float, int], second: tuple[str, float, int]) -> tuple[Change, Change]:
    return Change(*first), Change(*second)


# The pairs that AutoAugment found on ImageNet: table 9 of the paper.
IMAGENET: Sequence[tuple[Change, Change]] = (
    _pair(("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    _pair(("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    _pair(("equalize", 0.8, 0), ("equalize", 0.6, 0)),
    _pair(("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    _pair(("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    _pair(("equalize", 0.4, 0), ("rotate", 0.8, 8)),
    _pair(("solarize", 0.6, 3), ("equalize", 0.6, 0)),
    _pair(("posterize", 0.8, 5), ("equalize", 1.0, 0)),
    _pair(("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    _pair(("equalize", 0.6, 0), ("posterize", 0.4, 6)),
    _pair(("rotate", 0.8, 8), ("color", 0.4, 0)),
    _pair(("rotate", 0.4, 9), ("equalize", 0.6, 0)),
    _pair(("equalize", 0.0, 0), ("equalize", 0.8, 0)),
    _pair(("invert", 0.6, 0), ("equalize", 1.0, 0)),
    _pair(("color", 0.6, 4), ("contrast", 1.0, 8)),
    _pair(("rotate", 0.8, 8), ("color", 1.0, 2)),
    _pair(("color", 0.8, 8), ("solarize", 0.8, 7)),
    _pair(("sharpness", 0.4, 7), ("invert", 0.6, 0)),
    _pair(("shear_x", 0.6, 5), ("equalize", 1.0, 0)),
    _pair(("color", 0.4, 0), ("equalize", 0.6, 0)),
    _pair(("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    _pair(("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    _pair(("invert", 0.6, 0), ("equalize", 1.0, 0)),
    _pair(("color", 0.6, 4), ("contrast", 1.0, 8)),
    _pair(("equalize", 0.8, 0), ("equalize", 0.6, 0)),
)


class _Drawn(MovesAlone):
    """Applies operations drawn at random."""

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        pixels: Pixels = sample[self.field]
        image = to_pillow(pixels)
        for name, by in self.draw(pixels.shape[0], pixels.shape[1], rng):
            image = _done(name, image, by)
        self.put(self.field, np.asarray(image).reshape(pixels.shape), sample, out)

    @abstractmethod
    def draw(
        self, height: int, width: int, rng: np.random.Generator
    ) -> Sequence[tuple[str, float]]:
        """Names of operations, each with its operand for an image of this size."""


@dataclass(frozen=True)
class TrivialAugment(_Drawn):
    """Does one operation at a random strength, as `TrivialAugmentWide` of torchvision does.

    Attributes:
        field: the image.
    """

    field: str = "image"

    def draw(
        self, height: int, width: int, rng: np.random.Generator
    ) -> Sequence[tuple[str, float]]:
        """See `_Drawn.draw`."""
        name = _NAMES[int(rng.integers(len(_NAMES)))]
        strength = int(rng.integers(_NUM_WIDE)) / (_NUM_WIDE - 1)
        by = strength * WIDEST.get(name, 0)
        return [(name, _signed(name, by, rng))]


@dataclass(frozen=True)
class AutoAugment(_Drawn):
    """Does one of 25 learned pairs of operations, as `AutoAugment` of torchvision does.

    Attributes:
        policy: the data on which they were learned.
        field: the image.
    """

    policy: Literal["imagenet"] = "imagenet"
    field: str = "image"

    def draw(
        self, height: int, width: int, rng: np.random.Generator
    ) -> Sequence[tuple[str, float]]:
        """See `_Drawn.draw`."""
        found = []
        for name, p, strength in IMAGENET[int(rng.integers(len(IMAGENET)))]:
            if rng.random() > p:
                continue
            by = 0.0
            if name in OPERATIONS:
                greatest = OPERATIONS[name].strongest(height, width)
                by = strength / (_NUM_LEARNED - 1) * greatest
            found.append((name, _signed(name, by, rng)))
        return found


def _signed(name: str, by: float, rng: np.random.Generator) -> float:
    """The operand for a strength, either way where the operation goes either way."""
    is_signed = name in OPERATIONS and OPERATIONS[name].is_signed
    return -by if is_signed and rng.random() <= 0.5 else by


def _done(name: str, image: Image.Image, by: float) -> Image.Image:
    return ImageOps.invert(image) if name == "invert" else OPERATIONS[name].apply(image, by)
