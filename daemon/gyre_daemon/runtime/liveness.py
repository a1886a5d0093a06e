"""Whether the daemon is alive: the lag of its event loop, probes, and messages to its manager.

State lines go to the datagram socket that `NOTIFY_SOCKET` names.
"""

import asyncio
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from itertools import accumulate
from typing import NamedTuple

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_INTERVAL_S = 0.25  # shorter intervals find shorter delays and wake an idle daemon more often
# An event loop hangs if it is late by this much. Busy ones are late by tenths of a second; three
# probes in ten seconds each then wait as long as WatchdogSec of the systemd unit.
_HANGS_AFTER_S = 10.0


class Answer(NamedTuple):
    """What an HTTP port answers."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    content_encoding: str = ""


# Takes a path, and the fields of the request's header by name in lower case; in any thread.
Application = Callable[[str, Mapping[str, str]], Answer]


class LoopLag:
    """A histogram of how late timers of the event loop were.

    Attributes:
        num_timers: how many were waited for.
        sum_s: sum of their delays, in seconds.
    """

    def __init__(self) -> None:
        self.num_timers = 0
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._due_at = math.inf

    @property
    def late_s(self) -> float:
        """How late the present timer is; in any thread, and above 0 only while `watch` runs."""
        return max(0.0, time.monotonic() - self._due_at)

    @property
    def at_most(self) -> list[int]:
        """How many timers were at most as late as each of `BOUNDS_S`."""
        return list(accumulate(self._counts[:-1]))

    def note(self, late_s: float) -> None:
        """Count one timer; a negative delay counts as none."""
        late_s = max(0.0, late_s)
        self.num_timers += 1
        self.sum_s += late_s
        self._counts[sum(late_s > bound for bound in BOUNDS_S)] += 1

    async def watch(self) -> None:
        """Wait for one timer after another until cancelled."""
        while True:
            self._due_at = time.monotonic() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self.note(time.monotonic() - self._due_at)


class Probes:
    """Answers to probes of a cluster's node or a load balancer.

    `/-/healthy` fails where the event loop hangs: restart the daemon. `/-/ready` also fails while
    the daemon starts, drains, or has lost a socket: send no job.

    Attributes:
        loop_lag: of the daemon's event loop.
        why_not_ready: empty while the daemon serves.
    """

    def __init__(self, loop_lag: LoopLag) -> None:
        """The daemon starts."""
        self.loop_lag = loop_lag
        self.why_not_ready = "starting"

    def answer(self, path: str, _: Mapping[str, str]) -> Answer:
        """The `Application`."""
        hung = "the event loop hangs" if self.loop_lag.late_s > _HANGS_AFTER_S else ""
        problems = {
            "/-/healthy": ("healthy", hung),
            "/-/ready": ("ready", hung or self.why_not_ready),
        }
        if path not in problems:
            return Answer(HTTPStatus.NOT_FOUND, b"only /-/healthy and /-/ready\n")
        word, problem = problems[path]
        if problem:
            text = f"not {word}: {problem}\n"
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, text.encode())
        return Answer(HTTPStatus.OK, f"{word}\n".encode())


def notify(state: str) -> None:
    """Send a state such as `READY=1` to the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), socket.MSG_DONTWAIT, address)
        except OSError:
            return  # the daemon serves on without a manager that listens


async def ping_watchdog() -> None:
    """Tell the manager that the event loop runs, twice in each watchdog interval, until cancelled.

    Returns at once where the manager has set no watchdog for this process.
    """
    interval_us = os.environ.get("WATCHDOG_USEC", "")
    meant_for = os.environ.get("WATCHDOG_PID", "")
    if (
        not interval_us.isdecimal()
        or int(interval_us) == 0
        or meant_for not in ("", str(os.getpid()))
    ):
        return
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(int(interval_us) / 2e6)
