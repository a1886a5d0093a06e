"""Whether clients still find the daemon's sockets: whoever cleans up a folder may remove them from under a living daemon."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gyre_daemon.errors import ConfigError
from gyre_daemon.memory.sidechannel import SideChannel
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.listen import SocketClaim, UnixAddress

_LOOK_S = 1.0  # how long nobody can connect at most; a look takes a few system calls for each address


@dataclass(frozen=True, slots=True)
class Door:
    """One Unix address that clients come in by.

    Attributes:
        claim: to its path.
        side: the side channel beside it.
    """

    claim: SocketClaim
    side: SideChannel

    @property
    def is_open(self) -> bool:
        """Both sockets are where clients look for them."""
        return self.claim.is_reachable and self.side.is_reachable


class Doors:
    """Watches them, and makes a socket again that is gone."""

    def __init__(
        self,
        doors: Sequence[Door],
        bind_again: Callable[[UnixAddress], Awaitable[None]],
        tell: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Nothing is amiss yet.

        Args:
            doors: bound.
            bind_again: has the service listen at an address again, whose path is free; raises ConfigError where it cannot.
            tell: called with whether all doors are open, when that has changed.
        """
        self._doors = doors
        self._bind_again = bind_again
        self._tell = tell
        self._complaint = ""

    async def watch(self) -> None:
        """Look every second, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            complaint = "; ".join([text for door in self._doors if (text := await self._look(door))])
            if complaint and complaint != self._complaint:
                log_event("socket lost", {"reason": complaint}, logging.ERROR)
            if bool(complaint) != bool(self._complaint):
                await self._tell(not complaint)
            self._complaint = complaint

    async def _look(self, door: Door) -> str:
        """What keeps clients from connecting; empty for nothing. A lock that is gone is taken again."""
        was_open = door.is_open
        try:
            door.claim.claim()
            if not door.claim.is_reachable:
                await self._bind_again(door.claim.address)
                door.claim.open_to_group()
            if not door.side.is_reachable:
                door.side.bind_again()
        except (ConfigError, OSError) as error:
            return "" if was_open else str(error)
        if not was_open:
            log_event("socket made again", {"path": str(door.claim.address.path)}, logging.WARNING)
        return ""
