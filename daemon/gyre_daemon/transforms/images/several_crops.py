"""Several crops of one image, each a field, to average a model's outputs over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.transforms.images.geometry import Size, pair
from gyre_daemon.transforms.images.left_behind import check_left_behind
from gyre_daemon.transforms.images.pixels import ImageTransform, Pixels, check_image
from gyre_daemon.transforms.transform import Field, Sample


@dataclass(frozen=True)
class FiveCrop(ImageTransform):
    """Cuts out the four corners and the middle of an image.

    They are the fields `image_0` to `image_4`, by the name of the image, which samples no longer
    have: upper left, upper right, lower left, lower right and the middle, as in torchvision.

    Attributes:
        size: of each: of a square, or height and width. Smaller images are refused.
        field: the image.
    """

    size: Size
    field: str = "image"

    def __post_init__(self) -> None:
        """Reject invalid sizes."""
        pair(self.size)

    @property
    def drops(self) -> Sequence[str]:
        """See `Transform.drops`."""
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        before = fields[self.field]
        others = {name: field for name, field in fields.items() if name != self.field}
        check_left_behind(self.field, others, is_random=False, can_take=False)
        made = Field(before.dtype, (*pair(self.size), check_image(self.field, before)))
        return {f"{self.field}_{number}": made for number in range(self.num_crops)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        for number, crop in enumerate(self.crops(sample.pop(self.field))):
            self.put(f"{self.field}_{number}", crop, sample, out)

    @property
    def num_crops(self) -> int:
        """How many there are."""
        return 5

    def crops(self, image: Pixels) -> list[Pixels]:
        """The crops of an image.

        Raises:
            ValueError: it is smaller than they are.
        """
        height, width = pair(self.size)
        spare = image.shape[0] - height, image.shape[1] - width
        if min(spare) < 0:
            raise ValueError(
                f"an image of {image.shape[1]} x {image.shape[0]} pixels is smaller than the crops "
                f"of {width} x {height}; resize before"
            )
        middle = round(spare[0] / 2), round(spare[1] / 2)
        begins = [(0, 0), (0, spare[1]), (spare[0], 0), spare, middle]
        return [image[top : top + height, left : left + width] for top, left in begins]


@dataclass(frozen=True)
class TenCrop(FiveCrop):
    """Cuts out the crops of `FiveCrop`, and the same of the mirrored image.

    The fields are `image_0` to `image_9`.

    Attributes:
        size: see `FiveCrop`.
        field: see `FiveCrop`.
        vertical_flip: whether the image is mirrored from top to bottom, and not from left to right.
    """

    vertical_flip: bool = False

    @property
    def num_crops(self) -> int:
        """See `FiveCrop.num_crops`."""
        return 10

    def crops(self, image: Pixels) -> list[Pixels]:
        """See `FiveCrop.crops`."""
        mirrored = image[::-1] if self.vertical_flip else image[:, ::-1]
        return [*super().crops(image), *super().crops(np.ascontiguousarray(mirrored))]
