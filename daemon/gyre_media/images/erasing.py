"""Random Erasing (arXiv 1708.04896)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gyre_daemon.transforms.transform import Field, Sample

from gyre_media.images.geometry import Positive, Probability
from gyre_media.images.pixels import ImageTransform

_MAX_TRIES = 10  # torchvision's


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
        field: the image.
    """

    p: Probability = 0.5
    scale: tuple[Positive, Positive] = (0.02, 0.33)
    ratio: tuple[Positive, Positive] = (0.3, 3.3)
    value: float | Literal["random"] = 0.0
    layout: Literal["chw", "hwc"] = "chw"
    field: str = "image"

    def __post_init__(self) -> None:
        """Reject empty ranges."""
        for name in ("scale", "ratio"):
            least, greatest = getattr(self, name)
            if least > greatest:
                raise ValueError(f"{name} goes from {least} to {greatest}, which is less")
        if self.scale[1] > 1:
            raise ValueError(f"scale goes up to {self.scale[1]}, which is more than the image")

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return True

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
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
        """See `Transform.apply`."""
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
        area, (least, greatest) = height * width, self.ratio
        logarithms = math.log(least), math.log(greatest)
        for _ in range(_MAX_TRIES):
            wanted = area * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(*logarithms))
            its_height = round(math.sqrt(wanted * ratio))
            its_width = round(math.sqrt(wanted / ratio))
            if its_height < height and its_width < width:
                top = int(rng.integers(height - its_height + 1))
                left = int(rng.integers(width - its_width + 1))
                return top, left, its_height, its_width
        return None
