"""Ranks that try one model after another."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.distributed.gloo_ranks import Ranks


class Group:
    """Ranks, started again after an error."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self._num_ranks, self._folder = num_ranks, folder
        self._ranks: Ranks | None = None
        self._num_started = 0

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """The result of ``program(*args)`` on each rank.

        Raises:
            RankFailed: a rank raised; the message has its traceback.
        """
        if self._ranks is None or self._ranks.ended:
            self._num_started += 1
            folder = self._folder / str(self._num_started)
            folder.mkdir()
            self._ranks = Ranks(self._num_ranks, folder)
        return self._ranks.run(program, *args)

    def end(self) -> None:
        """End all processes."""
        if self._ranks is not None:
            self._ranks.end()


@contextmanager
def group_of(num_ranks: int) -> Iterator[Group]:
    """A group that ends with the context."""
    with tempfile.TemporaryDirectory() as folder:
        group = Group(num_ranks, Path(folder))
        try:
            yield group
        finally:
            group.end()
