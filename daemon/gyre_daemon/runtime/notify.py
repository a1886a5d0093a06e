"""Tells the service manager how the daemon is, as sd_notify(3) describes.

State lines go to the datagram socket that `NOTIFY_SOCKET` names.
"""

import asyncio
import os
import socket


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
