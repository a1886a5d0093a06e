"""Who makes a call."""

from collections.abc import Sequence

from gyre_daemon.access.limits import Limits
from gyre_daemon.access.principal import Principal
from gyre_daemon.errors import LeaseExpired, NotAllowed
from gyre_daemon.memory.sidechannel import Peer, SideChannel
from gyre_daemon.service.authentication import Authenticator, is_local
from gyre_daemon.service.status import Context

TOKEN_KEY = "gyre-side-token"
# In the facts of an error: a client that connects to the side channel again may repeat the call.
_FACT = "side_channel"


class Callers:
    """Tells who makes each call.

    A user of this machine calls over a Unix socket. gRPC does not say which one, and the kernel
    says it on the side channel. So each of these calls carries the token of a connection there.
    Over TCP, a token or a certificate says it.
    """

    def __init__(
        self, side_channels: Sequence[SideChannel], authenticator: Authenticator, limits: Limits
    ) -> None:
        self._side_channels = side_channels
        self._authenticator = authenticator
        self._limits = limits

    def identify(self, context: Context) -> Principal:
        """The caller.

        Raises:
            NotAuthenticated, Overloaded: over TCP; see `Authenticator.principal`.
            NotAllowed: a call over a Unix socket carries no token.
            LeaseExpired: it carries the token of a connection that has ended.
            Overloaded: the caller calls too often.
        """
        peer = self.peer(context)
        caller = peer.principal if peer else self._authenticator.principal(context)
        self._limits.count_request(caller)
        return caller

    def peer(self, context: Context) -> Peer | None:
        """The caller's connection to the side channel; None over TCP.

        Raises:
            NotAllowed, LeaseExpired: as for `identify`.
        """
        if not is_local(context):
            return None
        token = str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, ""))
        if not token:
            raise NotAllowed(
                "the daemon cannot tell which user calls: over a Unix socket a client first "
                "connects to the socket next to it, whose name ends in .side. Give the client "
                "access to that socket, and use one of the daemon's version.",
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
