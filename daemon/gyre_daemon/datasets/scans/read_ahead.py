"""Reads ahead all ranges that the scan of a shard in object storage will ask for.

A scan asks for one range after the other, and waits for each. A file next to the shard may tell
which ranges these are; see `ReadAhead`. What it tells is only a hint: the scan is the same, and
asks for the rest.
"""

import asyncio
import bisect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gyre_daemon.datasets.formats.base import ReadAhead
from gyre_daemon.errors import GyreError
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.opening.opener import StorageOpener
from gyre_daemon.storage.opening.shard_files import read_ranges


class Beside:
    """The files next to the shards of one dataset; they are looked for once, when one is needed."""

    def __init__(
        self, opener: StorageOpener, source: Storage, ahead: ReadAhead, settings: Mapping[str, Any]
    ) -> None:
        """Look for nothing yet.

        Args:
            opener: the daemon's.
            source: the shards.
            ahead: of the format.
            settings: of the storage driver.
        """
        self._opener, self._source, self._settings = opener, source, settings
        self._ahead = ahead
        self._turn = asyncio.Lock()
        self._files: Storage | None = None
        self._is_known = False

    async def ranges_of(self, shard: int) -> "KnownRanges | None":
        """The ranges that the scan of a shard will ask for; None if the whole shard should be read.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: the shard cannot be read.
        """
        files = await self._found()
        if files is None:
            return None
        index_bytes = files.shards[shard].size_bytes
        (index,) = await read_ranges(files, [shard], [0], [index_bytes])
        known, response = KnownRanges(), None
        steps = self._ahead.run(index, self._source.shards[shard].size_bytes)
        try:
            while True:
                wanted = await compute(_advance, steps, response)
                if wanted is None:
                    break
                starts, stops = [start for start, _ in wanted], [stop for _, stop in wanted]
                response = await read_ranges(self._source, [shard] * len(wanted), starts, stops)
                known.add(starts, response)
        except ValueError as error:
            facts = {"file": files.shards[shard].name, "reason": str(error)}
            log_event("stale index next to a shard is not used", facts, logging.WARNING)
            return None
        return known if response else None

    async def _found(self) -> Storage | None:
        """The files, one for each shard; None if a shard has none."""
        async with self._turn:
            if not self._is_known:
                numbers = range(len(self._source.shards))
                for some in (numbers[:1], numbers):  # most datasets have none
                    try:
                        self._files = await self._opener.open_beside(
                            self._source, some, self._ahead.suffix, self._settings
                        )
                    except GyreError:
                        self._files = None  # the shards can be read without them
                    if self._files is None:
                        break
                self._is_known = True
            return self._files


class KnownRanges:
    """Ranges of a shard that were read."""

    def __init__(self) -> None:
        """There is none yet."""
        self._ranges: list[tuple[int, bytes]] = []

    def add(self, starts: Sequence[int], pieces: Sequence[bytes]) -> None:
        """Keep ranges by their first byte."""
        self._ranges += zip(starts, pieces, strict=True)
        self._ranges.sort(key=lambda each: each[0])

    def find(self, start: int, stop: int) -> bytes | None:
        """The bytes `[start, stop)`; None if they are not in one range that was read."""
        place = bisect.bisect_right(self._ranges, start, key=lambda each: each[0]) - 1
        if place < 0:
            return None
        begin, piece = self._ranges[place]
        return piece[start - begin : stop - begin] if stop <= begin + len(piece) else None


def _advance(steps: Any, response: Sequence[bytes] | None) -> Sequence[tuple[int, int]] | None:
    """The next ranges; None if there are no more."""
    try:
        wanted: Sequence[tuple[int, int]] = steps.send(response)
        return wanted
    except StopIteration:
        return None
