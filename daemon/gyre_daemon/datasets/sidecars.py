"""Stores what was found out about shards in sidecar files, so that it is found out only once.

A sidecar lies beside its local shard. It lies in the index folder instead if one is configured, if
the shard is remote, or if the shard's own folder cannot be written. It is valid for one size and
version of the shard. One that is stale reads as absent. One that is damaged, or that has arrays
which no inspection could have found, does too, with a warning: whoever can write beside a shard can
forge it.
"""

import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_daemon.datasets.sidecar_file import Arrays, decode, encode
from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.events import log_event

SUFFIX = ".gyre-index"
_LAYOUT_VERSION = 3
# A sidecar has an eighth of the bytes that it describes at most: a member of a tar shard takes 512
# bytes there at least, and some 40 here. The constant is for datasets of many small files; a larger
# one lets a forged file take more memory for a moment.
_ALWAYS_ALLOWED_BYTES, _PART_OF_SHARD = 64 << 20, 8

# Takes arrays and raises ValueError if they are not what an inspection finds.
Check = Callable[[Arrays], object]


@dataclass(frozen=True, slots=True)
class SidecarKey:
    """What a sidecar belongs to; it is valid for exactly this.

    Attributes:
        location: of the dataset, redacted; keeps equal names of different datasets apart.
        shard: the shard's relative name.
        size_bytes: the shard's size.
        version: the shard's version.
        kind: name and version of the arrays.
    """

    location: str
    shard: str
    size_bytes: int
    version: str
    kind: str

    def encoded(self) -> str:
        """The key as stored; without the location, since mounts move."""
        return json.dumps([_LAYOUT_VERSION, self.size_bytes, self.version, self.kind])

    @property
    def max_bytes(self) -> int:
        """The most bytes that its sidecar may have."""
        return max(_ALWAYS_ALLOWED_BYTES, self.size_bytes // _PART_OF_SHARD)


class SidecarStore:
    """Loads and saves sidecars; all methods wait for the disk.

    Several daemons may share one folder, since files only ever appear whole.
    """

    def __init__(self, index_dir: str, fallback_dir: Path, suffix: str = SUFFIX) -> None:
        """Name the folders; nothing is read or made yet.

        Args:
            index_dir: the folder of all sidecars; empty to store them beside their shards.
            fallback_dir: for sidecars that cannot be written beside a shard.
            suffix: of the files; each kind of sidecar has its own.
        """
        self._index_dir = Path(index_dir) if index_dir else None
        self._fallback = fallback_dir
        self._suffix = suffix

    def sibling(self, suffix: str) -> "SidecarStore":
        """The store of another kind of sidecars in the same folders."""
        return SidecarStore(str(self._index_dir or ""), self._fallback, suffix)

    def load(self, key: SidecarKey, local_path: Path | None, check: Check) -> Arrays | None:
        """The arrays stored under exactly this key, or None.

        Args:
            key: of the sidecar.
            local_path: of the shard, if it is on this machine.
            check: refuses arrays that no inspection finds.
        """
        found = self.load_latest(key, local_path, check)
        return found[0] if found and found[1] else None

    def load_latest(
        self, key: SidecarKey, local_path: Path | None, check: Check
    ) -> tuple[Arrays, bool] | None:
        """The arrays of this kind last stored for a shard, and whether the whole key fits.

        None if there are none for any size and version of the shard. Only the arrays of a key that
        fits are checked.

        Args:
            key: as for `load`.
            local_path: as for `load`.
            check: as for `load`.
        """
        outdated: Arrays | None = None
        for path in self._candidates(key, local_path):
            try:
                stored, arrays = decode(_read(path, key.max_bytes))
                if stored == key.encoded():
                    check(arrays)
                    return arrays, True
            except OSError:
                continue
            except ValueError as error:
                facts = {"shard": key.shard, "path": path, "reason": error}
                log_event("index thrown away", facts, logging.WARNING)
                continue
            if outdated is None and _kind(stored) == key.kind:
                outdated = arrays
        return None if outdated is None else (outdated, False)

    def save(self, key: SidecarKey, local_path: Path | None, arrays: Arrays) -> None:
        """Store arrays whole or not at all.

        Raises:
            Overloaded: no folder could take them; names the first one and why.
        """
        data = encode(key.encoded(), arrays)
        failures: list[tuple[Path, OSError]] = []
        for path in self._candidates(key, local_path):
            try:
                _write_whole(path, data)
            except OSError as failure:
                failures.append((path, failure))
            else:
                return
        path, error = failures[0]
        raise Overloaded(
            f"the index of shard {key.shard} ({len(data)} bytes) cannot be stored at {path}: "
            f"{error.strerror}; free some space or set index_dir",
            {"shard": key.shard, "needed_bytes": len(data), "reason": error.strerror or "unknown"},
        ) from error

    def try_to_save(self, key: SidecarKey, local_path: Path | None, arrays: Arrays) -> None:
        """Store arrays as `save` does; where that fails, log it and go on without them."""
        try:
            self.save(key, local_path, arrays)
        except Overloaded as error:
            log_event("index not stored", {"shard": key.shard, "reason": error}, logging.WARNING)

    def _candidates(self, key: SidecarKey, local_path: Path | None) -> Sequence[Path]:
        """Where the sidecar may lie, the best place first."""
        digest = hashlib.blake2b(f"{key.location}\n{key.shard}".encode(), digest_size=16)
        name = digest.hexdigest() + self._suffix
        if self._index_dir:
            return [self._index_dir / name]
        beside = [local_path.with_name(local_path.name + self._suffix)] if local_path else []
        return [*beside, self._fallback / name]


def _write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _read(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: there is no such file.
        ValueError: it is larger than this.
    """
    # a FIFO in its place must not be waited for
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"it has {status.st_size} bytes, more than {max_bytes}")
        return file.read(status.st_size)


def _kind(stored: str) -> str | None:
    """The kind of a stored key; None if it is none."""
    try:
        parts = json.loads(stored)
    except (ValueError, RecursionError):
        return None
    return parts[-1] if isinstance(parts, list) and parts else None
