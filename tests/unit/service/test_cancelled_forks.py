"""A caller that is cancelled while a process is forked takes nothing away from the thread."""

import asyncio
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from gyre_daemon.workers.compute_workers import ComputeServer, Task

from tests.contract.storage.engine import until


def test_the_connection_stays_open_until_the_thread_has_sent_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun, goes_on, has_ended = threading.Event(), threading.Event(), threading.Event()
    sent: list[int] = []

    def fork(_: ComputeServer, task: Task, connection: socket.socket) -> None:
        has_begun.set()
        assert goes_on.wait(60)
        with suppress(OSError):
            os.fstat(connection.fileno())
            sent.append(connection.fileno())
        has_ended.set()

    async def scene() -> None:
        monkeypatch.setattr(ComputeServer, "_fork", fork)
        starting = asyncio.create_task(ComputeServer().start(Task("x", "y:Z", 0, "test")))
        assert await asyncio.to_thread(has_begun.wait, 60)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        goes_on.set()
        assert await asyncio.to_thread(has_ended.wait, 60)
        await until(lambda: not Path(f"/proc/self/fd/{sent[0]}").exists())

    asyncio.run(scene())
    assert len(sent) == 1
