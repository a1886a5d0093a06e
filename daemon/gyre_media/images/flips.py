"""Transforms that mirror images."""

from dataclasses import dataclass
from typing import ClassVar

import cv2
import numpy as np
from gyre_daemon.transforms.transform import Sample

from gyre_media.boxes.moving import Matrix, scaled, shifted
from gyre_media.images.annotated import AnnotatedTransform
from gyre_media.images.geometry import Probability
from gyre_media.images.pixels import Pixels, whole


@dataclass(frozen=True)
class HorizontalFlip(AnnotatedTransform):
    """Mirrors some images.

    Attributes:
        p: the probability that an image is mirrored.
        field: the image.
        masks: see `AnnotatedTransform`.
        boxes: see `AnnotatedTransform`.
    """

    p: Probability = 0.5
    field: str = "image"
    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    _axis: ClassVar[int] = 1  # as OpenCV numbers them

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return True

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        is_mirrored = rng.random() < self.p
        height, width = sample[self.field].shape[:2]
        matrix = self._matrix(height, width) if is_mirrored else shifted(0, 0)
        self.put_all(
            lambda pixels, _: self._mirrored(pixels) if is_mirrored else pixels, matrix, sample, out
        )

    def _matrix(self, height: int, width: int) -> Matrix:
        return shifted(width, 0) @ scaled(-1, 1)

    def _mirrored(self, image: Pixels) -> Pixels:
        pixels = whole(image)
        flipped: Pixels = cv2.flip(pixels, self._axis).reshape(pixels.shape)  # type: ignore[assignment]
        return flipped[:, :, : image.shape[2]]


@dataclass(frozen=True)
class VerticalFlip(HorizontalFlip):
    """Turns some images upside down by mirroring them.

    Attributes:
        p: the probability that an image is mirrored.
        field: the image.
        masks: see `AnnotatedTransform`.
        boxes: see `AnnotatedTransform`.
    """

    _axis: ClassVar[int] = 0

    def _matrix(self, height: int, width: int) -> Matrix:
        return shifted(0, height) @ scaled(1, -1)
