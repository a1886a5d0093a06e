"""`gyre top` and `gyre status` against a real daemon; the live screen on a real pseudo-terminal."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader

from tests.conftest import Daemon, StartDaemon

DEADLINE_S = 150.0
ENTER, LEAVE = b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l"


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    np.arange(8000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    dataset = {
        "uri": str(tmp_path / "tokens.bin"),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": 8,
    }
    return gyred({"datasets": {"numbers": dataset}})


def gyre(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gyre_client", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


class Terminal:
    """A pseudo-terminal with a program on it."""

    def __init__(self, address: str, num_columns: int) -> None:
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, num_columns, 0, 0))
        self._before = termios.tcgetattr(self._theirs)
        self.shown = b""
        command = [
            sys.executable,
            "-m",
            "gyre_client",
            "top",
            "--interval",
            "0.1",
            "--address",
            address,
        ]
        self.process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=subprocess.PIPE,
            start_new_session=True,
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
    with (
        Loader("numbers", batch_size=10, job="pretrain", address=daemon.address) as loader,
        on_terminal(daemon) as terminal,
    ):
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
def test_a_signal_leaves_the_terminal_as_it_was(
    daemon: Daemon, number: signal.Signals, status: int
) -> None:
    with on_terminal(daemon) as terminal:
        terminal.wait_for(b"gyred ")
        terminal.process.send_signal(number)
        assert terminal.process.wait(DEADLINE_S) == status
        assert terminal.is_as_before()


def test_a_narrow_terminal_shows_the_important_columns(daemon: Daemon) -> None:
    with Loader("numbers", batch_size=10, job="pretrain", address=daemon.address) as loader:
        next(loader)
        with on_terminal(daemon, num_columns=40) as terminal:
            terminal.wait_for(b"WINDOW")
            terminal.wait_for(b"\x1b[J")
            shown = re.sub(rb"\x1b\[\d*[mK]", b"", terminal.shown)
            lines = [line for line in shown.split(b"\r\n") if line.startswith(b"JOB")]
            assert all(len(line) <= 40 for line in lines)
            assert lines[-1].split() == [b"JOB", b"RANK", b"BATCHES/S", b"WINDOW"]
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
        until_trainer_bound(daemon)
        once = gyre("top", "--once", "--interval", "0.2", "--address", daemon.address)
        assert (once.returncode, once.stderr) == (0, "")
        assert "\x1b" not in once.stdout
        assert once.stdout.splitlines()[3].split()[:2] == ["JOB", "RANK"]
        assert max(map(len, once.stdout.splitlines())) <= 80, "a page has 80 columns"
        as_json = gyre("top", "--once", "--json", "--interval", "0.2", "--address", daemon.address)
        (session,) = sessions_of(as_json.stdout)
        assert session["rates"]["meaning"] == "trainer-bound"
        assert session["rates"]["occupancy"] > 0.75
        command = [
            sys.executable,
            "-m",
            "gyre_client",
            "top",
            "--json",
            "--interval",
            "0.1",
            "--address",
            daemon.address,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            looks = [sessions_of(process.stdout.readline()) for _ in range(3)]
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 130
        assert [look[0]["handle"] for look in looks] == [session["handle"]] * 3


def test_status_says_how_fast_and_what_that_means(daemon: Daemon) -> None:
    with Loader("numbers", batch_size=10, job="pretrain", address=daemon.address) as loader:
        next(loader)
        until_trainer_bound(daemon)
        text = gyre("status", "--address", daemon.address).stdout
        assert "trainer-bound" in text
        assert "MEANING" in text
        assert max(map(len, text.splitlines())) <= 80


def status_until(daemon: Daemon, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the status says of the only session, as soon as it is open and like this."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        sessions = sessions_of(gyre("status", "--json", "--address", daemon.address).stdout)
        assert len(sessions) <= 1
        if sessions and is_there(sessions[0]):
            return sessions[0]
        assert time.monotonic() < deadline, sessions
        time.sleep(0.1)


def until_trainer_bound(daemon: Daemon) -> None:
    status_until(daemon, lambda session: (session["rates"] or {}).get("meaning") == "trainer-bound")


def test_a_rate_is_that_of_the_trainer_and_not_of_the_groups_in_which_batches_travel(
    daemon: Daemon,
) -> None:
    """Beside what this trainer itself has counted since it began.

    Many batches travel at once, and look like 0 or hundreds.
    """
    ended = threading.Event()
    taken: list[float] = []

    def train() -> None:
        with Loader("numbers", batch_size=10, job="pretrain", address=daemon.address) as loader:
            while not ended.wait(0.02):
                next(loader)
                taken.append(time.monotonic())

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        status_until(daemon, lambda session: session["rates"] is not None and len(taken) > 150)
        for _ in range(8):
            session = status_until(daemon, lambda session: True)
            elapsed_s = min(10.0, session["lately"]["elapsed_s"])
            lately = [at for at in taken if at > taken[-1] - elapsed_s]
            assert session["rates"]["batches_per_s"] == pytest.approx(
                len(lately) / elapsed_s, rel=0.35
            )
    finally:
        ended.set()
        trainer.join(DEADLINE_S)


def test_colours_on_a_terminal_and_nowhere_else(daemon: Daemon) -> None:
    with Loader("numbers", batch_size=10, job="pretrain", address=daemon.address) as loader:
        next(loader)
        until_trainer_bound(daemon)
        with on_terminal(daemon) as terminal:
            terminal.wait_for(b"\x1b[32mtrainer-bound")
            terminal.press(b"q")
            assert terminal.process.wait(DEADLINE_S) == 0
        assert "\x1b" not in gyre("status", "--address", daemon.address).stdout


def test_local_files_in_memory_keep_a_trainer_waiting_for_the_processor(daemon: Daemon) -> None:
    """What was just written is in memory: no storage is waited for, however fast the trainer is."""
    ended = threading.Event()

    def train() -> None:
        with Loader("numbers", batch_size=500, job="greedy", address=daemon.address) as loader:
            while not ended.is_set():
                next(loader)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        session = status_until(daemon, lambda session: session["wait_processor_s"] > 0)
        assert session["wait_processor_s"] > session["wait_storage_s"]
        (timing, *_) = json.loads(
            gyre("why", "numbers", "--step", "0", "--json", "--address", daemon.address).stdout
        )
        assert timing["storage_s"] < timing["total_s"] / 2
    finally:
        ended.set()
        trainer.join(DEADLINE_S)


def test_invalid_intervals_are_refused(daemon: Daemon) -> None:
    for interval in ("-1", "nan", "soon", "1e9"):
        assert gyre("top", "--interval", interval, "--address", daemon.address).returncode == 2
    refused = gyre("top", "--interval", "0", "--address", daemon.address)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    gone = gyre("top", "--address", "unix:/nowhere/gyre.sock")
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)
