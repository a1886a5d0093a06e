"""The folder of the node cache: a mirror for each dataset, bounded together."""

import fcntl
import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.ownership import is_ours, make_folder, open_ours
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.mirror import BLOCKS_SUFFIX, JOURNAL_SUFFIX, Mirror, punch

_LAYOUT_VERSION = 1
_DISK_BLOCK_BYTES = 512  # the unit of st_blocks


@dataclass(slots=True)
class DiskCache:
    """A folder that belongs to this daemon until it is closed.

    Attributes:
        folder: where mirrors lie.
        limit_bytes: the most bytes of all blocks together.
        unopened: the bytes of each mirror that an earlier daemon left and that has not been opened
            since, by name, the oldest first.
    """

    folder: Path
    limit_bytes: int
    unopened: dict[str, int]
    _lock: int = field(repr=False)

    def close(self) -> None:
        """Release the folder for the next daemon; mirrors that are open stay readable."""
        os.close(self._lock)

    @property
    def free_bytes(self) -> int:
        """The most bytes of all opened mirrors together."""
        return max(0, self.limit_bytes - sum(self.unopened.values()))

    def open_mirror(self, identity: str, blocks: BlockMap) -> Mirror:
        """The mirror of a dataset's blocks.

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
        """Remove the unopened mirror that was written longest ago.

        Raises:
            OSError: it cannot be removed.
        """
        name = next(iter(self.unopened))
        for suffix in (JOURNAL_SUFFIX, BLOCKS_SUFFIX):
            self.folder.joinpath(name + suffix).unlink(missing_ok=True)
        self.unopened.pop(name, None)


def open_disk_cache(folder: Path, limit_bytes: int) -> DiskCache | None:
    """Lock a folder for the cache.

    Returns:
        None, after a warning, if the folder cannot be used; the daemon works without it.
    """
    reason = "another daemon uses it"
    try:
        make_folder(folder)
        lock = open_ours(folder / "lock", os.O_RDWR | os.O_CREAT)
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
    """Check that the file system can make holes in files, by which space is given back."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(8192))
        file.flush()
        punch(file.fileno(), 0, 4096)


def _remove_foreign(folder: Path) -> None:
    """Remove files that others could put into the folder: they may be forged."""
    entries = (*folder.glob("*" + BLOCKS_SUFFIX), *folder.glob("*" + JOURNAL_SUFFIX))
    foreign = [path for path in entries if path.is_symlink() or not is_ours(path.lstat())]
    for path in foreign:
        path.unlink()
    if foreign:
        facts = {"folder": folder, "files": len(foreign), "reason": "another user made them"}
        log_event("cache files removed", facts, logging.WARNING)


def _leftovers(folder: Path) -> dict[str, int]:
    for unfinished in folder.glob("*.tmp"):
        unfinished.unlink()
    _remove_foreign(folder)
    found = [
        (path.stat(), path.name.removesuffix(BLOCKS_SUFFIX))
        for path in folder.glob("*" + BLOCKS_SUFFIX)
    ]
    found.sort(key=lambda its: its[0].st_mtime_ns)
    return {name: stat.st_blocks * _DISK_BLOCK_BYTES for stat, name in found}
