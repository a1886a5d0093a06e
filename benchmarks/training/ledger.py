"""The results of a benchmark that runs in several parts: JSON lines, looked up by key."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Key = Sequence[str | int]
Result = dict[str, Any]


class Ledger:
    """All results so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._results: dict[tuple[str | int, ...], Result] = {}
        for line in lines:
            key, result = json.loads(line)
            self._results[tuple(key)] = result

    def __getitem__(self, key: Key) -> Result:
        return self._results[tuple(key)]

    def fill(self, keys: Iterable[Key], measure: Callable[[Any], Result], max_s: float) -> bool:
        """Measure the missing keys in this order, and return whether all results exist.

        No new measurement begins after ``max_s`` seconds.
        """
        began = time.monotonic()
        for key in keys:
            if tuple(key) in self._results:
                continue
            if time.monotonic() - began > max_s:
                return False
            self._results[tuple(key)] = result = measure(tuple(key))
            with self._path.open("a") as file:
                file.write(json.dumps([list(key), result]) + "\n")
        return True
