"""Where a loader stands in the order, and the stream that goes on from there."""

from collections.abc import Callable

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.device import DeviceStream
from gyre_client.batches.stream import BatchStream
from gyre_client.loader.epochs import epochs_of
from gyre_client.loader.resources import LoaderResources

Stream = BatchStream | DeviceStream


class Place:
    """A place in the order of a job. The daemon says where the job begins, once it is asked.

    Attributes:
        cursor: Resumes after the last batch taken; empty before the first session.
        batch: The next batch, counted without the steps that are left out.
        epochs: The steps and epochs of the job, as its session counts them.
        mixture_digest: See `Loader.mixture_digest`.
    """

    def __init__(
        self,
        resources: LoaderResources,
        request: pb.OpenSessionRequest,
        description: pb.DatasetDescription,
        tail: str,
        open_stream: Callable[[], Stream],
    ) -> None:
        """Stands before the first batch, and opens nothing.

        Args:
            resources: Keep the stream; what releases them ends it.
            request: Of the job. `open_stream` sends it with the place where the stream begins.
            description: Of the dataset; it grows with the dataset.
            tail: What happens to samples that do not fill an epoch's last batch.
            open_stream: Opens a session by `request`.
        """
        self._resources = resources
        self._request = request
        self._description = description
        self._tail = tail
        self._open_stream = open_stream
        self.cursor = b""
        self.batch = 0
        self.mixture_digest = 0
        self._count([(0, description.num_samples)])

    def stream(self, batch: int | None = None, *, grow: bool = False) -> Stream:
        """Returns the stream; opens it at the cursor, or at `batch`, if it is not open.

        With `grow`, samples that were added since the cursor was saved come in later epochs.
        """
        self._resources.check_usable()
        if self._resources.stream is None:
            self._request.cursor = self.cursor
            self._request.ClearField("step")
            self._request.grow = grow
            if batch is not None:
                self._request.step = batch
            stream = self._resources.stream = self._open_stream()
            self.cursor = stream.opened.cursor
            self.batch = stream.opened.first_step
            self._adopt(stream.opened)
        return self._resources.stream

    def take(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the next batch, and goes on behind it.

        Raises:
            StopIteration: The daemon has ended the batches.
        """
        stream = self._resources.open_stream() or self.stream()
        batch = stream.take()
        if batch is None:
            raise StopIteration
        tensors = batch.tensors
        self.cursor = batch.cursor
        self.batch = batch.step + 1
        if stream.mixture:
            step = self.epochs.step_of(batch.step)
            begun = [each.digest for each in stream.mixture if each.first_step <= step]
            self.mixture_digest = begun[-1] if begun else 0
        return tensors

    def locate(self) -> None:
        """Opens the stream if nothing was read yet: the daemon says where a job begins."""
        if not self.cursor:
            self.stream()

    def go_to(self, batch: int) -> None:
        """Makes the batch with this number the next one."""
        self.locate()
        if batch != self.batch:
            self._resources.close_stream()
            self.stream(batch)

    def resume(self, cursor: bytes, *, changed_transforms: bool) -> None:
        """Goes to the place of a cursor; stays where it is if the daemon refuses that."""
        self._resources.check_usable()
        self._resources.close_stream()
        previous, self.cursor = self.cursor, cursor
        self._request.changed_transforms = changed_transforms
        try:
            self.stream(grow=True)
        except BaseException:
            self.cursor = previous
            raise
        finally:
            self._request.changed_transforms = False

    def _adopt(self, opened: pb.SessionOpened) -> None:
        """Counts samples, steps and epochs as the session does."""
        stages = [(0, self._description.num_samples)]
        if opened.stages:  # the dataset may grow
            self._description.num_samples = opened.num_samples
            self._description.fingerprint = opened.fingerprint
            stages = [(each.first_epoch, each.num_samples) for each in opened.stages]
        skipped = [(each.first, each.stop) for each in opened.skip_steps.ranges]
        self._count(stages, skipped)

    def _count(
        self, stages: list[tuple[int, int]], skipped: list[tuple[int, int]] | None = None
    ) -> None:
        batch_size = self._request.order.global_batch_size
        self.epochs = epochs_of(stages, batch_size, self._tail, skipped or ())
