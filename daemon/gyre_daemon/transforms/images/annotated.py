"""Images whose masks and boxes are cut and moved as they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gyre_daemon.transforms.boxes.moving import Matrix, moved, moved_field
from gyre_daemon.transforms.images.pixels import ImageTransform, Pixels, check_image
from gyre_daemon.transforms.transform import Field, Sample


class AnnotatedTransform(ImageTransform):
    """A transform that moves the pixels of an image, and does the same to its masks and boxes.

    Masks are images themselves, such as the class of each pixel, with the height and width of their
    image: their levels are never mixed. Boxes are what `decode_boxes` makes.

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
        for name, field in fields.items():
            if field.image == self.field and name not in self.boxes:
                raise ValueError(
                    f"the boxes {name!r:.100} lie in {self.field!r:.100} and would stay where they "
                    f'are while its pixels move; take them along: boxes = ["{name:.100}"]'
                )
        pixels = [self.field, *self.masks]
        made = {name: self.made_of(name, fields[name]) for name in pixels}
        # what is mirrored or turned has the same shape, but no longer the pixels of its file
        made = {name: replace(field, is_whole=False) for name, field in made.items()}
        return made | {name: moved_field(name, fields[name], self.field) for name in self.boxes}

    def made_of(self, name: str, before: Field) -> Field:
        """What becomes of the image or of a mask.

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
