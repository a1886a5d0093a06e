"""The folder of the node cache: one mirror for each dataset, bounded together, and only one daemon at a time."""

import fcntl
import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.mirror import BLOCKS_SUFFIX, JOURNAL_SUFFIX, Mirror, punch

_LAYOUT_VERSION = 1
_DISK_BLOCK_BYTES = 512  # unit of st_blocks


@dataclass(slots=True)
class DiskCache:
    """A folder that this daemon has for itself until it ends.

    Attributes:
        folder: where mirrors lie.
        limit_bytes: of all blocks together.
        unopened: of mirrors that an earlier daemon left and nobody has opened since: bytes by name, the oldest first.
    """

    folder: Path
    limit_bytes: int
    unopened: dict[str, int]
    _lock: int = field(repr=False)

    def __del__(self) -> None:
        """Let the next daemon have it."""
        os.close(self._lock)

    @property
    def free_bytes(self) -> int:
        """What the mirrors that are opened may take together."""
        return max(0, self.limit_bytes - sum(self.unopened.values()))

    def open_mirror(self, identity: str, blocks: BlockMap) -> Mirror:
        """The mirror of a dataset's blocks, which does not count as unopened any more.

        Args:
            identity: of the dataset's shards; changes when any of them does.
            blocks: of the dataset.

        Raises:
            OSError: the folder cannot be written.
        """
        key = f"{_LAYOUT_VERSION}\n{identity}\n".encode() + blocks.digest()
        name = hashlib.blake2b(key, digest_size=16).hexdigest()
        mirror = Mirror(self.folder / name, blocks.sizes(), blocks.offsets())
        self.unopened.pop(name, None)
        return mirror

    def remove_oldest(self) -> None:
        """Remove the mirror that nobody has opened for longest.

        Raises:
            OSError: it cannot be removed.
        """
        name = next(iter(self.unopened))
        for suffix in (JOURNAL_SUFFIX, BLOCKS_SUFFIX):
            self.folder.joinpath(name + suffix).unlink(missing_ok=True)
        self.unopened.pop(name, None)


def open_disk_cache(folder: Path, limit_bytes: int) -> DiskCache | None:
    """Take a folder for the cache; None, and one warning, where it cannot be had: the daemon then works without it."""
    reason = "another daemon has it"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_holes(folder)
            return DiskCache(folder, limit_bytes, _leftovers(folder), lock)
        except BaseException:
            os.close(lock)
            raise
    except BlockingIOError:
        pass
    except OSError as error:
        reason = error.strerror or repr(error)
    log_event("no disk cache", {"folder": folder, "reason": reason}, logging.WARNING)
    return None


def _check_holes(folder: Path) -> None:
    """Without holes in files no space would come back."""
    path = folder / "probe"
    with path.open("wb") as file:
        path.unlink()
        file.write(bytes(8192))
        file.flush()
        punch(file.fileno(), 0, 4096)


def _leftovers(folder: Path) -> dict[str, int]:
    for unfinished in folder.glob("*.tmp"):
        unfinished.unlink()
    found = [(path.stat(), path.name.removesuffix(BLOCKS_SUFFIX)) for path in folder.glob("*" + BLOCKS_SUFFIX)]
    found.sort(key=lambda its: its[0].st_mtime_ns)
    return {name: stat.st_blocks * _DISK_BLOCK_BYTES for stat, name in found}
