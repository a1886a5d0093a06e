"""Who makes a call."""

from collections.abc import Sequence

from gyre_daemon.access.principal import ANONYMOUS, Principal
from gyre_daemon.errors import LeaseExpired, NotAllowed
from gyre_daemon.memory.sidechannel import Peer, SideChannel
from gyre_daemon.service.status import Context

TOKEN_KEY = "gyre-side-token"
# In the facts of an error: a client that connects to the side channel again may repeat the call.
_FACT = "side_channel"


class Callers:
    """Tells who makes each call.

    A user of this machine calls over a Unix socket. gRPC does not say which one, and the kernel
    says it on the side channel. So each of these calls carries the token of a connection there.
    """

    def __init__(self, side_channels: Sequence[SideChannel]) -> None:
        self._side_channels = side_channels

    def identify(self, context: Context) -> Principal:
        """The caller; over TCP, where no credential is given, `ANONYMOUS`.

        Raises:
            NotAllowed: a call over a Unix socket carries no token.
            LeaseExpired: it carries the token of a connection that has ended.
        """
        peer = self.peer(context)
        return peer.principal if peer else ANONYMOUS

    def peer(self, context: Context) -> Peer | None:
        """The caller's connection to the side channel; None over TCP.

        Raises:
            NotAllowed, LeaseExpired: as for `identify`.
        """
        if not context.peer().startswith("unix:"):
            return None
        token = str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, ""))
        if not token:
            raise NotAllowed(
                "the daemon cannot tell which user calls: over a Unix socket a client first "
                "connects to the socket beside it, whose name ends in .side; give the client "
                "access to that socket, and use one of the daemon's version",
                {_FACT: "missing"},
            )
        peer = next((peer for each in self._side_channels if (peer := each.peer(token))), None)
        if peer is None:
            raise LeaseExpired(
                "the client's connection to the daemon's side channel has ended, or the daemon was "
                "restarted; connect again",
                {_FACT: "ended"},
            )
        return peer
