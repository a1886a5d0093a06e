"""Reads batches from a Gyre daemon into torch.

    from gyre_client import Loader

    with Loader("corpus", batch_size=64, address="unix:/run/gyre/gyre.sock") as loader:
        for batch in loader:
            ...

torch is imported only when the Loader is first used, so that the command line starts without it.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from gyre_client.errors import GyreError, NotInstalled

if TYPE_CHECKING:
    from gyre_client.batches.batch import detections, objects, padded, texts
    from gyre_client.loader.loader import Loader

__all__ = ["GyreError", "Loader", "detections", "objects", "padded", "texts"]
__version__ = "0.1.0"

_LAZY = {
    "Loader": "gyre_client.loader.loader",
    **dict.fromkeys(("detections", "objects", "padded", "texts"), "gyre_client.batches.batch"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if sys.platform != "linux":
        raise NotInstalled(f"gyre_client.{name} runs on Linux only (got {sys.platform})")
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        raise NotInstalled.needs(f"gyre_client.{name}", error.name, "client") from error
