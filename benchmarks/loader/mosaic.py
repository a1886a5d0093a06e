"""`streaming`, the library of mosaicml-streaming, or None if it is not installed.

It imports its own vision datasets, and these import torchvision, whose published build works only
with torch's build for GPUs. The comparison uses neither, so they are left out.
"""

import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any


def _import_streaming() -> Any:
    if not importlib.util.find_spec("streaming"):
        return None
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("streaming")


streaming: Any = _import_streaming()


def is_installed() -> bool:
    """Whether the library is there."""
    return streaming is not None
