"""What the system says of a local file, by which a shard is known again."""

import os
import time
from pathlib import Path
from typing import NamedTuple

_SETTLED_S = 0.05  # file systems count time in ticks of some milliseconds: what is as old as this has a tick of its own


class Stamp(NamedTuple):
    """A file's size and times.

    Whoever writes to a file changes both times; the time of modification can be set back afterwards, the time of change
    cannot. A new mode, owner, link or name changes the time of change alone.

    Attributes:
        size_bytes: its length.
        modified_ns: when its bytes were last written, as far as its owner says.
        changed_ns: when anything about it last changed.
    """

    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> "Stamp":
        """The present stamp of a path or a descriptor.

        Raises:
            OSError: nobody can tell.
        """
        stat = os.stat(file)  # noqa: PTH116  (of a descriptor too)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def version(self) -> str:
        """As a `Shard` has it."""
        return f"{self.modified_ns}.{self.changed_ns}"

    def is_restored(self, version: str) -> bool:
        """Whether the time of modification is that of a version."""
        return str(self.modified_ns) == version.partition(".")[0]

    def settle(self) -> None:
        """Wait until a change that comes now would have another time."""
        age_s = (time.time_ns() - self.changed_ns) / 1e9
        if age_s < _SETTLED_S:
            time.sleep(min(_SETTLED_S, max(_SETTLED_S - age_s, 0)))
