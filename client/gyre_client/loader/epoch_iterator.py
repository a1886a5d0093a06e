"""Iterators over a loader's batches, from where the loader stands to the end of an epoch.

Underneath is one stream without an end: the end of an iteration is a StopIteration between two
steps, and the daemon reads beyond it once the next iteration has begun. All iterators of a loader
take from that one stream, so only the youngest of them may go on.
"""

from threading import get_ident
from typing import TYPE_CHECKING, Self

import torch

from gyre_client.errors import DaemonFault, GyreError, InvalidRequest
from gyre_client.tracebacks import fold

if TYPE_CHECKING:
    from gyre_client.batches.batch import Position
    from gyre_client.loader.loader import Loader
    from gyre_client.loader.place import Stream

_UNKNOWN = -1


class ActiveIteration:
    """The iteration that may read a loader; the loader and its youngest iterator share it.

    It is a separate object so that no loader refers to an iterator, which refers to the loader:
    a dropped loader is then closed at once, without a garbage collection.

    Attributes:
        stop_batch: The batch behind the last one of the iteration; -1 if it is not known yet.
    """

    __slots__ = ("stop_batch",)

    def __init__(self) -> None:
        self.stop_batch = _UNKNOWN

    def forget_end(self) -> None:
        """Makes the iterator find its end again before its next batch."""
        self.stop_batch = _UNKNOWN


class EpochIterator:
    """An iterator over the batches of one or several epochs. Once it has ended, it stays ended."""

    def __init__(self, loader: "Loader", num_epochs: int | None, *, restart: bool) -> None:
        """Ends the right of the iterator before to read the loader.

        Args:
            loader: The loader to read.
            num_epochs: The iteration ends at the next multiple of `num_epochs`, counted from epoch
                0; None for an iteration without an end.
            restart: The iteration begins at the first batch, wherever the loader stands.
        """
        self._loader = loader
        self._num_epochs = num_epochs
        self._restart = restart
        self._has_ended = False
        loader._active.forget_end()  # the older iterator looks, and finds that it is not active
        self._active = loader._active = ActiveIteration()

    def __iter__(self) -> Self:
        return self

    def ends_at(self, batch: int) -> bool:
        """Returns whether the iteration ends before the batch with this number."""
        return batch >= self._active.stop_batch != _UNKNOWN

    def __next__(self) -> dict[str, torch.Tensor]:
        try:
            stream, tensors, behind = self.peek()
        except GyreError as error:
            fold(error)
            raise
        get_ident()  # after a call, Python handles the signals that have come
        # One line: see [Note: An interrupt takes no batch] in `place`.
        stream.position = behind; return tensors  # noqa: E702  # fmt: skip

    def peek(self) -> "tuple[Stream, dict[str, torch.Tensor], Position]":
        """Returns the next batch without taking it; see `Place.peek`.

        Raises:
            StopIteration: The iteration has ended.
            GyreError: See `Loader`.
        """
        loader = self._loader
        if loader._batch >= self._active.stop_batch:
            self._find_end()
        try:
            return loader._peek()
        except StopIteration:
            raise DaemonFault(
                f"the daemon ended the batches before step {loader.step}, but this iteration "
                f"goes on to step {loader.step_of(self._active.stop_batch)}"
            ) from None

    def _find_end(self) -> None:
        """Asks the loader where the iteration ends.

        Raises:
            StopIteration: The iteration has ended.
            InvalidRequest: A younger iterator reads the loader.
        """
        if self._has_ended:
            raise StopIteration
        if self._loader._active is not self._active:
            raise InvalidRequest(
                "another iteration of this Loader has begun since, and only the youngest one may "
                "go on: all of them would take from one stream. Make a second Loader for a second "
                "reader"
            )
        if self._active.stop_batch != _UNKNOWN:
            self._has_ended = True
            raise StopIteration
        if self._restart:
            self._loader.reset()
            self._restart = False
        self._active.stop_batch = self._loader._begin_iteration(self._num_epochs)
