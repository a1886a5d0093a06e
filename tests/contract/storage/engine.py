"""The engine over a source whose responses the test controls: shared by the endpoint tests."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import Flow
from gyre_daemon.storage.engine.endpoint import Endpoint, EndpointOptions, RemoteStorage
from gyre_daemon.storage.reads import Delays, Reads
from gyre_daemon.storage.response import OnResponse, Response
from gyre_daemon.storage.shard import Shard, Validators

from tests.contract.places import noise, run

DATA = noise(3, 4096)
SHARD = Shard("0.bin", len(DATA), '"v1"', validators=Validators('"v1"'))
FORBIDDEN = Response(403)
JOB = Flow("a")


class Asked:
    """A request that waits for the test's response."""

    first_byte_at = None

    def __init__(self, start: int, stop: int, done: OnResponse) -> None:
        self.start, self.stop, self._done = start, stop, done
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def when_free(self, free: Callable[[], None]) -> None:
        free()

    def answer(self, answer: Response | None = None) -> None:
        assert not self.is_cancelled
        self._done(
            answer or Response(206, DATA[self.start : self.stop], Validators('"v1"'), len(DATA))
        )


class ScriptedSource:
    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.refreshed: list[int] = []
        self.at_once: Callable[[Asked], object] | None = None

    def get(self, path: str, start: int, stop: int, done: OnResponse) -> Asked:
        asked = Asked(start, stop, done)
        self.asked.append(asked)
        if self.at_once:
            asyncio.get_running_loop().call_soon(self.at_once, asked)
        return asked

    def refresh(self, status: int) -> None:
        self.refreshed.append(status)

    def close(self) -> None:
        """Nothing is open."""

    @property
    def waiting(self) -> list[Asked]:
        return [asked for asked in self.asked if not asked.is_cancelled]


class Engine:
    def __init__(self, max_requests: int = 8, deadline_s: float = 10.0) -> None:
        self.source, self.metrics = ScriptedSource(), Metrics()
        self.endpoint = Endpoint(
            "there", "test", EndpointOptions(max_requests, deadline_s), self.metrics
        )
        self.storage = RemoteStorage(self.source, self.endpoint, ["there/0.bin"], [SHARD])

    def read(
        self,
        *starts: int,
        urgency: int = 0,
        delays: Delays | None = None,
        flow: Flow = JOB,
    ) -> "asyncio.Task[list[bytes]]":
        """Read 16 bytes at each of these places."""

        async def whole() -> list[bytes]:
            memory = [np.zeros(16, np.uint8) for _ in starts]
            one = Reads.into(memory, [0] * len(starts), list(starts))
            columns = one.shard, one.start, one.size, one.target, one.sample, one.memory
            await self.storage.read(Reads(*columns, flow=flow, urgency=urgency, delays=delays))
            return [each.tobytes() for each in memory]

        return asyncio.create_task(whole())

    async def learn_delays(self) -> None:
        """Let the engine learn latencies from 80 reads that are answered at once."""
        self.source.at_once = Asked.answer
        await self.read(*range(0, 1280, 16))
        self.source.at_once = None
        self.source.asked.clear()

    def outcomes(self) -> dict[str, int]:
        return {
            labels.outcome: count.num_requests for labels, count in self.metrics.storage.items()
        }


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(asyncio.wait_for(scene(), 120))


async def until(condition: Callable[[], bool]) -> None:
    # The condition reads the engine's state, which signals nothing.
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)
