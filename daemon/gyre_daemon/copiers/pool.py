"""All copiers of a daemon: lent to its threads, told of arenas and files, and replaced where they die."""

import itertools
import logging
import math
import operator
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from gyre_daemon.copiers.copier import Copier, File
from gyre_daemon.copiers.keeper import Keeper, fork_keeper, spawn_keeper
from gyre_daemon.copiers.ranges import Ranges
from gyre_daemon.runtime.events import log_event

_MIN_REFILL_S = 1.0
_MAX_JOIN_S = 5.0  # at the end, for a keeper that is being started

_keys = itertools.count(1)


def new_key() -> int:
    """A name for an arena or a file that nothing else in this process has."""
    return next(_keys)


class Copiers:
    """So many copiers for all threads of a daemon; they end when it does, however that comes about."""

    def __init__(self, num: int) -> None:
        """Fork them: to be done before this process has threads or descriptors that matter. 0 forks none."""
        self._num = num
        self._all: list[Copier] = []
        self._idle: list[Copier] = []
        self._changed = threading.Condition()  # guards the lists; taken after the other
        self._keeping = threading.Lock()
        self._keeper = _fork_keeper() if num else None  # has all arenas that there are, for those that are forked from it
        self._is_replaceable = self._keeper is not None
        self._replacing: threading.Thread | None = None
        self._refilled_s = -math.inf
        self._add_missing()

    def __enter__(self) -> "Copiers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of those that can copy now."""
        return [copier.pid for copier in tuple(self._all)]

    def map(self, key: int, descriptor: int, num_bytes: int) -> None:
        """Let all have an arena that is not sealed yet; waits until each has done what it does."""
        with self._keeping:
            self._refill()
            self._tell_all(lambda copier: copier.map(key, descriptor, num_bytes))
            self._refill()

    def unmap(self, key: int) -> None:
        """None has that arena any more; waits likewise."""
        with self._keeping:
            self._tell_all(lambda copier: copier.unmap(key))

    def look_after(self) -> None:
        """Replace what died, the keeper too; to be called from time to time, in any thread that may wait."""
        with self._keeping:
            if self._keeper and self._keeper.is_gone:
                self._lose_keeper("it was killed")
            self._refill()

    def forget(self, file: int) -> None:
        """Nobody reads that file again: each unmaps it before it next copies. May be called at any moment in any thread."""
        for copier in tuple(self._all):
            copier.unneeded.append(file)

    def copy(self, arena: int, files: Iterable[File], ranges: Ranges) -> int | None:
        """Copy ranges of files into an arena; waits for a copier that is free.

        Args:
            arena: by key.
            files: all that the ranges lie in; the caller keeps them open.
            ranges: within the files and the arena.

        Returns:
            How often the copy waited for a disk; None where it is not done, or not all of it: no copier has the arena, a file
            is shorter than it was, or the copier died.
        """
        copier = self._borrow(lambda copier: arena in copier.arenas)
        if copier is None:
            return None
        try:
            reply = copier.copy(arena, files, ranges)
        except OSError:
            self._bury(copier)
            with self._keeping:
                self._refill()
            return None
        self._give_back(copier)
        return reply.value if reply.is_done else None

    def close(self) -> None:
        """End them all; what they are doing is not done."""
        with self._keeping:
            keeper, self._keeper, self._num = self._keeper, None, 0
            replacing, self._is_replaceable = self._replacing, False
            with self._changed:
                for copier in self._all:
                    copier.hang_up()
                for copier in self._idle:
                    copier.close()
                self._all, self._idle = [], []
                self._changed.notify_all()
        if keeper:
            keeper.close()
        if replacing:
            replacing.join(_MAX_JOIN_S)

    def _refill(self) -> None:
        """Replace those that died; but not all the time, if they die again and again."""
        now = time.monotonic()
        if len(self._all) < self._num and now - self._refilled_s >= _MIN_REFILL_S:
            self._refilled_s = now
            self._add_missing()

    def _add_missing(self) -> None:
        if self._keeper is None:
            return
        try:
            more = [self._keeper.fork() for _ in range(self._num - len(self._all))]
        except OSError as error:
            self._lose_keeper(str(error))
            return
        with self._changed:
            self._all += more
            self._idle += more

    def _lose_keeper(self, reason: str) -> None:
        """Those that are left go on, and another keeper is started beside; until it is there the kernel copies for who died."""
        if not self._keeper:
            return
        log_event("copier keeper died", {"pid": self._keeper.pid, "reason": reason}, logging.WARNING)
        self._keeper.close()
        self._keeper = None
        if self._is_replaceable:
            self._replacing = threading.Thread(target=self._replace_keeper, name="gyre-keeper", daemon=True)
            self._replacing.start()

    def _replace_keeper(self) -> None:
        """One that does not start is not tried again: then those that die are not replaced any more."""
        try:
            keeper = spawn_keeper()
        except OSError as error:
            self._is_replaceable = False
            facts = {
                "reason": str(error) or "it ended at once",
                "instead": "the kernel copies, which takes more processor time",
            }
            log_event("copiers are not replaced any more", facts, logging.ERROR)
            return
        with self._keeping:
            if self._is_replaceable:
                self._keeper = keeper
                log_event("copier keeper replaced", {"pid": keeper.pid})
                self._add_missing()
                return
        keeper.close()  # all were ended meanwhile

    def _tell_all(self, tell: Callable[[Copier], None]) -> None:
        try:
            if self._keeper:
                tell(self._keeper)
        except OSError as error:
            self._lose_keeper(str(error))
        for copier in tuple(self._all):
            if self._borrow(partial(operator.is_, copier)):
                try:
                    tell(copier)
                except OSError:
                    self._bury(copier)
                else:
                    self._give_back(copier)

    def _borrow(self, suits: Callable[[Copier], bool]) -> Copier | None:
        """The one of those that suit which was idle for the shortest time, as soon as one is; None where there is none."""
        with self._changed:
            while any(map(suits, self._all)):
                for copier in filter(suits, reversed(self._idle)):
                    self._idle.remove(copier)
                    return copier
                self._changed.wait()
        return None

    def _give_back(self, copier: Copier) -> None:
        with self._changed:
            if copier in self._all:
                self._idle.append(copier)
            else:
                copier.close()  # all were ended meanwhile
            self._changed.notify_all()

    def _bury(self, copier: Copier) -> None:
        copier.close()
        with self._changed:
            if copier in self._all:
                self._all.remove(copier)
                log_event("copier died", {"pid": copier.pid}, logging.WARNING)
            self._changed.notify_all()


def _fork_keeper() -> Keeper | None:
    try:
        return fork_keeper()
    except OSError as error:
        log_event("no copiers", {"reason": str(error)}, logging.WARNING)
        return None


NO_COPIERS = Copiers(0)
