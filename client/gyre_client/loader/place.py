"""Where a loader stands: its position and its stream.

Underneath is one stream without an end: the end of an iteration is a StopIteration between two
steps, and the daemon reads beyond it once the next iteration has begun. All iterators of a loader
take from that one stream, so only the youngest of them may go on.

[Note: Steps and epochs] The arithmetic is the same as the daemon's. An epoch has L positions: N
with the tail `wrap`, N rounded down to whole batches with `drop`, and N rounded up with `pad`. Step
s begins at position sG and belongs to the epoch of that position. So with `wrap` an epoch has
ceil(N/G) steps, or one less. A dataset may grow between two epochs. A *stage* is a run of epochs
with the same N. A job may leave steps out. Its *batches* are counted without them, and a session
knows them by these numbers; a step of the order keeps its own.

While the daemon measures a dataset, the loader shows how far it is.
"""

import contextlib
import itertools
import logging
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.batch import Position
from gyre_client.batches.stream import BatchStream, CudaTransfer, DeviceStream, Terms
from gyre_client.display import ProgressBar, is_watched, measuring_line
from gyre_client.errors import (
    ConcurrentUse,
    CursorRejected,
    DaemonUnavailable,
    ForkedProcess,
    GyreError,
    InvalidRequest,
    StorageUnavailable,
)
from gyre_client.loader.ranks import Agreement, SequenceCut
from gyre_client.transport.answers import MAX_CURSOR_BYTES, check_same_dataset
from gyre_client.transport.arguments import mapping, shown
from gyre_client.transport.connection import Connection, Outage
from gyre_client.transport.target import Target


class Epochs:
    """The epochs of one stream."""

    def __init__(
        self,
        stages: Sequence[tuple[int, int]],
        batch_size: int,
        tail: str = "wrap",
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Adds up where each stage begins.

        Args:
            stages: For each, its first epoch, and N, the samples of an epoch. The first begins with
                epoch 0; both numbers rise.
            batch_size: G, the positions of a step over all ranks.
            tail: How to use samples that do not fill an epoch's last batch.
            skipped: Ranges of steps to leave out; they rise and do not touch.
        """
        self._batch_size = batch_size
        self.skipped = tuple(skipped)
        self._first = [first for first, _ in stages]
        nums = [num_samples for _, num_samples in stages]
        if tail == "drop":
            nums = [num // batch_size * batch_size for num in nums]
        elif tail == "pad":
            nums = [-(-num // batch_size) * batch_size for num in nums]
        self._lengths = nums  # L of each
        self._positions = [0]
        for number in range(1, len(stages)):
            num_epochs = self._first[number] - self._first[number - 1]
            self._positions.append(self._positions[-1] + num_epochs * self._lengths[number - 1])

    def max_steps(self, num_epochs: int) -> int:
        """Returns the most steps that begin in `num_epochs` successive epochs of the order."""
        return -(-num_epochs * self._lengths[-1] // self._batch_size)

    def step_of(self, batch: int) -> int:
        """Returns the step of the order that the batch with this number is."""
        for first, stop in self.skipped:
            if batch < first:
                break
            batch += stop - first
        return batch

    def batch_of(self, step: int) -> int:
        """Returns how many batches come before a step of the order."""
        return step - sum(max(0, min(step, stop) - first) for first, stop in self.skipped)

    def first_batch(self, epoch: int) -> int:
        """Returns the first batch that begins in this epoch or later."""
        stage = bisect_right(self._first, epoch) - 1
        passed = (epoch - self._first[stage]) * self._lengths[stage]
        return self.batch_of(-(-(self._positions[stage] + passed) // self._batch_size))

    def epoch_of(self, batch: int) -> int:
        """Returns the epoch in which a batch begins."""
        stage, passed = self._place(batch)
        return self._first[stage] + passed // self._lengths[stage]

    def epochs_before(self, batch: int) -> float:
        """Returns the number of epochs of the order before a batch, as a fraction."""
        stage, passed = self._place(batch)
        return self._first[stage] + passed / self._lengths[stage]

    def _place(self, batch: int) -> tuple[int, int]:
        """Returns the stage in which a batch begins, and the positions in it that passed before."""
        position = self.step_of(batch) * self._batch_size
        stage = bisect_right(self._positions, position) - 1
        return stage, position - self._positions[stage]

    def stop(self, batch: int, num_epochs: int) -> int:
        """Returns the batch behind the last one of the iteration that `batch` belongs to.

        Iterations of `num_epochs` epochs follow each other from epoch 0 on.
        """
        num_iterations = self.epoch_of(batch) // num_epochs + 1
        return self.first_batch(num_iterations * num_epochs)


FORK_ADVICE = (
    "In a DataLoader use num_workers=0: the daemon fetches and decodes in parallel already. "
    "Elsewhere, make the Loader in the process that reads from it"
)


Stream = BatchStream | DeviceStream


class JobPlace:
    """A place in the order of a job, and the session that reads from there.

    The daemon says where the job begins, once it is asked.

    [Note: An interrupt takes no batch]
    A signal may raise an exception at any line, and memory may run out at most. So a batch is made
    while it stays in the queue, and one store, `stream.position = behind`, takes it. That store
    stands in the method that the script calls, on the line of its `return`: between the two Python
    neither handles a signal nor calls a trace function. Whatever is raised before leaves the loader
    where it was. The cursor, the step, credit and the batches that may be forgotten all follow from
    the position. A signal in the 100 ns from this store to the end of a caller's `next(...)` is
    raised in the caller's line, which then has no batch; a `for` loop has no such moment.

    Attributes:
        target: The daemon.
        epochs: The steps and epochs of the job, as its session counts them.
    """

    epochs: Epochs
    _description: pb.DatasetDescription
    _agreement: Agreement
    _cut: SequenceCut | None

    def __init__(
        self, target: Target, request: pb.OpenSessionRequest, tail: str, terms: Terms
    ) -> None:
        """Stands before the first batch, and opens nothing; `begin` comes next.

        The target is released with the place. A session has `request` with the place where its
        stream begins.
        """
        self.target = target
        self._request = request
        self._tail = tail
        self._terms = terms
        self._pid = os.getpid()  # this process alone may use and release it
        self._stream: Stream | None = None
        self._position = Position(b"", 0)  # while no session is open
        # Streams being opened or closed; an interrupt may have left them here.
        self._unfinished: list[BatchStream] = []
        self._is_released = False
        self._holds_target = True
        self._generations = itertools.count(request.reader.generation + 1)

    def begin(
        self, description: pb.DatasetDescription, agreement: Agreement, cut: SequenceCut | None
    ) -> None:
        """Counts the epochs of the dataset.

        `description` grows with the dataset.
        """
        self._description, self._agreement, self._cut = description, agreement, cut
        self._count([(0, description.num_samples)])

    @property
    def position(self) -> Position:
        """The cursor resumes after the last batch taken; it is empty before the first session."""
        stream = self._stream
        return self._position if stream is None else stream.position

    @property
    def last_batch(self) -> int | None:
        """The number of the last batch, if it came from the open stream."""
        stream = self._stream
        if stream is None or stream.position.batch == stream.opened.first_step:
            return None
        return stream.position.batch - 1

    def stream(self) -> Stream:
        """Returns the stream; opens it at the cursor if it is not open."""
        self._check_usable()
        return self._stream or self._open(self.position.cursor)

    def peek(self) -> tuple[Stream, dict[str, torch.Tensor], Position]:
        """Returns the stream, the tensors of its next batch, and the position behind it.

        To replace the stream's position by that one takes the batch: see the Note above.

        Raises:
            StopIteration: The daemon has ended the batches.
        """
        stream = self._stream
        if stream is None or self._pid != os.getpid():
            stream = self.stream()
        found = stream.peek()
        if found is None:
            raise StopIteration
        batch, behind = found
        tensors = batch.tensors
        return stream, self._cut(tensors) if self._cut else tensors, behind

    def iterate_until(self, stop: int) -> None:
        """Lets the daemon read up to this batch, and no further for now."""
        stream = self._stream
        if stream is None or self._pid != os.getpid():
            stream = self.stream()
        stream.source.iterate_until(stop)

    def locate(self) -> None:
        """Opens the stream if nothing was read yet: the daemon says where a job begins."""
        if not self.position.cursor:
            self.stream()

    def go_to(self, batch: int, *, reopens: bool = False) -> None:
        """Makes the batch with this number the next one; `reopens` a stream that stands there."""
        self.locate()
        if reopens or batch != self.position.batch:
            self._check_usable()
            self._close_stream()
            self._open(self.position.cursor, step=batch)

    def resume(self, cursor: bytes, *, changed_transforms: bool) -> None:
        """Goes to the place of a cursor; stays where it is if the daemon refuses that."""
        self._check_usable()
        self._close_stream()
        self._open(cursor, grow=True, changed_transforms=changed_transforms)

    def release(self) -> None:
        """Ends the session and lets go of a private daemon; may be repeated after an interrupt."""
        if self._pid == os.getpid():  # a forked child's copy owns nothing
            self._is_released = True
            self._close_stream()
            if self._holds_target:
                self._holds_target = False  # first: released twice, it would end another's daemon
                self.target.release()

    def _check_usable(self) -> None:
        """Checks that a session may be opened here."""
        if self._pid != os.getpid():
            raise ForkedProcess(
                f"this Loader was made by process {self._pid}, "
                f"but process {os.getpid()} reads it. {FORK_ADVICE}"
            )
        if self._is_released:
            raise InvalidRequest("this Loader is closed")

    def _close_stream(self) -> None:
        """Ends the session, drops batches read ahead, and keeps the position."""
        stream = self._stream
        if stream is not None:
            self._unfinished.append(stream.source)
            self._position = Position(stream.position.cursor, stream.position.batch)
            self._stream = None
            stream.close()
        self._close_unfinished()

    def _close_unfinished(self) -> None:
        """Ends sessions that an interrupt kept from being opened or closed."""
        while self._unfinished:
            stream = self._unfinished[-1]
            if self._stream is None or stream is not self._stream.source:
                stream.close()
            self._unfinished.pop()

    def _open(self, cursor: bytes, **where: object) -> Stream:
        """Opens a session there; an exception leaves the loader without one, where it was.

        With `grow`, samples that were added since the cursor was saved come in later epochs. The
        weights of a mixture count where a job begins or resumes; afterwards the cursor has them.

        Raises:
            GyreError: The daemon refuses, or the dataset is another one than was described, or than
                that of another rank.
        """
        request = pb.OpenSessionRequest()
        request.CopyFrom(self._request)
        if cursor and not where.get("grow"):
            request.ClearField("weights")
        request.MergeFrom(pb.OpenSessionRequest(cursor=cursor, **where))  # type: ignore[arg-type]
        self._close_unfinished()
        terms = self._terms
        try:
            # Made first: a device that fails opens no session.
            transfer = None if terms.device is None else CudaTransfer(terms.device)
            source = BatchStream(self.target, request, terms, self._generations)
            self._unfinished.append(source)
            source.open()
            check_same_dataset(source.opened, self._description)
            self._agreement.check(source.opened)
            stream = source if transfer is None else DeviceStream(source, transfer.begin)
            self._adopt(stream.opened)
            self._stream = stream
            return stream
        finally:
            self._close_unfinished()

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
        self, stages: list[tuple[int, int]], skipped: Sequence[tuple[int, int]] = ()
    ) -> None:
        batch_size = self._request.order.global_batch_size
        self.epochs = Epochs(stages, batch_size, self._tail, skipped)


_PACKAGE = __name__.rpartition(".")[0]


class OneThread:
    """Knows the last thread that used an object, and lets it continue at no cost.

    Another thread may take over unless the last one is in a method of the object at that moment.
    Nothing is held meanwhile, so there is nothing to leave: an exception may end a method anywhere.
    """

    __slots__ = ("_last", "_owner_id")

    def __init__(self, owner: object) -> None:
        """Takes the first thread that comes; `owner` is the object, which keeps this one."""
        self._owner_id = id(owner)
        self._last = 0  # the identifier of the thread

    def check(self) -> None:
        """Lets the calling thread use the object.

        Raises:
            ConcurrentUse: Another thread uses it now.
        """
        if self._last != get_ident():
            if self._is_inside():
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                raise ConcurrentUse(
                    f"thread {threading.current_thread().name!r} uses this Loader while thread "
                    f"{names.get(self._last, 'just ended')!r} does. "
                    "Use it in one thread at a time, or give each thread its own."
                )
            self._last = get_ident()

    def _is_inside(self) -> bool:
        frame = sys._current_frames().get(self._last)
        while frame is not None:
            # Only frames of this package are asked for their variables: to ask copies them.
            if (
                frame.f_globals.get("__package__") == _PACKAGE
                and id(frame.f_locals.get("self")) == self._owner_id
            ):
                return True
            frame = frame.f_back
        return False


# The first line comes soon enough that the job does not seem to hang; further ones, at
# growing intervals, do not fill the log of a job that waits for hours.
FIRST_LOOK_S, LONGEST_PAUSE_S = 5.0, 60.0
_FRAME_S = 1.0  # between two looks of a bar
_LOOK_TIMEOUT_S = 2.0  # an answer that came later would hold up a loader that need not wait
_log = logging.getLogger("gyre_client")


@contextlib.contextmanager
def _showing_measuring(target: Target, dataset: str) -> Iterator[None]:
    """A context in which the daemon's progress in measuring is shown.

    It is a bar on a terminal or in a notebook, else warnings in the log. An error of waiting that
    leaves the context says how far measuring was, if it was seen.

    `dataset` is the name that it waits for; "" for one without a definition.
    """
    over, seen = threading.Event(), [""]
    thread = threading.Thread(
        target=_show_measuring,
        args=(target, dataset, over, seen),
        name="gyre-measuring",
        daemon=True,
    )
    thread.start()
    try:
        yield
    except (DaemonUnavailable, StorageUnavailable) as error:
        if seen[-1]:
            raise error.told(f"{error}. The daemon measures, {seen[-1]}") from error
        raise
    finally:
        over.set()
        thread.join()


def _show_measuring(target: Target, dataset: str, over: threading.Event, seen: list[str]) -> None:
    pause_s = FIRST_LOOK_S
    draws = is_watched() and os.environ.get("LOCAL_RANK", "0") == "0"
    with contextlib.ExitStack() as shown:
        bar, states = None, list[pb.MeasuringState]()
        while not over.wait(pause_s):
            pause_s = _FRAME_S if draws else min(2 * pause_s, LONGEST_PAUSE_S)
            with contextlib.suppress(GyreError), Connection(target.address) as connection:
                found = connection.status(_LOOK_TIMEOUT_S).measurings
                states = [each for each in found if dataset in ("", each.dataset)]
                seen[:] = ["; ".join(map(measuring_line, states))]
            if not seen[-1] or over.is_set():
                continue
            if not draws:
                _log.warning("waiting until samples are measured: %s", seen[-1])
                continue
            bar = bar or shown.enter_context(ProgressBar("samples measured"))
            num_done = sum(each.num_done for each in states)
            num_all = sum(each.num_samples for each in states)
            bar.update(num_done, num_all, ", ".join(each.dataset for each in states))


def describe(
    target: Target,
    dataset: pb.DatasetRef,
    transforms: pb.TransformList | None,
    reattach_timeout_s: float,
) -> pb.DatasetDescription:
    """Returns the daemon's description of a dataset; waits for a daemon that is away.

    Raises:
        GyreError: See `Loader`.
    """
    with Connection(target.address) as connection, _showing_measuring(target, dataset.name):
        return Outage(reattach_timeout_s).retry(
            lambda timeout_s: connection.describe(dataset, timeout_s, transforms=transforms)
        )


def cursor_of(state_dict: Mapping[str, Any]) -> bytes:
    """Returns the cursor of a loader's state.

    Raises:
        InvalidRequest: It is no dict of names and values.
        CursorRejected: It is no state of a `Loader`.
    """
    cursor = mapping("state_dict", state_dict).get("cursor")
    if not isinstance(cursor, bytes) or not 0 < len(cursor) <= MAX_CURSOR_BYTES:
        raise CursorRejected(
            f"this is no state of a Loader: it has {shown(sorted(state_dict))}, "
            f"and `cursor` must be bytes, at most {MAX_CURSOR_BYTES}"
        )
    return cursor
