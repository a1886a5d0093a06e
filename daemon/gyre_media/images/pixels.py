"""Images as arrays: how they are resized, and what moves with them.

[Note: Ways to resize] With `antialias`, images are convolved in whole numbers, so that machines all
get the same bits: by fast_image_resize where `bilinear` is asked for, which takes a quarter of
Pillow's time, and by Pillow for `bicubic`. A bilinear pixel is within 1 of the exact one, as those
of Pillow and of torch are, and so within 2 of theirs. A bicubic one is Pillow's, and within 2 of
the exact one. Without, OpenCV interpolates, and images that become smaller get jagged edges.
A rectangle of an image that was decoded smaller begins and ends within pixels: `resized_part`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

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
from gyre_daemon.transforms.recipes import Field, Sample, Transform
from PIL import Image

from gyre_media.boxes import Matrix, moved, moved_field

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


class ImageTransform(Transform):
    """A transform of one image; it draws no random numbers and keeps the shape, unless it says so.

    Attributes:
        field: the image.
    """

    is_random: ClassVar[bool] = False

    field: str

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        check_image(self.field, fields[self.field])
        return {self.field: fields[self.field]}


def check_image(name: str, field: Field) -> int:
    """The number of channels of a field that must be an image.

    Raises:
        ValueError: it is not an image.
    """
    if field.dtype != np.uint8 or len(field.shape) != 3 or field.shape[2] not in (1, 3):
        shape = ", ".join("*" if length is None else str(length) for length in field.shape)
        raise ValueError(
            f"{name!r:.100} is {field.dtype.name} [{shape}], and an image is uint8 [height, width, "
            "channels] with 1 or 3 channels. Begin with decode_image."
        )
    return field.shape[2]


def resized(
    image: Pixels, height: int, width: int, interpolation: Interpolation, *, antialias: bool
) -> Pixels:
    """An image in another size; see [Note: Ways to resize]."""
    if image.shape[:2] == (height, width):
        return image
    if antialias and interpolation == "bicubic":
        return _bicubic(image, height, width)
    if antialias and interpolation == "bilinear":
        return _convolved(image, height, width)
    flat = cv2.resize(image, (width, height), interpolation=_OPENCV[interpolation])
    return flat.reshape(height, width, image.shape[2])  # type: ignore[return-value]


def resized_part(
    image: Pixels,
    box: tuple[float, float, float, float],
    height: int,
    width: int,
    interpolation: Literal["bilinear", "bicubic"],
) -> Pixels:
    """A rectangle of an image in another size, with `antialias`; see [Note: Ways to resize].

    Args:
        image: the image.
        box: top, left, height and width in pixels of the image, which may be fractions.
        height: of the result.
        width: of the result.
        interpolation: see `resized`.
    """
    first, left = math.floor(box[0]), math.floor(box[1])
    part = image[first : math.ceil(box[0] + box[2]), left : math.ceil(box[1] + box[3])]
    x, y = box[1] - left, box[0] - first
    if interpolation == "bicubic":
        inside = x, y, x + box[3], y + box[2]
        return _bicubic(part, height, width, inside)
    options = ResizeOptions(_CONVOLUTION, crop_box=CropBox(x, y, box[3], box[2]))
    return _convolved(part, height, width, options)


def _bicubic(
    image: Pixels,
    height: int,
    width: int,
    box: tuple[float, float, float, float] | None = None,
) -> Pixels:
    small = to_pillow(image).resize((width, height), Image.Resampling.BICUBIC, box)
    return np.frombuffer(small.tobytes(), np.uint8).reshape(height, width, image.shape[2])


def _convolved(
    image: Pixels, height: int, width: int, options: ResizeOptions = _BILINEAR
) -> Pixels:
    kind = _PIXEL_TYPES[image.shape[2]]
    before = ImageData(image.shape[1], image.shape[0], kind, image.tobytes())
    made = ImageData(width, height, kind)
    RESIZER.resize(before, made, options)
    return np.frombuffer(made.get_buffer(), np.uint8).reshape(height, width, -1)


def to_pillow(image: Pixels) -> Image.Image:
    """The image as Pillow has it."""
    return Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0])


class MovesAlone(ImageTransform):
    """A transform that moves the pixels of an image at random and can take nothing along."""

    is_random: ClassVar[bool] = True

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        before = fields[self.field]
        check_image(self.field, before)
        others = {name: field for name, field in fields.items() if name != self.field}
        check_left_behind(self.field, others, is_whole=before.is_whole, can_take=False)
        return {self.field: replace(before, is_whole=False)}


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
        if _is_image(field):
            if is_random:
                raise ValueError(_left("mask", name, image, can_take=can_take))
        elif field.is_final:
            raise ValueError(
                f"the boxes {name!r:.100} lie in {image!r:.100}, and no longer move with it; put "
                "sanitize_boxes behind all that moves its pixels"
            )
        else:
            raise ValueError(_left("boxes", name, image, can_take=can_take))
    if is_random and is_whole:
        _check_unnamed_masks(image, others, can_take=can_take)


def _check_unnamed_masks(image: str, others: Mapping[str, Field], *, can_take: bool) -> None:
    images = {name: field for name, field in others.items() if _is_image(field)}
    if all(field.is_index for field in images.values()):
        for name, field in images.items():
            if field.is_whole and not field.image:
                text = _left("mask", name, image, can_take=can_take)
                raise ValueError(f"{text}; if it is no mask of it, decode it behind this")


def _is_image(field: Field) -> bool:
    return len(field.shape) == 3


def _left(kind: str, name: str, image: str, *, can_take: bool) -> str:
    option = "masks" if kind == "mask" else "boxes"
    begins = f"the {kind} {name!r:.100} {'lies' if kind == 'mask' else 'lie'} in {image!r:.100}"
    stays = f"{'it is' if kind == 'mask' else 'they are'} while its pixels move"
    advice = f'take {"it" if kind == "mask" else "them"} along: {option} = ["{name:.100}"]'
    if not can_take:
        advice = f"this transform takes no {option} along; leave it out, or drop {name!r:.100}"
    return f"{begins} and would stay where {stays}; {advice}"


class AnnotatedTransform(ImageTransform):
    """A transform that moves the pixels of an image, and does the same to its masks and boxes.

    Masks are images themselves, such as the class of each pixel, with the height and width of their
    image: their levels are never mixed. Boxes are outputs of `decode_boxes`.

    Attributes:
        masks: their fields.
        boxes: their fields.
        is_resize: whether points stay where they are as parts of the width and height.
    """

    is_resize: ClassVar[bool] = False

    masks: Sequence[str]
    boxes: Sequence[str]

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
        """Each output has the shape of its input, but no longer the pixels of its file."""
        is_index = fields[name].is_index
        made = self.made_of(name, fields[name])
        return replace(made, is_whole=False, image=image, is_index=is_index)

    def made_of(self, name: str, before: Field) -> Field:
        """The output field of the image or of a mask.

        Raises:
            ValueError: it is no image.
        """
        check_image(name, before)
        return before

    def put_all(
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

        Raises:
            ValueError: a mask has another size than the image.
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
