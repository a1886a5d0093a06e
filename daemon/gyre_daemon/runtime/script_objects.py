"""Functions and classes of a training script, in files that the client of a private daemon writes.

Only that client can write into the private daemon's folder, and a shared daemon takes no such path
from a client.
"""

import pickle
import sys
from pathlib import Path
from typing import Any, TypedDict


class Payload(TypedDict):
    """The contents of a file.

    Attributes:
        value: the pickled function or class.
        path: `sys.path` of the script, for modules next to it.
        lines: the sources of functions, for errors; by file and number of the first line.
    """

    value: bytes
    path: list[str]
    lines: dict[str, tuple[int, list[str]]]


def load_script_object(path: str) -> tuple[Any, dict[str, tuple[int, list[str]]]]:
    """The function or class of a file, and the lines of `Payload`.

    Raises:
        Exception: whatever reading the file or importing the script's modules raises.
    """
    payload: Payload = pickle.loads(Path(path).read_bytes())
    sys.path += [each for each in payload["path"] if each not in sys.path]
    return pickle.loads(payload["value"]), payload["lines"]
