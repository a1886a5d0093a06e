"""The position of a loader in the order, and the stream that continues from there."""

import itertools
from collections.abc import Callable, Iterator

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.batch import Position
from gyre_client.batches.device import DeviceStream
from gyre_client.batches.stream import BatchStream
from gyre_client.loader.epochs import epochs_of
from gyre_client.loader.resources import LoaderResources
from gyre_client.loader.sequence_cut import SequenceCut

Stream = BatchStream | DeviceStream


class Place:
    """A place in the order of a job. The daemon says where the job begins, once it is asked.

    [Note: An interrupt takes no batch]
    A signal may raise an exception at any line, and memory may run out at most. So a batch is made
    while it stays in the queue, and one store, `stream.position = behind`, takes it. That store
    stands in the method that the script calls, on the line of its `return`: between the two Python
    neither handles a signal nor calls a trace function. Whatever is raised before leaves the loader
    where it was. The cursor, the step, credit and the batches that may be forgotten all follow from
    the position. A signal in the 100 ns from this store to the end of a caller's `next(...)` is
    raised in the caller's line, which then has no batch; a `for` loop has no such moment.

    Attributes:
        epochs: The steps and epochs of the job, as its session counts them.
    """

    def __init__(
        self,
        resources: LoaderResources,
        request: pb.OpenSessionRequest,
        description: pb.DatasetDescription,
        tail: str,
        open_stream: Callable[[pb.OpenSessionRequest, Iterator[int], list[BatchStream]], Stream],
        cut: SequenceCut | None = None,
    ) -> None:
        """Stands before the first batch, and opens nothing.

        Args:
            resources: Keep the stream; releasing them ends it.
            request: The job's request; a session has it with the place where its stream begins.
            description: The dataset's description; it grows with the dataset.
            tail: How to use samples that do not fill an epoch's last batch.
            open_stream: Opens a session by a request; see `opening.open_stream`.
            cut: Makes a context-parallel rank's slice of each batch; None for whole batches.
        """
        self._resources = resources
        self._request = request
        self._description = description
        self._tail = tail
        self._open_stream = open_stream
        self._cut = cut
        self._generations = itertools.count(request.reader.generation + 1)
        self._count([(0, description.num_samples)])

    @property
    def position(self) -> Position:
        """The cursor resumes after the last batch taken; it is empty before the first session."""
        stream = self._resources.stream
        return self._resources.position if stream is None else stream.position

    @property
    def last_batch(self) -> int | None:
        """The number of the last batch, if it came from the open stream."""
        stream = self._resources.stream
        if stream is None or stream.position.batch == stream.opened.first_step:
            return None
        return stream.position.batch - 1

    def stream(self) -> Stream:
        """Returns the stream; opens it at the cursor if it is not open."""
        self._resources.check_usable()
        return self._resources.stream or self._open(self.position.cursor)

    def peek(self) -> tuple[Stream, dict[str, torch.Tensor], Position]:
        """Returns the stream, the tensors of its next batch, and the position behind it.

        To replace the stream's position by that one takes the batch: see the Note above.

        Raises:
            StopIteration: The daemon has ended the batches.
        """
        stream = self._resources.open_stream() or self.stream()
        found = stream.peek()
        if found is None:
            raise StopIteration
        batch, behind = found
        tensors = batch.tensors
        return stream, self._cut(tensors) if self._cut else tensors, behind

    def iterate_until(self, stop: int) -> None:
        """Lets the daemon read up to this batch, and no further for now."""
        stream = self._resources.open_stream() or self.stream()
        stream.source.iterate_until(stop)

    def locate(self) -> None:
        """Opens the stream if nothing was read yet: the daemon says where a job begins."""
        if not self.position.cursor:
            self.stream()

    def go_to(self, batch: int) -> None:
        """Makes the batch with this number the next one."""
        self.locate()
        if batch != self.position.batch:
            self._resources.check_usable()
            self._resources.close_stream()
            self._open(self.position.cursor, step=batch)

    def resume(self, cursor: bytes, *, changed_transforms: bool) -> None:
        """Goes to the place of a cursor; stays where it is if the daemon refuses that."""
        self._resources.check_usable()
        self._resources.close_stream()
        self._open(cursor, grow=True, changed_transforms=changed_transforms)

    def _open(self, cursor: bytes, **where: object) -> Stream:
        """Opens a session there; an exception leaves the loader without one, where it was.

        With `grow`, samples that were added since the cursor was saved come in later epochs. The
        weights of a mixture count where a job begins or resumes; afterwards the cursor has them.
        """
        request = pb.OpenSessionRequest()
        request.CopyFrom(self._request)
        if cursor and not where.get("grow"):
            request.ClearField("weights")
        request.MergeFrom(pb.OpenSessionRequest(cursor=cursor, **where))  # type: ignore[arg-type]
        resources = self._resources
        resources.finish()
        try:
            stream = self._open_stream(request, self._generations, resources.unfinished)
            self._adopt(stream.opened)
            resources.stream = stream
            return stream
        finally:
            resources.finish()

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
