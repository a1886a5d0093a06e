"""The size and times by which a local file is recognised."""

import os
import time
from pathlib import Path
from typing import NamedTuple

# File systems count time in ticks of some milliseconds. A change older than this lies in an earlier
# tick than now; with less, a write in the same tick would go unnoticed, and more only waits longer.
_SETTLED_S = 0.05


class Stamp(NamedTuple):
    """A file's size and times.

    A write changes both times. The modification time can be set back afterwards, the change time
    cannot. A new mode, owner, link or name changes the change time alone.

    Attributes:
        size_bytes: the length of the file.
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
            OSError: it cannot be looked at.
        """
        # `Path.stat` takes no descriptor.
        stat = os.stat(file)  # noqa: PTH116
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def version(self) -> str:
        """The stamp as a `Shard.version`."""
        return f"{self.modified_ns}.{self.changed_ns}"

    def is_restored(self, version: str) -> bool:
        """Whether the modification time is that of a version."""
        return str(self.modified_ns) == version.partition(".")[0]

    def settle(self) -> None:
        """Wait until any later change would get another time."""
        age_s = (time.time_ns() - self.changed_ns) / 1e9
        if age_s < _SETTLED_S:
            time.sleep(min(_SETTLED_S, max(_SETTLED_S - age_s, 0)))
