"""Processes that decode chunks. One that dies or hangs costs its chunk, never the daemon."""

import asyncio
import os

from gyre_daemon.datasets.chunks.exchange import Exchange
from gyre_daemon.datasets.formats.decoding import DecodeRequest
from gyre_daemon.datasets.indexing.scans.processes import ScanProcess, ScanProcesses
from gyre_daemon.errors import CorruptSample, GyreError
from gyre_daemon.runtime.fair import Claims, FairQueue

# Each takes a core while jobs wait for chunks, and some ten MiB. More than this would rarely be
# needed: one decodes some hundred MB a second.
_MAX_PROCESSES = 8
# A chunk that is not decoded after this long never will be: the largest takes seconds. A shorter
# time would fail chunks on a machine that is very busy.
MAX_DECODE_S = 120.0


class Decoders:
    """Decodes chunks for all datasets of a daemon, fairly between jobs."""

    def __init__(self, processes: ScanProcesses, max_decode_s: float = MAX_DECODE_S) -> None:
        """Start no process yet.

        Args:
            processes: starts them.
            max_decode_s: how long one may take for a chunk.
        """
        self._processes = processes
        self._max_decode_s = max_decode_s
        num_processes = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
        self._line = FairQueue(num_processes)
        self._idle: list[ScanProcess] = []
        self._is_closed = False

    async def decode(
        self, request: DecodeRequest, shard: str, exchange: Exchange, claims: Claims
    ) -> None:
        """Have a chunk decoded, whose pieces lie in the exchange.

        A process that dies is replaced once: it may have been killed for another's memory.

        Raises:
            CorruptSample: the chunk cannot be decoded, or kills or stops those who try.
            Overloaded: no process can be started.
        """
        cost = sum(expected.num_bytes for expected in request.expected)
        async with self._line.turn_of(claims, cost):
            for _ in range(2):
                try:
                    if await self._decode(request, shard, exchange):
                        return
                    reason = "the process that decoded it died; see the log of the kernel"
                except TimeoutError:
                    reason = f"it was not decoded within {self._max_decode_s:g} s"
                    break
        offset = request.pieces[-1][0]
        raise CorruptSample(
            f"{request.noun} {request.number} of shard {shard} (at byte {offset}): {reason}",
            {"shard": shard, "chunk": request.number, "offset": offset, "reason": reason},
        )

    async def _decode(self, request: DecodeRequest, shard: str, exchange: Exchange) -> bool:
        """Whether a process decoded it; False if it died of that."""
        process = self._idle.pop() if self._idle else await self._processes.start()
        is_sound = False
        try:
            async with asyncio.timeout(self._max_decode_s):
                await process.scan_file(request, shard, exchange.file.fileno())
            is_sound = True
        except GyreError:
            is_sound = not process.has_died  # it said so itself
            if is_sound:
                raise
        finally:
            if is_sound and not self._is_closed:
                self._idle.append(process)
            else:
                process.kill()
        return is_sound

    def close(self) -> None:
        """End all processes that do nothing; the others end with their requests."""
        self._is_closed = True
        for process in self._idle:
            process.kill()
        self._idle.clear()
