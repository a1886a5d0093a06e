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
            sender.sendto(state.encode(), address)
        except OSError:
            return  # a manager that went away is no reason to stop serving


async def feed_watchdog() -> None:
    """Show the manager that the event loop runs, twice in each of its intervals; returns at once where it does not ask."""
    interval_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    while interval_s:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s / 2)
