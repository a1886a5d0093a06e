"""The service manager's protocol, against a socket that plays the manager."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from gyre_daemon.runtime.events import notify, ping_watchdog


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(120)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield receiver


def test_a_state_arrives(manager: socket.socket) -> None:
    notify("READY=1")
    assert manager.recv(100) == b"READY=1"


def test_a_state_arrives_at_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0gyre-test-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@gyre-test-{os.getpid()}")
        notify("STOPPING=1")
        assert receiver.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "@gyre-nobody-listens", "relative"])
def test_no_manager_is_no_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")


def test_a_manager_that_does_not_read_blocks_nothing(manager: socket.socket) -> None:
    """Its socket is full, and the event loop does not wait for it."""
    for _ in range(5000):
        notify("STATUS=" + "x" * 1000)
    assert manager.recv(2000).startswith(b"STATUS=")


def test_the_watchdog_is_told_twice_an_interval(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))

    async def shared_stream() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.45):
                await ping_watchdog()

    asyncio.run(shared_stream())
    manager.setblocking(False)
    count = 0
    while True:
        try:
            assert manager.recv(100) == b"WATCHDOG=1"
        except BlockingIOError:
            break
        count += 1
    assert 3 <= count <= 10


@pytest.mark.parametrize(
    ("interval", "pid"),
    [(None, None), ("0", None), ("", None), ("soon", None), ("-5", None), ("40000", "1")],
)
def test_without_a_watchdog_nothing_is_sent(
    manager: socket.socket, interval: str | None, pid: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WATCHDOG_USEC", interval), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    async def shared_stream() -> None:
        async with asyncio.timeout(2):
            await ping_watchdog()

    asyncio.run(shared_stream())
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)
