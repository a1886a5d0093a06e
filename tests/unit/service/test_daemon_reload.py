"""Which configurations a reload accepts, tested with prepared readings and without a clock."""

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gyre_daemon.access.policy import Limits, Policy
from gyre_daemon.config import DaemonConfig, DatasetConfig
from gyre_daemon.errors import ConfigError
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import in_thread
from gyre_daemon.server import Reloader

BOTH = DaemonConfig(datasets={name: DatasetConfig(f"/{name}", "tokens") for name in ("a", "b")})
ONE = DaemonConfig(datasets={"a": BOTH.datasets["a"]})
OTHER = DaemonConfig(datasets={"b": BOTH.datasets["b"]})
NONE = DaemonConfig()

Reading = DaemonConfig | ConfigError


class Daemon:
    """Stands for the catalog and the session table, and records what a reload does."""

    def __init__(self, running: DaemonConfig, readings: Sequence[Reading]) -> None:
        self.datasets = dict(running.datasets)
        self.resources = SimpleNamespace(limits=Limits(), metrics=Metrics())
        self._readings = iter(readings)
        self._running = running
        self.make_reloader()

    def make_reloader(self) -> None:
        self.reloader = Reloader(
            self._running,
            self.reread,
            cast("Any", self),
            cast("Any", self),
            Policy(self._running),
        )

    def reread(self) -> DaemonConfig:
        reading = next(self._readings)
        if isinstance(reading, ConfigError):
            raise reading
        return reading

    def replace(self, datasets: dict[str, DatasetConfig]) -> None:
        self.datasets = dict(datasets)

    def reweigh(self, weights: object) -> None:
        pass

    def __iter__(self) -> Iterator[object]:
        return iter(())  # no session


def after_reload(running: DaemonConfig, reading: Reading) -> list[str]:
    """The datasets after a reload."""

    async def run() -> Daemon:
        daemon = Daemon(running, [reading])
        await daemon.reloader.reload()
        return daemon

    return sorted(asyncio.run(run()).datasets)


def test_a_new_dataset_is_served_at_once() -> None:
    assert after_reload(ONE, BOTH) == ["a", "b"]
    assert after_reload(NONE, NONE) == []


def test_a_dataset_that_the_file_lacks_is_removed() -> None:
    assert after_reload(BOTH, ONE) == ["a"]


@pytest.mark.parametrize("reading", [NONE, ConfigError("half")])
def test_an_empty_or_invalid_file_is_refused(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gyre_daemon"):
        assert after_reload(BOTH, reading) == ["a", "b"]
    refused = caplog.records[-1]
    assert refused.getMessage() == "reload refused"
    assert refused.__dict__["facts"]["kept"] == ["a", "b"]


def test_the_event_loop_goes_on_while_a_configuration_is_read() -> None:
    """A file system, or a server that knows the names of users, may take any time to answer."""
    answered = threading.Event()

    def reread() -> DaemonConfig:
        assert answered.wait(120)
        return BOTH

    async def run() -> list[str]:
        daemon = Daemon(ONE, [])
        daemon.reread = reread  # type: ignore[method-assign]
        daemon.make_reloader()
        reloading = asyncio.create_task(daemon.reloader.reload())
        await asyncio.sleep(0)
        answered.set()
        await reloading
        return sorted(daemon.datasets)

    assert asyncio.run(run()) == ["a", "b"]


def test_nobody_waits_for_a_configuration_that_is_never_read() -> None:
    """The daemon ends as ever."""
    hung = threading.Event()

    async def run() -> None:
        reading = asyncio.create_task(in_thread(hung.wait, "test-hung"))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(run())
    (thread,) = [each for each in threading.enumerate() if each.name == "test-hung"]
    assert thread.daemon
    hung.set()
    thread.join()
