"""Waits until something holds, which no event announces."""

import time
from collections.abc import Callable

DEADLINE_S = 120.0


def until(holds: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Waits until `holds()`; fails after the deadline."""
    assert eventually(holds, deadline_s)


def eventually(holds: Callable[[], object], deadline_s: float = DEADLINE_S) -> bool:
    """Waits until `holds()`; returns whether it did before the deadline."""
    deadline = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True
