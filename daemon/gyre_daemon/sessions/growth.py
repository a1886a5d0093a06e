"""When a window grows, and to how much. Pure: the caller brings the clock."""

import math

from gyre_daemon.memory.share import Share

_REST_S = 30.0  # after it has shrunk: memory that is asked for elsewhere is not taken, touched and given back all the time


class Growth:
    """Counts batches that subscribers waited for: where that is half of a whole window, it should grow.

    A storage that answers late is asked for twice as much at once. What is read in bulk waits for the processor and not for an
    answer: more at once bring nothing, but longer strips do, for what is done once for each of them is done less often. It gets
    one window more at a time, since memory is slow to come where the processors are busy.
    """

    def __init__(self, share: Share, *, in_bulk: bool) -> None:
        """Nothing was waited for yet."""
        self._share = share
        self._in_bulk = in_bulk
        self._rests_until = -math.inf
        self._num_sealed = self._num_awaited = 0

    def sealed(self, num_batches: int, num_windows: int, now: float, *, is_awaited: bool) -> int:
        """Batches are whole.

        Args:
            num_batches: so many.
            num_windows: how many times the share's window there is now.
            now: the time.
            is_awaited: somebody waited for them.

        Returns:
            How many windows there should be from now on.
        """
        self._num_sealed += num_batches
        self._num_awaited += num_batches * is_awaited
        if not self._share.may_grow or self._num_sealed < self._share.num_ahead * num_windows:
            return num_windows
        is_wanted = 2 * self._num_awaited >= self._num_sealed and now >= self._rests_until
        self._num_sealed = self._num_awaited = 0
        if not is_wanted:
            return num_windows
        return min(num_windows + 1, self._share.max_windows) if self._in_bulk else 2 * num_windows

    def shrunk(self, now: float) -> None:
        """Memory was given back."""
        self._rests_until = now + _REST_S
