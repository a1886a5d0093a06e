"""`streaming`, the library of mosaicml-streaming, or None if it is not installed.

It imports its own vision datasets, and these import torchvision, whose published build works only
with torch's build for GPUs. The comparison uses neither, so they are left out.
"""

import functools
import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any


@functools.cache
def _library() -> Any:
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("streaming")


class _Streaming:
    """Imports the library when an attribute is first used, which takes seconds."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks each name of a module for some
            raise AttributeError(name)
        return getattr(_library(), name)


def is_installed() -> bool:
    """Whether the library is there."""
    return importlib.util.find_spec("streaming") is not None


streaming: Any = _Streaming() if is_installed() else None
