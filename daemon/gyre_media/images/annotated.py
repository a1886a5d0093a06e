"""Images whose masks and boxes are cut and moved as they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gyre_daemon.transforms.transform import Field, Sample

from gyre_media.boxes.moving import Matrix, moved, moved_field
from gyre_media.images.left_behind import check_left_behind
from gyre_media.images.pixels import ImageTransform, Pixels, check_image


class AnnotatedTransform(ImageTransform):
    """A transform that moves the pixels of an image, and does the same to its masks and boxes.

    Masks are images themselves, such as the class of each pixel, with the height and width of their
    image: their levels are never mixed. Boxes are outputs of `decode_boxes`.

    Attributes:
        masks: their fields.
        boxes: their fields.
    """

    masks: Sequence[str]
    boxes: Sequence[str]

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`."""
        return [self.field, *self.masks, *self.boxes]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
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

    @property
    def is_resize(self) -> bool:
        """Whether points stay where they are as parts of the width and height."""
        return False

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
