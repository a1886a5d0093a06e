"""A shard: one file of a dataset, as it was listed. A value without I/O."""

from dataclasses import dataclass

from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.validators import UNKNOWN, Validators


@dataclass(frozen=True, slots=True)
class Shard:
    """One file or object of a dataset, as listed when the dataset was opened.

    Attributes:
        name: relative to the dataset's root, so that a mirror elsewhere has the same names.
        size_bytes: the length of the file.
        version: the etag, or a local file's modification and change times in ns; changes whenever
            the shard does.
        digest: of the content, if the storage knows one that is the same for every copy of it;
            otherwise empty.
        validators: what its storage told; answers are compared with it. Unknown for local files.
    """

    name: str
    size_bytes: int
    version: str
    digest: str = ""
    validators: Validators = UNKNOWN

    def place_of(self, offset: int) -> tuple[str, int]:
        """The name of the file that has a byte of the shard, and which byte of that file it is."""
        return self.name, offset


def truncated(name: str, start: int, stop: int, num_bytes: int) -> CorruptSample:
    """The error for a read that ran past the end of a shard."""
    return CorruptSample(
        f"shard {name} is shorter than its index says: only {num_bytes} bytes of [{start}, {stop}) "
        "could be read; restore the shard, or index the dataset again",
        {"shard": name, "offset": start, "reason": "truncated"},
    )


def changed(name: str) -> CorruptSample:
    """The error for a shard that has changed since it was listed."""
    return CorruptSample(
        f"shard {name} has changed since the dataset was opened; restore it with its times "
        "(`cp -p`), or index the dataset again",
        {"shard": name, "reason": "changed"},
    )
