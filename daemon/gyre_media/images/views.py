"""Transforms for views of one image, other than crops and jitter: gray, blur, inverted levels.

Those of SimCLR (arXiv 2002.05709), BYOL (2006.07733) and DINO (2104.14294).
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import cv2
import numpy as np
import numpy.typing as npt
from gyre_daemon.transforms.transform import Field, Sample
from msgspec import Meta

from gyre_media.images.colors import gray_levels
from gyre_media.images.geometry import Positive, Probability
from gyre_media.images.pixels import ImageTransform, Pixels, check_image, contiguous

# Weights of a Gaussian beyond this are below 2**-46, which changes no sum of float32. The time of a
# blur grows with the pixels times the weights. With fewer of them, pixels are no longer exact.
_MOST_SIGMAS = 8


class _Sometimes(ImageTransform):
    """A change of some images.

    Attributes:
        p: the probability that an image is changed.
    """

    p: float

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return True

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        image: Pixels = sample[self.field]
        if rng.random() < self.p:
            image = self.changed(contiguous(image), rng)
        self.put(self.field, image, sample, out)

    @abstractmethod
    def changed(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        """The image, changed."""


@dataclass(frozen=True)
class RandomGrayscale(_Sometimes):
    """Takes the colours of some images, which keep their three channels.

    Attributes:
        p: the probability that an image becomes gray.
        field: the image.
    """

    p: Probability = 0.1
    field: str = "image"

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        if check_image(self.field, fields[self.field]) != 3:
            raise ValueError(f"{self.field!r:.100} is gray already")
        return {self.field: fields[self.field]}

    def changed(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        """See `_Sometimes.changed`."""
        gray = gray_levels(image).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)


@dataclass(frozen=True)
class GaussianBlur(_Sometimes):
    """Blurs some images by a Gaussian of a random width; images are mirrored at their edges.

    Attributes:
        kernel_size: the pixels that one is made of, each way; odd.
        sigma: the least and the greatest standard deviation, in pixels.
        p: the probability that an image is blurred.
        field: the image.
    """

    kernel_size: Annotated[int, Meta(ge=1, le=255)]
    sigma: tuple[Positive, Positive] = (0.1, 2.0)
    p: Probability = 1.0
    field: str = "image"

    def __post_init__(self) -> None:
        """Reject kernels without a middle, and empty ranges."""
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size is {self.kernel_size}; it must be odd")
        if self.sigma[0] > self.sigma[1]:
            raise ValueError(f"sigma goes from {self.sigma[0]} to {self.sigma[1]}, which is less")

    def changed(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        """See `_Sometimes.changed`."""
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
        p: the probability that an image is changed.
        field: the image.
    """

    threshold: Annotated[float, Meta(ge=0, le=255)] = 128
    p: Probability = 0.5
    field: str = "image"

    def changed(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        """See `_Sometimes.changed`."""
        levels = np.arange(256, dtype=np.uint8)
        table = np.where(levels >= self.threshold, 255 - levels, levels)
        return np.asarray(cv2.LUT(image, table), np.uint8).reshape(image.shape)
