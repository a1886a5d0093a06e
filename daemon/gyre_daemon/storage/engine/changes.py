"""Notices that an object is no longer the one that was listed, by whatever its storage tells.

[Note: Answers that tell nothing]

Most storages send a validator with each answer, and it is compared with that of the listing. Some
do not, and drivers of fsspec return bytes alone: then the object is looked at again after its bytes
have come, once for all reads of it that wait, and what is told now must agree with the listing.
Where a listing tells nothing, the first answer counts in its place. Where nothing is told at all, a
change cannot be noticed, and the log says so once.
"""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from gyre_daemon.errors import GyreError, StorageUnavailable
from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.engine.retries import pause_s
from gyre_daemon.storage.shard import Shard, changed
from gyre_daemon.storage.validators import UNKNOWN, Validators, is_same

# The size and the validators of an object as it is now.
Look = Callable[[str], Awaitable[tuple[int, Validators]]]
# Called with the error, or None if the bytes are those of the listed version.
Decide = Callable[[GyreError | None], None]

_MAX_LOOK_S = 20.0  # after which a look that fails is not tried again


class ChangeCheck:
    """Compares answers with the listing, for the objects of one dataset."""

    def __init__(
        self, name: str, paths: Sequence[str], shards: Sequence[Shard], look: Look | None
    ) -> None:
        """Know nothing but the listing.

        Args:
            name: of the storage, for the log.
            paths: of the objects.
            shards: as listed.
            look: looks at an object again; None if that tells nothing.
        """
        self._name, self._paths, self._shards, self._look = name, paths, shards, look
        self._known: dict[int, Validators] = {}  # where answers told more than the listing
        self._waiting: dict[int, list[tuple[Validators, Decide]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_warned = False

    def check(self, number: int, shard: Shard, told: Validators, decide: Decide) -> None:
        """Decide about bytes of an object that came with these validators, now or later."""
        known = self._known.get(number, shard.validators)
        same = is_same(known, told)
        if same is not None:
            decide(None if same else changed(shard.name))
        elif shard.validators and self._look:
            if number in self._waiting:  # and so a task looks
                self._waiting[number].append((told, decide))
                return
            self._waiting[number] = [(told, decide)]
            task = asyncio.get_running_loop().create_task(self._look_again(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._learn(number, known, told)
            decide(None)

    async def _look_again(self, number: int) -> None:
        """Decide about all bytes that came before a look began, until none wait."""
        while waiting := self._waiting[number]:
            self._waiting[number] = []
            error, now = await self._see(number)
            for told, decide in waiting:
                decide(error or self._compared(number, now, told))
        del self._waiting[number]

    def _compared(self, number: int, now: Validators, told: Validators) -> GyreError | None:
        """The error if the bytes or the object as it is now differ from the listing."""
        known = self._known.get(number, self._shards[number].validators)
        if is_same(known, now) is False or is_same(now, told) is False:
            return changed(self._shards[number].name)
        if is_same(known, now) is None:
            self._look = None  # it tells nothing that could be compared
            self._learn(number, known, told)
        elif told:
            self._known[number] = known.joined(told)
        return None

    async def _see(self, number: int) -> tuple[GyreError | None, Validators]:
        """The object as it is now."""
        shard, look = self._shards[number], self._look
        if look is None:
            return None, UNKNOWN
        until = time.monotonic() + _MAX_LOOK_S
        for attempt in itertools.count(1):
            try:
                size, now = await look(self._paths[number])
            except GyreError as error:
                if not isinstance(error, StorageUnavailable) or time.monotonic() > until:
                    return error, UNKNOWN
                await asyncio.sleep(pause_s(attempt, random.random()))
            else:
                return (changed(shard.name) if size != shard.size_bytes else None), now
        raise AssertionError

    def _learn(self, number: int, known: Validators, told: Validators) -> None:
        if told:
            self._known[number] = known.joined(told)
        elif not self._has_warned:
            self._has_warned = True
            facts = {
                "storage": self._name,
                "shard": self._shards[number].name,
                "reason": "the storage tells no ETag, version or time of its objects: bytes of a "
                "replaced object of equal size are served as if they were the old ones; never "
                "overwrite a shard there, write a new name",
            }
            log_event("changes cannot be noticed", facts, logging.WARNING)
