"""Processes that decode chunks. One that dies or hangs costs its chunk, never the daemon."""

import os

from gyre_daemon.datasets.chunks.decoding import DecodeRequest
from gyre_daemon.datasets.scans.processes import (
    MAX_REPLY_BYTES,
    SCAN,
    is_reply,
    scan_request,
    scanned,
)
from gyre_daemon.errors import CorruptSample
from gyre_daemon.runtime.threads import Claims
from gyre_daemon.workers.compute_workers import ComputeServer, ComputeWorkers, WorkerLost
from gyre_daemon.workers.exchange import Exchange

# Each takes a core while jobs wait for chunks, and some ten MiB. More than this would rarely be
# needed: one decodes some hundred MB a second.
_MAX_PROCESSES = 8
# A chunk that is not decoded after this long never will be: the largest takes seconds. A shorter
# time would fail chunks on a machine that is very busy.
MAX_DECODE_S = 120.0


class Decoders:
    """Decodes chunks for all datasets of a daemon, fairly between jobs."""

    def __init__(self, server: ComputeServer, max_decode_s: float = MAX_DECODE_S) -> None:
        """Start no process yet.

        Args:
            server: forks the processes.
            max_decode_s: how long one may take for a chunk.
        """
        self._max_decode_s = max_decode_s
        self._workers = ComputeWorkers(
            server, SCAN, min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
        )

    async def decode(
        self, request: DecodeRequest, shard: str, exchange: Exchange, claims: Claims
    ) -> None:
        """Have a chunk decoded, whose pieces are in the exchange.

        A process that dies is replaced once: it may have been killed for another's memory.

        Raises:
            CorruptSample: the chunk cannot be decoded, or kills or stops those who try.
            Overloaded: no process can be started.
        """
        cost = sum(expected.num_bytes for expected in request.expected)
        body = scan_request(request, shard, "file")
        async with self._workers.line.turn_of(claims, cost):
            for _ in range(2):
                try:
                    reply = await self._workers.ask(
                        body,
                        [exchange.file.fileno()],
                        max_bytes=MAX_REPLY_BYTES,
                        deadline_s=self._max_decode_s,
                        is_reply=is_reply,
                    )
                    await scanned(reply)
                    return
                except WorkerLost as lost:
                    if lost.is_hung:
                        reason = f"it was not decoded within {self._max_decode_s:g} s"
                        break
                    reason = "the process that decoded it died; see the log of the kernel"
        offset = request.pieces[-1][0]
        raise CorruptSample(
            f"{request.noun} {request.number} of shard {shard} (at byte {offset}): {reason}",
            {"shard": shard, "chunk": request.number, "offset": offset, "reason": reason},
        )

    def close(self) -> None:
        """End all processes that do nothing; the others end with their requests."""
        self._workers.close()
