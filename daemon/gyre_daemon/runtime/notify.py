"""The service manager's protocol: state lines on the datagram socket that `NOTIFY_SOCKET` names (see sd_notify(3))."""

import asyncio
import os
import socket


def notify(state: str) -> None:
    """Tell the service manager, if there is one, a state such as `READY=1`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), socket.MSG_DONTWAIT, address)
        except OSError:
            return  # a manager that went away or does not listen is no reason to stop serving


async def feed_watchdog() -> None:
    """Show the manager that the event loop runs, twice in each of its intervals; returns at once where it does not ask."""
    interval_us = os.environ.get("WATCHDOG_USEC", "")
    meant_for = os.environ.get("WATCHDOG_PID", "")
    if not interval_us.isdecimal() or int(interval_us) == 0 or meant_for not in ("", str(os.getpid())):
        return
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(int(interval_us) / 2e6)
