"""From the bytes of an image file to a random crop of it, decoded no larger than that needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import numpy as np
from gyre_daemon.transforms.transform import Field, OfField, Sample
from msgspec import Meta

from gyre_media.images.decode_image import FACTORS, DecodeImage
from gyre_media.images.geometry import Positive, RandomResizedCrop, Size, pair
from gyre_media.images.left_behind import check_left_behind
from gyre_media.images.pixels import resized_part


@dataclass(frozen=True)
class DecodeRandomResizedCrop(OfField):
    """Same as `DecodeImage` and then `RandomResizedCrop`, with the same rectangles drawn.

    A rectangle is drawn from the size that the header of a file declares. Then a JPEG file is
    decoded at the smallest of a half, a quarter or an eighth at which the rectangle still is at
    least `reducing_gap` times as high and as wide as the result. Images decoded at full size give
    the pixels of the two transforms; others differ a little, and less with a larger gap.

    Attributes:
        field: the bytes of files, which samples no longer have afterwards.
        size: of the result: of a square, or height and width.
        to: the result, uint8 [height, width, channels].
        colors: see `DecodeImage`.
        max_pixels: see `DecodeImage`.
        exact: see `DecodeImage`.
        scale: see `RandomResizedCrop`.
        ratio: see `RandomResizedCrop`.
        interpolation: see `resized`; always with `antialias`.
        reducing_gap: as that of `resize` of Pillow: how many pixels a rectangle decoded
            smaller has at least, each way, for one pixel of the result.
    """

    version: ClassVar[int] = 2  # that of `DecodeImage`

    size: Size
    to: str = "image"
    colors: Literal["rgb", "gray"] = "rgb"
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 30)] = 100_000_000
    exact: bool = True
    scale: tuple[Positive, Positive] = (0.08, 1.0)
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    reducing_gap: Annotated[float, Meta(ge=1, le=64)] = 1.0

    def __post_init__(self) -> None:
        """Refuse the same options as `RandomResizedCrop`."""
        self._crop  # noqa: B018

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        others = {name: field for name, field in fields.items() if name != self.field}
        check_left_behind(self.to, others, is_whole=True, can_take=False)
        return self._crop.outputs(self._decode.outputs(fields))

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        data = sample.pop(self.field).data
        height, width = self._decode.declared_size(data)
        box = self._crop.box(height, width, rng)
        image, factor = self._decode.decoded(data, self.factor(box[2], box[3]))
        if image.shape[:2] != (-(-height // factor), -(-width // factor)):
            raise ValueError(
                f"its header declares {width} x {height} pixels, and it has "
                f"{image.shape[1] * factor} x {image.shape[0] * factor}"
            )
        if factor == 1:
            made = self._crop.cut(image, box)
        else:
            top, left, tall, wide = (length / factor for length in box)
            made = resized_part(
                image, (top, left, tall, wide), *pair(self.size), self.interpolation
            )
        self._crop.put(self.to, made, sample, out)

    def factor(self, height: int, width: int) -> int:
        """By how much a file is decoded smaller for a rectangle."""
        times = min(height / pair(self.size)[0], width / pair(self.size)[1])
        return max((each for each in FACTORS if times / each >= self.reducing_gap), default=1)

    @cached_property
    def _decode(self) -> DecodeImage:
        return DecodeImage(self.field, self.to, self.colors, self.max_pixels, self.exact)

    @cached_property
    def _crop(self) -> RandomResizedCrop:
        return RandomResizedCrop(self.size, self.to, self.scale, self.ratio, self.interpolation)
