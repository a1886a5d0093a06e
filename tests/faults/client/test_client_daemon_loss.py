"""A loader whose daemon goes away.

Nothing lost, nothing doubled, or a clear error within the limit.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import DaemonUnavailable
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from tests.conftest import StartDaemon

NUM_SAMPLES = 1000
LENGTH = 64


@pytest.fixture
def daemon(gyred: Any, tmp_path: Path) -> Any:
    path = tmp_path / "tokens.bin"
    np.arange(NUM_SAMPLES * LENGTH, dtype=np.uint16).tofile(path)
    return gyred(
        {
            "lease_s": 1.0,
            "datasets": {
                "numbers": {
                    "uri": str(path),
                    "format": "tokens",
                    "dtype": "int16",
                    "sequence_length": LENGTH,
                }
            },
        }
    )


def steps(loader: Loader, num: int) -> list[list[int]]:
    return [batch["sample_id"].tolist() for batch in islice(loader.stream(), num)]


@pytest.fixture
def uninterrupted(daemon: Any) -> list[list[int]]:
    with Loader("numbers", batch_size=8, address=daemon.address) as loader:
        return steps(loader, 500)


def kill(daemon: Any) -> None:
    daemon.kill()


def stop(daemon: Any) -> None:
    assert daemon.stop() == 0


@pytest.mark.parametrize("end", [kill, stop])
def test_reading_continues_when_the_daemon_comes_back(
    daemon: Any, uninterrupted: list[list[int]], end: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed or stopped at two points, with different amounts prefetched.

    While it is away the loader waits.
    """
    with (
        Loader("numbers", batch_size=8, address=daemon.address, prefetch_batches=64) as loader,
        caplog.at_level(logging.WARNING),
    ):
        seen = []
        kept = []
        for num in (1, 57):
            seen += steps(loader, num)
            kept.append((loader.state_dict(), len(seen)))
            end(daemon)
            restart = threading.Timer(0.3, daemon.restart)
            restart.start()
            seen += steps(loader, 150)  # more than can be in the queue
            restart.join()
        seen += steps(loader, len(uninterrupted) - len(seen))
        assert seen == uninterrupted
        assert len(caplog.records) == 2
        for state, place in kept:
            loader.load_state_dict(state)
            assert steps(loader, 5) == uninterrupted[place : place + 5]


def test_a_daemon_that_stays_away_is_an_error_within_the_limit(daemon: Any) -> None:
    with Loader(
        "numbers", batch_size=8, address=daemon.address, prefetch_batches=2, reattach_timeout_s=0.7
    ) as loader:
        steps(loader, 1)
        state = loader.state_dict()
        daemon.kill()
        began = time.monotonic()
        with pytest.raises(
            DaemonUnavailable,
            match=r"no daemon answers at unix:.*gyre\.sock.*gave up after \d\.\d s",
        ) as caught:
            steps(loader, 300)
        assert 0.5 < time.monotonic() - began < 45  # the limit is its own, not the usual minute
        with pytest.raises(DaemonUnavailable) as again:
            next(loader)
        assert again.value is caught.value
        daemon.restart()
        loader.load_state_dict(state)
        assert len(steps(loader, 5)) == 5


def test_a_daemon_that_starts_late_is_waited_for(daemon: Any) -> None:
    daemon.kill()
    restart = threading.Timer(0.3, daemon.restart)
    restart.start()
    with Loader("numbers", batch_size=8, address=daemon.address) as loader:
        assert len(steps(loader, 3)) == 3
    restart.join()
    daemon.kill()
    with pytest.raises(DaemonUnavailable, match="gave up after"):
        Loader("numbers", batch_size=8, address=daemon.address, reattach_timeout_s=0.1)


def test_a_daemon_on_a_busy_node_is_given_time_to_answer_a_new_connection(daemon: Any) -> None:
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        with (
            ThreadPoolExecutor(1) as threads,
            Connection(parse_address(daemon.address)) as connection,
        ):
            answer = threads.submit(connection.list_datasets)
            wait([answer], timeout=1.5)  # what was refused before comes within a second
            os.kill(daemon.process.pid, signal.SIGCONT)
            assert [dataset.name for dataset in answer.result().datasets] == ["numbers"]
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)


def test_closing_does_not_wait_for_a_daemon_that_is_away(daemon: Any) -> None:
    loader = Loader("numbers", batch_size=8, address=daemon.address)
    steps(loader, 1)
    daemon.kill()
    time.sleep(0.2)  # it is trying again by now
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 30  # far from the minute that a reader would wait
    assert "gyre-receiver" not in [thread.name for thread in threading.enumerate()]


def test_a_frozen_daemon_is_given_up_after_the_lease(
    daemon: Any, uninterrupted: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with Loader("numbers", batch_size=8, address=daemon.address, prefetch_batches=2) as loader:
        seen = steps(loader, 20)
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            thaw = threading.Timer(2.0, os.kill, (daemon.process.pid, signal.SIGCONT))
            thaw.start()
            seen += steps(loader, 100)
            thaw.join()
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        assert seen == uninterrupted[:120]
    assert any("longer than the lease of 1.0 s" in record.getMessage() for record in caplog.records)


def test_a_trainer_that_computes_for_longer_than_the_lease_keeps_its_session(
    daemon: Any, uninterrupted: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with Loader("numbers", batch_size=8, address=daemon.address, prefetch_batches=2) as loader:
        seen = steps(loader, 3)
        time.sleep(2.5)
        seen += steps(loader, 30)
    assert seen == uninterrupted[:33]
    assert caplog.records == []


FROZEN_CLIENT = """
import sys
from gyre_client import Loader

with Loader("numbers", batch_size=8, address=sys.argv[1], prefetch_batches=2) as loader:
    for _ in range(60):
        print(next(loader)["sample_id"].tolist(), flush=True)
        if loader.step == 20:
            sys.stdin.readline()
"""


def test_a_client_frozen_past_its_lease_reads_on(
    daemon: Any, uninterrupted: list[list[int]]
) -> None:
    command = [sys.executable, "-c", FROZEN_CLIENT, daemon.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        lines = [client.stdout.readline() for _ in range(20)]
        client.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while not any(
            "the client was silent" in event.get("reason", "") for event in daemon.events()
        ):
            if time.monotonic() > deadline:
                client.kill()
                pytest.fail("the session of a frozen client must end with its lease")
            time.sleep(0.05)
        client.send_signal(signal.SIGCONT)
        client.stdin.write("\n")
        client.stdin.flush()
        lines += client.stdout.readlines()
        assert client.wait(120) == 0
    assert [
        [int(number) for number in line.strip("[]\n").split(",")] for line in lines
    ] == uninterrupted[:60]


def test_a_daemon_that_is_slow_to_answer_a_connection_is_waited_for(gyred: StartDaemon) -> None:
    """As on a node whose processors are all busy."""
    daemon = gyred({})
    assert daemon.process
    daemon.process.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, daemon.process.send_signal, [signal.SIGCONT]).start()
    with Connection(parse_address(daemon.address)) as connection:
        assert connection.status().pid == daemon.process.pid
