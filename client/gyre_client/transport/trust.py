"""Whether the process behind a Unix socket is a daemon that this process may trust.

A client maps memory of its daemon and trains on its batches. So before it sends anything, it asks
the kernel which user listens. It trusts root, its own user, and the user that it was told.

gRPC connects by itself, and again after a failure. So no other user may be able to put a socket
at the path: its folder is checked, too.
"""

import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from gyre_client.errors import DaemonUnavailable, UntrustedDaemon
from gyre_client.transport.address import USER_VARIABLE, Address, name_of

TIMEOUT_S = 10.0  # a connection waits for room in the backlog of a daemon whose processor is busy
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Peer(NamedTuple):
    """The process that listens on a socket, as the kernel tells."""

    pid: int
    uid: int


def check_files(address: Address) -> None:
    """Checks that only a trusted user can have put the daemon's socket where it is.

    Raises:
        UntrustedDaemon: Another user owns the socket or its folder, or may write to the folder.
        DaemonUnavailable: There is no socket.
    """
    if address.path is None:
        return
    path = Path(address.path)
    try:
        _check_owner(address, path, path.stat())
        for folder in {path.parent, path.resolve().parent}:
            found = folder.stat()
            _check_owner(address, folder, found)
            # In a folder with the sticky bit, only its owner may replace a socket.
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
                raise UntrustedDaemon(
                    f"other users could put their socket at {address.text}: the folder "
                    f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}. Take their right to "
                    f"write away: chmod go-w {folder}"
                )
    except OSError as error:
        raise _unavailable(address, error) from None


def check_listener(address: Address) -> Peer | None:
    """Connects to the daemon's socket, and returns the process that listens; sends nothing.

    Returns:
        None over TCP, where the kernel does not tell.

    Raises:
        UntrustedDaemon: It is a user that this process does not trust.
        DaemonUnavailable: No process listens.
    """
    if address.path is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(address.path)
        except OSError as error:
            raise _unavailable(address, error) from None
        return check_peer(connection, address)


def check_peer(connection: socket.socket, address: Address) -> Peer:
    """Returns the process that listens at the other end of a connection.

    Raises:
        UntrustedDaemon: It belongs to a user that this process does not trust.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid % 2**32 not in address.trusted_uids:
        raise _untrusted(address, f"is served by process {pid} of", uid)
    return Peer(pid, uid)


def _check_owner(address: Address, path: Path, found: os.stat_result) -> None:
    if found.st_uid not in address.trusted_uids:
        raise _untrusted(address, f"is not to be trusted: {path} belongs to", found.st_uid)


def _untrusted(address: Address, what: str, uid: int) -> UntrustedDaemon:
    trusted = " and ".join(map(name_of, sorted(address.trusted_uids)))
    return UntrustedDaemon(
        f"the address {address.text} {what} {name_of(uid)}, and this process trusts only "
        f"{trusted}. If that daemon is meant, say so with daemon_user={uid} or "
        f"{USER_VARIABLE}={uid}",
        {"uid": str(uid), "trusted_uids": ",".join(map(str, sorted(address.trusted_uids)))},
    )


def _unavailable(address: Address, error: OSError) -> DaemonUnavailable:
    return DaemonUnavailable(f"no daemon answers at {address.text}: {error.strerror or error}")
