"""What may lie in the place of a file and is none."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


SPECIAL_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _bind,
    "a link to itself": lambda path: path.symlink_to(path),
}
"""Each kind, and what makes one at a path."""
