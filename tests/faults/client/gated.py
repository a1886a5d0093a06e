"""`gyre` with units that wait at gates, wherever they are done.

A unit waits until the file `N` is in the folder, for the largest number N in the file `gates` that
is not above its own. Once done, it leaves a file in the folder `done`.
"""

import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_client.command import cli, conversion, units


@dataclass(frozen=True)
class Gated:
    """A unit behind a gate."""

    unit: units.Unit
    folder: Path

    @property
    def number(self) -> int:
        return self.unit.number

    def run(self, connection: Any, advance: Callable[[int, int], None]) -> Mapping[str, Any]:
        gates = map(int, (self.folder / "gates").read_text().split())
        gate = max((each for each in gates if each <= self.number), default=None)
        while gate is not None and not (self.folder / str(gate)).exists():
            time.sleep(0.05)
        result = self.unit.run(connection, advance)
        work = getattr(self.unit, "work", "convert")
        (self.folder / "done" / f"{work} {self.number} {uuid.uuid4()}").touch()
        return result


def main() -> None:
    folder = Path(sys.argv[1])
    run_units = units.run_units

    def gated(found: Sequence[units.Unit], *rest: Any) -> None:
        run_units([Gated(each, folder) for each in found], *rest)

    conversion.run_units = units.run_units = gated  # type: ignore[assignment, attr-defined]
    sys.exit(cli.main(sys.argv[2:]))
