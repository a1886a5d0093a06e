"""The caller of a request."""

import ctypes
import os
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59  # since Linux 4.13; the standard library does not name it
_MAX_GROUPS = 65536  # the kernel's NGROUPS_MAX
_getsockopt = ctypes.CDLL(None, use_errno=True).getsockopt


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity of a caller: a user of this machine, or the holder of a credential.

    Sessions, limits and the audit log belong to `name`. Two callers with the same name may do the
    same things, and share one limit.

    Attributes:
        name: "uid:1004" for a user of this machine, "token:ci" for the holder of that token,
            "certificate:trainer-3" for a client certificate with that common name, "anonymous" for
            an unknown caller.
        uid: of a user of this machine; None for others.
        gids: all groups of its process; empty for others.
        pid: its process when it connected; 0 for others.
    """

    name: str
    uid: int | None = None
    gids: frozenset[int] = frozenset()
    pid: int = 0


ANONYMOUS = Principal("anonymous")


def peer_principal(connection: socket.socket) -> Principal:
    """The user at the other end of a Unix socket, as the kernel knew it when it connected.

    Raises:
        OSError: the socket is not connected.
    """
    pid, uid, gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return Principal(f"uid:{uid}", uid, frozenset((gid, *_peer_groups(connection))), pid)


def _peer_groups(connection: socket.socket) -> list[int]:
    groups = (ctypes.c_uint32 * _MAX_GROUPS)()  # `socket.getsockopt` returns at most 1 KiB
    size = ctypes.c_uint32(ctypes.sizeof(groups))
    level = socket.SOL_SOCKET
    if _getsockopt(connection.fileno(), level, _SO_PEERGROUPS, groups, ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return groups[: size.value // ctypes.sizeof(ctypes.c_uint32)]
