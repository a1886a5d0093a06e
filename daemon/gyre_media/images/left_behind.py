"""Boxes and masks that a chain forgets when it moves the pixels of their image. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from gyre_daemon.transforms.transform import Field

from gyre_media.images.pixels import ImageTransform, check_image


class MovesAlone(ImageTransform):
    """A transform that moves the pixels of an image at random and can take nothing along."""

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return True

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
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
