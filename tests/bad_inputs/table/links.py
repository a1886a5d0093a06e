"""Links and special files in the place of a shard. `sent` makes it at a path.

Outside of the dataset's folder lies a secret that a link may lead to.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from tests.bad_inputs.row import Row

REFUSED = ("PERMISSION_DENIED", "NotAllowed")
Make = Callable[[Path], None]


def link(target: str) -> Make:
    return lambda path: path.symlink_to(target)


def bound(path: Path) -> None:
    """Makes a socket; its full path may be longer than an address may be."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


LINKS: dict[str, str] = {
    "a parent": "../../secret.bin",
    "a detour": "../../bad/../secret.bin",
    "an absolute path": "/etc/passwd",
    "the environment": "/proc/self/environ",
    "the memory": "/proc/self/mem",
    "a descriptor": "/proc/self/fd/0",
    "zeros": "/dev/zero",
    "noise": "/dev/urandom",
    "a terminal": "/dev/tty",
    "the root": "/",
}
SPECIAL: dict[str, Make] = {"a pipe": os.mkfifo, "a socket": bound}
ROWS = [
    *(
        Row(f"link to {words}", link(target), *REFUSED, "a link leads out of")
        for words, target in LINKS.items()
    ),
    *(
        Row(f"special file {words}", make, *REFUSED, "is neither a regular file nor a folder")
        for words, make in SPECIAL.items()
    ),
]
