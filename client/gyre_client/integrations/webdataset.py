"""The samples of a Loader as webdataset's stages take them.

wds.DataPipeline(Samples(loader), wds.decode("rgb"), wds.to_tuple("jpg", "cls"))
"""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from gyre_client.loader.interop import samples_of
from gyre_client.loader.loader import Loader

_NUMBERS = ("cls", "cls2", "index", "id")  # members that webdataset and the daemon read as numbers


class Samples(IterableDataset[dict[str, Any]]):
    """The source of a `wds.DataPipeline`: one iteration is an epoch of the Loader.

    A sample has the members of its tar shard as bytes, under their extensions, without those that
    it lacks; arrays that a transform made are arrays. `__key__` is the sample's number. Samples
    that only fill up the last batch (`tail="pad"`) are left out.

    The Loader's state moves on with the last sample of each of its batches. A state that is taken
    inside a batch repeats that batch's samples; none is lost.
    """

    def __init__(self, loader: Loader) -> None:
        """Reads nothing yet."""
        super().__init__()
        self.loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.loader)
        while True:
            try:
                stream, batch, behind = batches.peek()
            except StopIteration:
                return
            samples = [each for each in samples_of(batch) if each.get("mask", True)]
            for sample in samples[:-1]:
                yield _members(sample)
            last = [_members(sample) for sample in samples[-1:]]
            if stream.position.batch < behind.batch:  # unless a younger iteration has gone on
                stream.position = behind  # with the last sample, the batch is taken
            yield from last


def _members(sample: dict[str, Tensor]) -> dict[str, Any]:
    """Returns a sample as webdataset reads it from a tar shard."""
    members: dict[str, Any] = {"__key__": f"{int(sample['sample_id']):09}"}
    for name, value in sample.items():
        is_about_others = name.endswith((".present", ".shape")) or name in ("sample_id", "mask")
        if not is_about_others and sample.get(f"{name}.present", True):
            members[name] = _stored(name, value, sample.get(f"{name}.shape"))
    return members


def _stored(name: str, value: Tensor, shape: Tensor | None) -> Any:
    """Returns the bytes that a member of this name has, or an array that is no member."""
    extension = name.rpartition(".")[2]
    array = value.numpy()
    if extension == "npy":
        file = io.BytesIO()
        np.save(file, array if shape is None else array.reshape(shape.tolist()))
        return file.getvalue()
    if extension in _NUMBERS and array.ndim == 0:
        return b"%d" % int(array)
    # A copy: a stage may write to it, and a batch that was not taken comes again.
    return array.tobytes() if array.ndim == 1 and array.dtype == np.uint8 else array.copy()
