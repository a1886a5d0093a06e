"""One pass over a loader's batches, from where the loader stands to the end of the pass.

Underneath is one stream without an end: the end of a pass is a StopIteration between two steps, while the daemon already reads
what follows. All passes of a loader take from that one stream, so only the youngest of them may be read.
"""

from typing import Protocol, Self

import torch

from gyre_client.errors import InvalidRequest

_UNKNOWN = -1


class Turn:
    """The right to read a loader. A loader has one at a time; it belongs to the youngest pass.

    Attributes:
        stop_step: The step behind the last one of the pass.
    """

    __slots__ = ("stop_step",)

    def __init__(self) -> None:
        self.stop_step = _UNKNOWN

    def look_again(self) -> None:
        """Where the pass ends is to be found out again, before its next batch."""
        self.stop_step = _UNKNOWN


class Stream(Protocol):
    """What a pass reads: a loader."""

    _step: int
    _turn: Turn

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next batch."""

    def reset(self) -> None:
        """The next batch is the first one."""

    def _stop_step(self, num_epochs: int | None) -> int:
        """The step behind the last one of the pass that the next batch belongs to."""


class Pass:
    """An iterator over the batches of a pass. Once it has ended it stays so."""

    def __init__(self, stream: Stream, num_epochs: int | None, *, restart: bool) -> None:
        """Takes the right to read away from the pass before.

        Args:
            stream: What to read.
            num_epochs: Where the pass ends: at the next multiple of so many epochs, counted from epoch 0; None for nowhere.
            restart: The pass begins at the first batch, wherever the stream stands.
        """
        self._stream = stream
        self._num_epochs = num_epochs
        self._restart = restart
        self._has_ended = False
        stream._turn.look_again()  # whose it was will see that it has passed on
        self._turn = stream._turn = Turn()

    def __iter__(self) -> Self:
        return self

    @property
    def is_at_end(self) -> bool:
        """The batch that it yielded last is its last one."""
        return self._stream._step >= self._turn.stop_step != _UNKNOWN

    def __next__(self) -> dict[str, torch.Tensor]:
        stream = self._stream
        if stream._step >= self._turn.stop_step:
            self._look()
        return next(stream)

    def _look(self) -> None:
        """Finds out where the pass ends, where that is not known.

        Raises:
            StopIteration: It has ended.
            InvalidRequest: A younger pass reads the loader.
        """
        if self._has_ended:
            raise StopIteration
        if self._stream._turn is not self._turn:
            raise InvalidRequest(
                "another iteration of this Loader has begun since, and only the youngest one may go on: "
                "all of them would take from one stream. Make a second Loader for a second reader"
            )
        if self._turn.stop_step != _UNKNOWN:
            self._has_ended = True
            raise StopIteration
        if self._restart:
            self._restart = False
            self._stream.reset()
        self._turn.stop_step = self._stream._stop_step(self._num_epochs)
