"""Indexes of shards, kept as sidecar files so that a shard is scanned once and not at every start.

A sidecar lies beside its local shard, or in the index folder where one is configured, where the shard is remote, or where the
shard's own folder cannot be written. It is keyed by the shard's size and version; one that is stale, torn or foreign reads as
absent.
"""

import asyncio
import hashlib
import io
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.errors import Overloaded

SUFFIX = ".gyre-index"
_LAYOUT_VERSION = 2
_KEY = "key"
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class SidecarKey:
    """What an index belongs to: it is valid for exactly this.

    Attributes:
        location: the dataset's, redacted; keeps equal names of different datasets apart.
        shard: the shard's relative name.
        size_bytes: the shard's.
        version: the shard's.
        scanner: name and version of what made the index.
    """

    location: str
    shard: str
    size_bytes: int
    version: str
    scanner: str

    def encoded(self) -> bytes:
        """The key as stored; the location is not part of validity, since mounts move."""
        return json.dumps([_LAYOUT_VERSION, self.size_bytes, self.version, self.scanner]).encode()


class SidecarStore:
    """Loads and saves sidecars; safe for several daemons on one folder, since files only ever appear whole."""

    def __init__(self, index_dir: str, fallback_dir: Path, suffix: str = SUFFIX) -> None:
        """Look nowhere yet.

        Args:
            index_dir: the folder of all sidecars; empty for beside their shards, or the fallback.
            fallback_dir: where nothing can be written beside a shard.
            suffix: of the files; sidecars of one kind have one.
        """
        self._configured = Path(index_dir) if index_dir else None
        self._fallback = fallback_dir
        self._suffix = suffix

    def sibling(self, suffix: str) -> "SidecarStore":
        """The sidecars of another kind, in the same places."""
        return SidecarStore(str(self._configured or ""), self._fallback, suffix)

    def load_outdated(self, key: SidecarKey, local_path: Path | None) -> Arrays | None:
        """What this scanner last made of a shard, for whichever size and version, or None; waits for the disk."""
        for path in self._places(key, local_path):
            try:
                arrays = _read(path)
            except (OSError, ValueError):
                continue
            if json.loads(arrays[_KEY].tobytes())[-1] == key.scanner:
                return arrays
        return None

    async def load(self, key: SidecarKey, local_path: Path | None) -> Arrays | None:
        """The index of a shard, or None where there is no fresh one."""
        return await asyncio.to_thread(self.load_now, key, local_path)

    def load_now(self, key: SidecarKey, local_path: Path | None) -> Arrays | None:
        """As `load`, in a thread that may wait."""
        for path in self._places(key, local_path):
            try:
                arrays = _read(path)
            except (OSError, ValueError):
                continue
            if arrays[_KEY].tobytes() == key.encoded():
                return arrays
        return None

    async def save(self, key: SidecarKey, local_path: Path | None, arrays: Arrays) -> None:
        """Store an index whole or not at all.

        Raises:
            Overloaded: no place could take it; names the first one and why.
        """
        await asyncio.to_thread(self.save_now, key, local_path, arrays)

    def save_now(self, key: SidecarKey, local_path: Path | None, arrays: Arrays) -> None:
        """As `save`, in a thread that may wait."""
        data = _encode({**arrays, _KEY: np.frombuffer(key.encoded(), np.uint8)})
        failures: list[tuple[Path, OSError]] = []
        for place in self._places(key, local_path):
            try:
                _write_whole(place, data)
            except OSError as failure:
                failures.append((place, failure))
            else:
                return
        path, error = failures[0]
        raise Overloaded(
            f"the index of shard {key.shard} ({len(data)} bytes) cannot be stored at {path}: {error.strerror}; free some "
            "space or set index_dir",
            {"shard": key.shard, "needed_bytes": len(data), "reason": error.strerror or "unknown"},
        ) from error

    def _places(self, key: SidecarKey, local_path: Path | None) -> Sequence[Path]:
        name = hashlib.blake2b(f"{key.location}\n{key.shard}".encode(), digest_size=16).hexdigest() + self._suffix
        if self._configured:
            return [self._configured / name]
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
    """A digest of the rest, and a zip of npy files."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    data = buffer.getvalue()
    return _digest(data) + data


def _read(path: Path) -> Arrays:
    """What `_encode` made; what is not that is never looked into.

    Raises:
        ValueError: it is damaged or foreign.
    """
    data = path.read_bytes()
    if data[:_DIGEST_BYTES] != _digest(data[_DIGEST_BYTES:]):
        raise ValueError(f"{path} is no sidecar, or a damaged one")
    with np.load(io.BytesIO(data[_DIGEST_BYTES:]), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
