"""The side channel hands a client on the same machine the descriptors of its arenas.

gRPC cannot pass descriptors and does not say which process calls. So a client that can share memory
connects here first. The kernel says which process and user it is, and the client gets a token that
its gRPC calls carry. It stays connected as long as it may read the arenas: so the daemon knows when
their batches may be overwritten, even if the client was killed. [Note: Arenas that clients keep] in
`arenas` says when an arena is gone.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gyre_daemon.access.policy import Principal, peer_principal
from gyre_daemon.errors import ConfigError
from gyre_daemon.memory.arenas import Arena
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.limits import SpareDescriptor, descriptor_shares

SUFFIX = ".side"
# A client takes a descriptor, so their number is bounded. Where `accept` fails although the spare
# descriptor was given up, the client still waits in the backlog: without a pause the event loop
# would try again all the time.
_BACKLOG = 128
_REFUSED_PAUSE_S = 1.0
_MOST_OF_PEERS = 7  # eighths that one user may have; the rest is for a user who comes later
# Sessions whose arenas one connection carries; a further one gets its batches through gRPC. Clients
# have a connection for each session. With no bound, one who opens session after session over one
# connection, and keeps a batch of each, makes the daemon's memory grow.
_MOST_SESSIONS = 2048
# Refusals are logged at most once in this time, with their number. An attacker connects thousands
# of times in a second.
_LOG_PAUSE_S = 10.0
# Sent to a client instead of a token, before the reason. A token has no colon.
_REFUSED = "refused: "

MayConnect = Callable[[Principal, int], str]


class Peer:
    """A client on the same machine, as long as it may read shared memory.

    Attributes:
        connection: to the client, owned by this.
        principal: its user and process.
    """

    def __init__(self, connection: socket.socket, principal: Principal) -> None:
        self.connection = connection
        self.principal = principal
        self._is_gone = False
        self._when_gone: dict[Callable[[], None], None] = {}  # in the order of the calls

    @property
    def is_full(self) -> bool:
        """Whether it carries the arenas of as many sessions as it may."""
        return len(self._when_gone) >= _MOST_SESSIONS

    def hand_over(self, session_id: str, number: int, arena: Arena) -> bool:
        """Send an arena's descriptor; False where the client is gone or does not take it."""
        if self._is_gone:
            return False
        try:
            descriptor = arena.open_for(self.principal.name)
        except OSError as error:
            facts = {"user": self.principal.name, "reason": error.strerror}
            log_event("arena not shared", facts, logging.WARNING)
            return False
        try:
            socket.send_fds(self.connection, [f"{session_id} {number}".encode()], [descriptor])
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def when_gone(self, act: Callable[[], None]) -> None:
        """Call `act` once the client reads no shared memory any more: it hung up or died."""
        if self._is_gone:
            act()
        else:
            self._when_gone[act] = None

    def forget(self, act: Callable[[], None]) -> None:
        """Do not call `act`; ignored where nothing would."""
        self._when_gone.pop(act, None)

    def hang_up(self) -> None:
        """Treat the client as gone."""
        self.connection.close()
        self._is_gone = True
        while self._when_gone:
            act, _ = self._when_gone.popitem()
            act()


class SideChannel:
    """Listens next to a Unix socket of the daemon and knows the connected clients."""

    def __init__(self, path: Path, may_connect: MayConnect) -> None:
        """Listen.

        Args:
            path: the daemon's socket, which it has claimed; the side channel's has a suffix more.
            may_connect: why a user with this many connections may have no further one; empty
                where it may.

        Raises:
            ConfigError: the socket cannot be bound.
        """
        self._path = path.with_name(path.name + SUFFIX)
        self._may_connect = may_connect
        self._peers: dict[str, Peer] = {}
        self._num_by_user: Counter[str] = Counter()
        self._max_peers = descriptor_shares().clients
        self._max_per_user = -(-self._max_peers * _MOST_OF_PEERS // 8)
        self._spare = SpareDescriptor()
        self._num_refused = 0
        self._refused_logged_at = -math.inf
        self._bind()

    @property
    def is_reachable(self) -> bool:
        """Whether clients that connect to the path reach this daemon's socket."""
        try:
            return os.path.samestat(self._socket, self._path.stat())
        except OSError:
            return False

    def bind_again(self) -> None:
        """Listen at the path again, where the socket was removed; clients stay connected.

        Raises:
            ConfigError: the socket cannot be bound.
        """
        before = self._listener
        self._bind()
        asyncio.get_running_loop().remove_reader(before)
        before.close()

    def _bind(self) -> None:
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            self._path.chmod(0o660)
            listener.listen(_BACKLOG)
            self._socket = self._path.stat()
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {self._path}: {error.strerror}") from error
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def peer(self, token: str) -> Peer | None:
        """The client that was given this token and is still connected."""
        return self._peers.get(token)

    def close(self) -> None:
        """Disconnect all clients and remove the socket."""
        is_reachable = self.is_reachable
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for token in list(self._peers):
            self._drop(token)
        self._spare.close()
        if is_reachable:
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has gone meanwhile
            return
        except OSError as error:
            self._refuse_one(error)
            return
        connection.setblocking(False)
        principal = peer_principal(connection)
        if reason := self._reason_to_refuse(principal):
            self._refuse(connection, reason)
            return
        token = secrets.token_hex(16)
        self._peers[token] = Peer(connection, principal)
        self._num_by_user[principal.name] += 1
        # a client has nothing to send: any input is its end, or nonsense that ends it
        asyncio.get_running_loop().add_reader(connection, self._drop, token)
        try:
            connection.send(token.encode())
        except OSError:
            self._drop(token)

    def _reason_to_refuse(self, principal: Principal) -> str:
        if len(self._peers) >= self._max_peers:
            return (
                f"the daemon has {self._max_peers} connections to its side channel and takes no "
                "more; close some, or raise its limit of descriptors (LimitNOFILE= of the unit, or "
                "ulimit -n)"
            )
        num = self._num_by_user[principal.name]
        if num >= self._max_per_user:
            return (
                f"{principal.name} has {num} of the {self._max_peers} connections that the "
                "daemon's descriptors allow; close some, or raise its limit (LimitNOFILE= of the "
                "unit, or ulimit -n)"
            )
        return self._may_connect(principal, num)

    def _refuse_one(self, error: OSError) -> None:
        """Tell a client that it cannot be accepted, by means of the spare descriptor."""
        try:
            with self._spare.lent():
                connection, _ = self._listener.accept()
                self._refuse(connection, f"the daemon cannot accept connections: {error.strerror}")
        except BlockingIOError:
            return
        except OSError:
            self._note_refusal(f"the daemon cannot accept connections: {error.strerror}")
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_REFUSED_PAUSE_S, self._listen_again, self._listener)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.send((_REFUSED + reason).encode())
        self._note_refusal(reason)

    def _note_refusal(self, reason: str) -> None:
        self._num_refused += 1
        now = time.monotonic()
        if now >= self._refused_logged_at + _LOG_PAUSE_S:
            facts = {"reason": reason, "times": self._num_refused}
            log_event("side channel refused", facts, logging.WARNING)
            self._num_refused, self._refused_logged_at = 0, now

    def _listen_again(self, listener: socket.socket) -> None:
        if listener is self._listener and listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept)

    def _drop(self, token: str) -> None:
        peer = self._peers.pop(token)
        self._num_by_user[peer.principal.name] -= 1
        self._num_by_user += Counter()  # forgets users at 0
        asyncio.get_running_loop().remove_reader(peer.connection)
        peer.hang_up()
