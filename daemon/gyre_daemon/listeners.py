"""The Unix sockets that clients connect to, and a watch that restores them.

A clean-up of a folder may remove the sockets of a daemon that still runs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from gyre_daemon.access.credentials import Credentials
from gyre_daemon.errors import ConfigError
from gyre_daemon.memory.sidechannel import MayConnect, SideChannel
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.listen import SocketClaim, UnixAddress
from gyre_daemon.runtime.threads import DaemonThreads

# How often the sockets are checked, and so for how long nobody can connect at most. A check takes a
# few system calls for each address.
_CHECK_EVERY_S = 1.0
# How often the files of certificates and tokens are looked at: so long does a token last that was
# taken away.
_REFRESH_EVERY_S = 1.0

Listen = Callable[[Sequence[UnixAddress]], Awaitable[object]]


class UnixListener:
    """The claim to one Unix address, and the side channel beside it.

    Attributes:
        address: where the gRPC server binds; this object does not bind it.
        side_channel: bound.
    """

    def __init__(self, address: UnixAddress, may_connect: MayConnect) -> None:
        """Claim the address and bind its side channel.

        Args:
            address: a Unix socket's.
            may_connect: see `SideChannel`.

        Raises:
            ConfigError: another daemon has the address, or it cannot be used.
        """
        self.address = address
        self._claim = SocketClaim(address)
        try:
            self.side_channel = SideChannel(address.path, may_connect)
        except ConfigError:
            self._claim.give_up()
            raise

    @property
    def is_reachable(self) -> bool:
        """Whether clients that connect find both sockets of this daemon."""
        return self._claim.is_reachable and self.side_channel.is_reachable

    def open_to_group(self) -> None:
        """Let owner and group connect; call this when the gRPC server has bound the address."""
        self._claim.open_to_group()

    async def restore(self, listen: Listen) -> str:
        """Make the lock file and the sockets again that are gone; `listen` starts a gRPC server.

        Returns:
            Why clients cannot connect; empty if they can.
        """
        was_reachable = self.is_reachable
        try:
            self._claim.claim()
            if not self._claim.is_reachable:
                await listen([self.address])
                self._claim.open_to_group()
            if not self.side_channel.is_reachable:
                self.side_channel.bind_again()
        except (ConfigError, OSError) as error:
            return "" if was_reachable else str(error)
        if not was_reachable:
            log_event("socket made again", {"path": str(self.address.path)}, logging.WARNING)
        return ""

    def close(self) -> None:
        """Disconnect the clients of the side channel; remove the sockets and the lock file."""
        self.side_channel.close()
        self._claim.give_up()


async def watch_listeners(
    listeners: Sequence[UnixListener],
    listen: Listen,
    set_serving: Callable[[bool], Awaitable[None]],
) -> None:
    """Check the listeners every second, without end, and restore those that are gone.

    Args:
        listeners: bound.
        listen: starts a gRPC server at addresses whose paths are free.
        set_serving: is called with False when a listener cannot be restored, and with True when
            all are reachable again.
    """
    problem = ""
    while True:
        await asyncio.sleep(_CHECK_EVERY_S)
        before = problem
        problem = "; ".join([text for each in listeners if (text := await each.restore(listen))])
        if problem and problem != before:
            log_event("socket lost", {"reason": problem}, logging.ERROR)
        if bool(problem) != bool(before):
            await set_serving(not problem)


async def watch_credentials(credentials: Credentials) -> None:
    """Have certificates and tokens read again when their files change, without end."""
    threads = DaemonThreads(1, "gyre-credentials")
    while credentials.have_files:
        await asyncio.sleep(_REFRESH_EVERY_S)
        await threads.run(credentials.refresh)
