"""Functions that the tests hand to a Loader; workers import this module, so it imports little."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def count(sample: dict[str, Any]) -> dict[str, Any]:
    return {"length": np.int64(len(sample["text"])), "twice": np.full((2, 3), len(sample["text"]))}


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"noise": rng.integers(1 << 40)}


def scaled(factor: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def scale(sample: dict[str, Any]) -> dict[str, Any]:
        return {"scaled": len(sample["text"]) * factor}

    return scale


def fails_late(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["text"]) > 9:
        raise KeyError("the line that helps")
    return {"length": len(sample["text"])}


def grows_late(sample: dict[str, Any]) -> dict[str, Any]:
    return {"pair": np.zeros(3 if len(sample["text"]) == 12 else 2)}


def ends_the_worker(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["text"]) == 12:
        os._exit(3)
    return {"length": len(sample["text"])}


def never_ends(sample: dict[str, Any]) -> dict[str, Any]:
    while len(sample["text"]) == 12:
        time.sleep(0.01)
    return {"length": len(sample["text"])}
