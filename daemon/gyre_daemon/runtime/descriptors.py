"""Descriptors held back, so that a newcomer can be told when no other is left."""

import contextlib
import os
from collections.abc import Iterator

from gyre_daemon.errors import Overloaded

# Descriptors that an open session may need at once: arenas, shards, requests. With less, a session
# opens and fails at its first batches; with more, newcomers are refused where they would fit.
_NUM_FOR_SESSION = 16


class SpareDescriptor:
    """One descriptor, free while it is lent."""

    def __init__(self) -> None:
        """Take a descriptor.

        Raises:
            OSError: none is left.
        """
        self._descriptor = _take()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Leave the descriptor free inside the block, for a connection to refuse."""
        self.close()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the next time, maybe
                self._descriptor = _take()

    def close(self) -> None:
        """Hold nothing back any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_descriptors() -> None:
    """Refuse a session that would not find the descriptors that it needs.

    Raises:
        Overloaded: this process has too few left.
    """
    taken: list[int] = []
    try:
        while len(taken) < _NUM_FOR_SESSION:
            taken.append(_take())
    except OSError as error:
        raise Overloaded(
            f"a session needs {_NUM_FOR_SESSION} file descriptors, but the daemon has only "
            f"{len(taken)} left. Close a session, or raise its limit (LimitNOFILE= of the unit, or "
            "ulimit -n).",
            {"needed_descriptors": _NUM_FOR_SESSION, "free_descriptors": len(taken)},
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _take() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
