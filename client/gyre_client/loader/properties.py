"""The properties of a loader: its dataset's, and the step, batch and epoch of its job."""

import torch
from gyre_protos.v1 import loader_pb2 as pb
from torch.utils.data import IterableDataset

from gyre_client.loader.place import Place
from gyre_client.messages.arguments import MAX_STEP, whole


class LoaderProperties(IterableDataset[dict[str, torch.Tensor]]):
    """The facts of a dataset, and the steps of a job; the base of `Loader`."""

    _description: pb.DatasetDescription
    _place: Place
    _request: pb.OpenSessionRequest

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

    @property
    def local_batch_size(self) -> int:
        """B, the number of samples in each of this rank's batches."""
        return self._request.order.global_batch_size // self._request.reader.world_size

    @property
    def steps_per_epoch(self) -> int:
        """The most steps that an epoch has; with `wrap`, some epochs have one less."""
        return self._place.epochs.max_steps(1)

    @property
    def step(self) -> int:
        """The global step of the next batch, counted from 0, including steps left out.

        That of the batch in hand is `last_step`.
        """
        return self.step_of(self.num_batches)

    @property
    def last_step(self) -> int | None:
        """The global step of the last batch, the one that a loop has in hand: log this one.

        `gyre plan --step`, `gyre why --step` and `gyre rewind --step` know the batch by it. None
        before the first batch, and after `load_state_dict`, `set_epoch` or `reset` until the next.
        """
        last = self._place.last_batch
        return None if last is None else self._place.epochs.step_of(last)

    def step_of(self, batch: int) -> int:
        """Returns the global step of the batch with this number, counted from 0."""
        self._place.locate()
        return self._place.epochs.step_of(whole("batch", batch, 0, MAX_STEP))

    @property
    def num_batches(self) -> int:
        """How many batches come before the next one: `step` without skipped steps."""
        self._place.locate()
        return self._place.position.batch

    @property
    def epoch(self) -> int:
        """The epoch in which the next step begins, counted from 0."""
        batch = self.num_batches  # which asks the daemon how the job's epochs are
        return self._place.epochs.epoch_of(batch)

    @property
    def epochs_passed(self) -> float:
        """The number of epochs before the next step, as a fraction."""
        batch = self.num_batches  # which asks the daemon how the job's epochs are
        return self._place.epochs.epochs_before(batch)
