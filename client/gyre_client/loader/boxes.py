"""Takes the boxes of a batch apart by samples."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from gyre_client.errors import InvalidRequest
from gyre_client.messages.arguments import mapping, text
from gyre_client.tracebacks import folded


@folded
def detections(
    batch: Mapping[str, Tensor], *fields: str, boxes: str = "boxes", count: str = "num_boxes"
) -> list[dict[str, Tensor]]:
    """Returns the boxes of each sample and their fields, as torchvision's detection models want.

        for batch in loader:
            targets = detections(batch, "labels")
            losses = model(list(batch["image"]), targets)

    Args:
        batch: A batch from a `Loader`, on any device, whose transforms end with `sanitize_boxes`.
        fields: The names of other fields that have a value for each box.
        boxes: The name of the boxes.
        count: The name of their numbers.

    Returns:
        For each sample a dict with `boxes`, [n, 4], and the other fields, [n, ...], where n is the
        number of its boxes. They share the memory of the batch.

    Raises:
        InvalidRequest: The batch has no such fields.
    """
    tensors, names = mapping("batch", batch), [boxes, *fields]
    for name in [boxes, count, *fields]:
        if not isinstance(tensors.get(text("name", name)), Tensor):
            advice = (
                f"name {name!r} in `fields` of sanitize_boxes, and have a transform make it, such "
                "as decode_boxes by its `fields`"
                if name in fields
                else "let its transforms end with sanitize_boxes"
            )
            raise InvalidRequest(
                f"the batch has no field {name!r}, only {', '.join(tensors)}; {advice}"
            )
    columns = {name: _rows(tensors, name) for name in names}
    return [
        {name: rows[place][:num] for name, rows in columns.items()}
        for place, num in enumerate(tensors[count].tolist())
    ]


def _rows(tensors: Mapping[str, Tensor], name: str) -> Sequence[Tensor]:
    """The values of each sample: as many for all, or between offsets."""
    offsets = tensors.get(f"{name}.offsets")
    if isinstance(offsets, Tensor):
        return [tensors[name][begin:end] for begin, end in pairwise(offsets.tolist())]
    return tensors[name].unbind()
