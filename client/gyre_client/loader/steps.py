"""Which step, batch and epoch of its job a loader stands at."""

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.loader.described import DescribedDataset
from gyre_client.loader.place import Place
from gyre_client.messages.arguments import MAX_STEP, whole


class LoaderSteps(DescribedDataset):
    """The position of a loader, and the steps of its job; the base of `Loader`."""

    _place: Place
    _request: pb.OpenSessionRequest

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
