"""`gyre top` and `gyre status` against a real daemon; the live screen on a real pseudo-terminal."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader

from tests.conftest import Daemon, StartDaemon

DEADLINE_S = 30.0
ENTER, LEAVE = b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l"


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    np.arange(8000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    dataset = {"uri": str(tmp_path / "tokens.bin"), "format": "tokens", "dtype": "uint16", "sequence_length": 8}
    return gyred({"datasets": {"numbers": dataset}})


def gyre(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gyre_client", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


class Terminal:
    """A pseudo-terminal with a program on it."""

    def __init__(self, address: str, num_columns: int) -> None:
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, num_columns, 0, 0))
        self._before = termios.tcgetattr(self._theirs)
        self.shown = b""
        command = [sys.executable, "-m", "gyre_client", "top", "--interval", "0.1", "--address", address]
        self.process = subprocess.Popen(
            command, stdin=self._theirs, stdout=self._theirs, stderr=subprocess.PIPE, start_new_session=True
        )

    def wait_for(self, text: bytes) -> None:
        """Until it has been written from now on."""
        begin, deadline = len(self.shown), time.monotonic() + DEADLINE_S
        while text not in self.shown[begin:]:
            assert time.monotonic() < deadline, self.shown[begin:]
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 1 << 16)

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def is_as_before(self) -> bool:
        """The terminal's own settings, and what was written last."""
        self.wait_for(LEAVE)
        return termios.tcgetattr(self._theirs) == self._before and self.shown.endswith(LEAVE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        os.close(self._ours)
        os.close(self._theirs)


@contextlib.contextmanager
def on_terminal(daemon: Daemon, num_columns: int = 120) -> Iterator[Terminal]:
    terminal = Terminal(daemon.address, num_columns)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_live_screen_shows_a_job_and_q_leaves_the_terminal_as_it_was(daemon: Daemon) -> None:
    with Loader("numbers", batch_size=10, job="pretrain", address=daemon.address) as loader, on_terminal(daemon) as terminal:
        next(loader)
        terminal.wait_for(ENTER)
        terminal.wait_for(b"trainer-bound")
        assert b"pretrain" in terminal.shown
        terminal.press(b"x\x1b[A")
        terminal.wait_for(b"pretrain")
        terminal.press(b"q")
        assert terminal.process.wait(DEADLINE_S) == 0
        assert terminal.is_as_before()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(daemon: Daemon, number: signal.Signals, status: int) -> None:
    with on_terminal(daemon) as terminal:
        terminal.wait_for(b"gyred ")
        terminal.process.send_signal(number)
        assert terminal.process.wait(DEADLINE_S) == status
        assert terminal.is_as_before()


def test_a_narrow_terminal_gets_what_matters(daemon: Daemon) -> None:
    with Loader("numbers", batch_size=10, job="pretrain", address=daemon.address) as loader:
        next(loader)
        with on_terminal(daemon, num_columns=40) as terminal:
            terminal.wait_for(b"WINDOW")
            terminal.wait_for(b"\x1b[J")
            lines = [line.removesuffix(b"\x1b[K") for line in terminal.shown.split(b"\r\n") if line.startswith(b"JOB")]
            assert all(len(line) <= 40 for line in lines)
            assert lines[-1].split() == [b"JOB", b"BATCHES/S", b"WINDOW"]
            terminal.press(b"q")
            assert terminal.process.wait(DEADLINE_S) == 0


def test_a_live_screen_waits_for_a_daemon_that_is_away(daemon: Daemon) -> None:
    with on_terminal(daemon) as terminal:
        terminal.wait_for(b"serving")
        daemon.kill()
        terminal.wait_for(b"no daemon answers")
        daemon.restart()
        terminal.wait_for(b"serving")
        terminal.press(b"q")
        assert terminal.process.wait(DEADLINE_S) == 0
        assert terminal.is_as_before()


def sessions_of(line: str) -> list[dict[str, Any]]:
    sessions: list[dict[str, Any]] = json.loads(line)["sessions"]
    return sessions


def test_without_a_terminal_it_is_plain(daemon: Daemon) -> None:
    with Loader("numbers", batch_size=10, job="pretrain", address=daemon.address) as loader:
        next(loader)
        once = gyre("top", "--once", "--interval", "0.2", "--address", daemon.address)
        assert (once.returncode, once.stderr) == (0, "")
        assert "\x1b" not in once.stdout
        assert once.stdout.splitlines()[3].split()[:3] == ["JOB", "RANK", "DATASET"]
        as_json = gyre("top", "--once", "--json", "--interval", "0.2", "--address", daemon.address)
        (session,) = sessions_of(as_json.stdout)
        assert session["pace"]["meaning"] == "trainer-bound"
        assert session["pace"]["occupancy"] > 0.75
        command = [sys.executable, "-m", "gyre_client", "top", "--json", "--interval", "0.1", "--address", daemon.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            looks = [sessions_of(process.stdout.readline()) for _ in range(3)]
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 130
        assert [look[0]["session_id"] for look in looks] == [session["session_id"]] * 3


def test_status_says_how_fast_and_what_that_means(daemon: Daemon) -> None:
    with Loader("numbers", batch_size=10, job="pretrain", address=daemon.address) as loader:
        next(loader)
        text = gyre("status", "--interval", "0.2", "--address", daemon.address).stdout
        header, row = (line.split() for line in text.split("\n\n")[1].splitlines())
        assert "MEANING" in header
        assert "trainer-bound" in row
        (session,) = sessions_of(gyre("status", "--json", "--interval", "0", "--address", daemon.address).stdout)
        assert session["pace"] is None, "one answer says nothing of speed"


def test_nonsense_is_refused(daemon: Daemon) -> None:
    for interval in ("-1", "nan", "soon", "1e9"):
        assert gyre("top", "--interval", interval, "--address", daemon.address).returncode == 2
    refused = gyre("top", "--interval", "0", "--address", daemon.address)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    gone = gyre("top", "--address", "unix:/nowhere/gyre.sock")
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)
