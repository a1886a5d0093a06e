"""Processes that transform samples. One that dies or hangs costs no sample but the one at fault."""

import contextlib
import logging
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from gyre_daemon.monitoring.metrics import TransformCounts
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import Claims, Flow
from gyre_daemon.transforms.messages import (
    DESCRIBED_DECODER,
    DONE_DECODER,
    HEAD,
    MAX_PACKET_BYTES,
    Described,
    Done,
    Kind,
)
from gyre_daemon.workers.compute_workers import (
    ComputeServer,
    ComputeWorkers,
    Exchange,
    Task,
    WorkerLost,
)

# To load a chain's classes may take that long: libraries of users import others for seconds.
_MIN_LOAD_S = 60.0
# The assumed cost of describing a chain, until it is known. If it were free, clients that
# ask for one chain after the other would keep the turns from those who read. One that takes much
# longer, as libraries are imported, counts as this at most.
_DESCRIBED_IN_S, _MOST_DESCRIBED_IN_S = 0.01, 1.0
# The most a process may allocate: some decoded images of 100 megapixels. More would let one take
# the memory of the machine.
TRANSFORM = Task(
    "gyre-transform", "gyre_daemon.transforms.worker:Transforming", 2 << 30, "transform samples"
)


class SampleFailed(Exception):
    """A sample cannot be transformed.

    Attributes:
        number: of the sample in its portion.
        transform: the name of the one that failed; empty if unknown.
        reason: in words.
        is_costly: whether to find out took a process, and perhaps its deadline.
    """

    def __init__(self, number: int, transform: str, reason: str, *, is_costly: bool) -> None:
        super().__init__(reason)
        self.number, self.transform, self.reason = number, transform, reason
        self.is_costly = is_costly


class TransformWorkers:
    """The worker processes of a daemon, which all jobs share fairly."""

    def __init__(
        self, server: ComputeServer, num: int, deadline_s: float, counts: TransformCounts
    ) -> None:
        """Start no process yet.

        Args:
            server: forks the processes.
            num: of processes, at most.
            deadline_s: how long one may take for a portion, or for one sample.
            counts: of their work.
        """
        self._deadline_s = deadline_s
        self._counts = counts
        self._workers = ComputeWorkers(server, TRANSFORM, num)
        self._described_in_s = _DESCRIBED_IN_S

    async def describe(self, recipe: bytes, flow: Flow) -> Described:
        """The properties of a chain.

        Args:
            recipe: an encoded `Recipe`.
            flow: the job that asks.

        Raises:
            Overloaded: no process can be started.
        """
        packet = HEAD.pack(Kind.DESCRIBE, 0, 0) + recipe
        if len(packet) > MAX_PACKET_BYTES:
            return Described(f"the transforms and fields take more than {MAX_PACKET_BYTES} bytes")
        reason = ""
        for _ in range(2):  # a process may have been ended for another reason
            async with self._workers.line.turn_of(Claims(flow, 0), self._described_in_s):
                began_s = time.monotonic()
                answer, reason = await self._ask(packet, max(self._deadline_s, _MIN_LOAD_S))
                took_s = min(time.monotonic() - began_s, _MOST_DESCRIBED_IN_S)
                self._described_in_s += (took_s - self._described_in_s) / 8
            with contextlib.suppress(msgspec.MsgspecError):
                return DESCRIBED_DECODER.decode(answer or b"")
            if reason.startswith("it took"):
                break
        return Described(f"the transforms cannot be loaded: {reason}")

    async def work(
        self,
        kind: Kind,
        exchange: Exchange,
        request: range,
        waiting: list[int],
        claims: Claims,
        sample_s: float,
    ) -> tuple[list[Done], int]:
        """Have samples of the portion in an exchange transformed or measured.

        Where the process dies or hangs, other ones do one sample after the other.

        Args:
            kind: `TRANSFORM` or `MEASURE`.
            exchange: has the stored fields where the portion says.
            request: the portion's bytes in the exchange.
            waiting: the numbers of the samples. More may be added until a process is free, which
                then takes all of them.
            claims: the jobs that wait.
            sample_s: the processor time that a sample will take, as far as known.

        Returns:
            The answers, and how many samples they are for.

        Raises:
            SampleFailed: a sample is refused, or kills or stops the process that tries it.
            Overloaded: no process can be started.
        """
        num_asked = len(waiting)
        async with self._workers.line.turn_of(claims, sample_s * num_asked):
            numbers, num = waiting[:], len(waiting)
            waiting.clear()
            if num > num_asked:
                self._workers.line.charge(claims.first[0], sample_s * (num - num_asked))
            done, _ = await self._transform(kind, exchange, request, numbers)
            if done is not None:
                return [self._checked(kind, done, num)], num
            each = [await self._alone(kind, exchange, request, number) for number in numbers]
            return each, num

    def close(self) -> None:
        """End the processes that do nothing; the others end with their requests."""
        self._workers.close()

    async def _alone(self, kind: Kind, exchange: Exchange, request: range, number: int) -> Done:
        """Have one sample transformed; one that kills a process is tried once more."""
        reason = ""
        for _ in range(2):
            done, reason = await self._transform(kind, exchange, request, [number])
            if done is not None:
                return self._checked(kind, done, 1)
            if reason.startswith("it took"):
                break
        raise SampleFailed(number, "", reason, is_costly=True)

    def _checked(self, kind: Kind, done: Done, num: int) -> Done:
        if done.failed >= 0:
            raise SampleFailed(done.failed, done.transform, done.reason, is_costly=False)
        self._counts.num_samples += num if kind == Kind.TRANSFORM else 0
        self._counts.cpu_s += done.cpu_s
        return done

    async def _transform(
        self, kind: Kind, exchange: Exchange, request: range, numbers: Sequence[int]
    ) -> tuple[Done | None, str]:
        """The outcome for some samples; None and the reason if the process died or hung."""
        packet = HEAD.pack(kind, request.start, request.stop) + np.array(numbers, "<i4").tobytes()
        answer, reason = await self._ask(packet, self._deadline_s, exchange.file.fileno())
        with contextlib.suppress(msgspec.MsgspecError):
            done = DONE_DECODER.decode(answer or b"")
            if done.failed < 0 or done.failed in numbers:
                return done, ""
        return None, reason

    async def _ask(
        self, packet: bytes, deadline_s: float, descriptor: int = -1
    ) -> tuple[bytes | None, str]:
        """The answer of an idle process; None and the reason if it died or hung, which ends it."""
        try:
            descriptors = [descriptor] if descriptor >= 0 else []
            answer = await self._workers.ask(
                packet, descriptors, max_bytes=MAX_PACKET_BYTES, deadline_s=deadline_s
            )
        except WorkerLost as lost:
            reason = "the process that transformed it died; see the log of the kernel"
            if lost.is_hung:
                reason = f"it took longer than {deadline_s:g} s (transform_deadline_s)"
            if not self._workers.is_closed:
                self._counts.num_replaced += 1
                log_event("transform worker replaced", {"reason": reason}, logging.WARNING)
            return None, reason
        return answer, ""
