"""The properties of a loader's dataset, as the daemon describes it."""

import torch
from gyre_protos.v1 import loader_pb2 as pb
from torch.utils.data import IterableDataset


class DescribedDataset(IterableDataset[dict[str, torch.Tensor]]):
    """The facts of a dataset; the base of `LoaderSteps`, and so of `Loader`."""

    _description: pb.DatasetDescription

    @property
    def num_samples(self) -> int:
        """N, the number of samples in the dataset; if it has grown, in its last epochs."""
        return self._description.num_samples

    @property
    def format(self) -> str:
        """The format of the dataset, as it was named or found."""
        return self._description.format

    @property
    def fingerprint(self) -> str:
        """A digest of the dataset's contents.

        Datasets with equal fingerprints give the same batches for the same arguments.
        """
        return self._description.fingerprint

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """The meanings of the values of fields: the names of classes, by field of the dataset.

            names = loader.categories["class"]
            print(names[batch["class"][0]])  # the folder of the first file

        Fields whose values are just numbers are left out. Names do not depend on transforms: a
        stored field has them also where a transform drops it or makes another field of it. A
        mixture has those of the fields that its sources hand on, and those of `source`.
        """
        described = self._description
        dropped = {each.field: tuple(each.names) for each in described.dropped_categories}
        kept = {each.name: tuple(each.categories) for each in described.fields if each.categories}
        return dropped | kept

    @property
    def media_types(self) -> dict[str, str]:
        """The media types of fields' bytes, where all samples have one.

        `image/jpeg` of members `.jpg` of tar shards, `image/*` of a column of images of Hugging
        Face, for one.
        """
        fields = self._description.fields
        return {field.name: field.media_type for field in fields if field.media_type}
