"""How the dtypes of fields are named between processes: as numpy does, and bfloat16."""

import importlib

import numpy as np

# numpy has none, and would call it by a name that says its size alone. torch and clients have it.
BFLOAT16 = "bfloat16"


def name_of(dtype: np.dtype[np.generic]) -> str:
    """The name of a dtype, in which its byte order is if it has one."""
    return BFLOAT16 if dtype.name == BFLOAT16 else dtype.str


def dtype_of(name: str) -> np.dtype[np.generic]:
    """The dtype of a name.

    Raises:
        ModuleNotFoundError: it is bfloat16, and `ml_dtypes` is not installed.
    """
    if name == BFLOAT16:
        bfloat16: np.dtype[np.generic] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        return bfloat16
    return np.dtype(name)
