"""Stores what was found out about shards in sidecar files, so that it is found out only once.

A sidecar lies beside its local shard. It lies in the index folder instead if one is configured, if
the shard is remote, or if the shard's own folder cannot be written. It is valid for one size and
version of the shard; one that is stale, torn or foreign reads as absent.
"""

import hashlib
import io
import json
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.events import log_event

SUFFIX = ".gyre-index"
_LAYOUT_VERSION = 2
_KEY = "key"
_DIGEST_BYTES = 32


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

    def encoded(self) -> bytes:
        """The key as stored; without the location, since mounts move."""
        return json.dumps([_LAYOUT_VERSION, self.size_bytes, self.version, self.kind]).encode()


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

    def load(self, key: SidecarKey, local_path: Path | None) -> Arrays | None:
        """The arrays stored under exactly this key, or None."""
        found = self.load_latest(key, local_path)
        return found[0] if found and found[1] else None

    def load_latest(self, key: SidecarKey, local_path: Path | None) -> tuple[Arrays, bool] | None:
        """The arrays of this kind last stored for a shard, and whether the whole key fits.

        None if there are none for any size and version of the shard.
        """
        outdated: Arrays | None = None
        for path in self._candidates(key, local_path):
            try:
                arrays = _read(path)
            except (OSError, ValueError):
                continue
            if arrays[_KEY].tobytes() == key.encoded():
                return arrays, True
            if outdated is None and json.loads(arrays[_KEY].tobytes())[-1] == key.kind:
                outdated = arrays
        return None if outdated is None else (outdated, False)

    def save(self, key: SidecarKey, local_path: Path | None, arrays: Arrays) -> None:
        """Store arrays whole or not at all.

        Raises:
            Overloaded: no folder could take them; names the first one and why.
        """
        data = _encode({**arrays, _KEY: np.frombuffer(key.encoded(), np.uint8)})
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


def _encode(arrays: Arrays) -> bytes:
    """A zip of npy files behind its digest."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    data = buffer.getvalue()
    return _digest(data) + data


def _read(path: Path) -> Arrays:
    """Read what `_encode` made; the content is parsed only if the digest is right.

    Raises:
        ValueError: the file is damaged or foreign.
    """
    data = path.read_bytes()
    if data[:_DIGEST_BYTES] != _digest(data[_DIGEST_BYTES:]):
        raise ValueError(f"{path} is no sidecar, or a damaged one")
    with np.load(io.BytesIO(data[_DIGEST_BYTES:]), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
