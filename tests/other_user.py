"""Connections to a daemon that the kernel says another user of this machine made."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gyre_client.transport.channel import TOKEN_KEY

NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
# A socket has the credentials of the process that connects it, whoever uses it afterwards. The user
# is in the daemon's group, so that it may connect.
_CONNECT = """
import os, socket, sys
descriptor, uid, folder, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.chdir(folder)
os.setgroups([os.getgid()])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
socket.socket(fileno=os.dup(descriptor)).connect(name)
"""


class OtherUser:
    """A user's connection to a daemon's side channel.

    Attributes:
        side: the connection.
        answer: what the daemon said: a token, or why it refuses.
    """

    def __init__(self, address: str, uid: int) -> None:
        path = Path(address.removeprefix("unix:") + ".side")
        self.side = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = self.side.fileno()
        arguments = [str(descriptor), str(uid), str(path.parent), path.name]
        subprocess.run(
            [sys.executable, "-S", "-c", _CONNECT, *arguments], pass_fds=[descriptor], check=True
        )
        self.side.settimeout(120)
        self.answer = self.side.recv(4096).decode()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What the user's calls carry."""
        return ((TOKEN_KEY, self.answer),)


@contextlib.contextmanager
def other_user(address: str, uid: int = 65534) -> Iterator[OtherUser]:
    user = OtherUser(address, uid)
    with user.side:
        yield user
