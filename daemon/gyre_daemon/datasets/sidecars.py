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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.sidecar_places import BesideShard, InFolder, SidecarPlace
from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.ownership import NotOurs
from gyre_daemon.storage.beneath import LocalFile

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
        self._warned: set[Path] = set()

    def sibling(self, suffix: str) -> "SidecarStore":
        """The store of another kind of sidecars in the same folders."""
        return SidecarStore(str(self._index_dir or ""), self._fallback, suffix)

    def load(self, key: SidecarKey, local: LocalFile | None) -> Arrays | None:
        """The arrays stored under exactly this key, or None."""
        found = self.load_latest(key, local)
        return found[0] if found and found[1] else None

    def load_latest(self, key: SidecarKey, local: LocalFile | None) -> tuple[Arrays, bool] | None:
        """The arrays of this kind last stored for a shard, and whether the whole key fits.

        None if there are none for any size and version of the shard.
        """
        outdated: Arrays | None = None
        for place in self._candidates(key, local):
            try:
                arrays = _read(place)
            except NotOurs as error:
                self._warn(place, error)
                continue
            except (OSError, ValueError):
                continue
            if arrays[_KEY].tobytes() == key.encoded():
                return arrays, True
            if outdated is None and json.loads(arrays[_KEY].tobytes())[-1] == key.kind:
                outdated = arrays
        return None if outdated is None else (outdated, False)

    def save(self, key: SidecarKey, local: LocalFile | None, arrays: Arrays) -> None:
        """Store arrays whole or not at all.

        Raises:
            Overloaded: no folder could take them; names the first one and why.
        """
        data = _encode({**arrays, _KEY: np.frombuffer(key.encoded(), np.uint8)})
        failures: list[tuple[SidecarPlace, OSError]] = []
        for place in self._candidates(key, local):
            try:
                place.write(data)
            except OSError as failure:
                failures.append((place, failure))
            else:
                return
        place, error = failures[0]
        raise Overloaded(
            f"the index of shard {key.shard} ({len(data)} bytes) cannot be stored at {place}: "
            f"{error.strerror}; free some space or set index_dir",
            {"shard": key.shard, "needed_bytes": len(data), "reason": error.strerror or "unknown"},
        ) from error

    def try_to_save(self, key: SidecarKey, local: LocalFile | None, arrays: Arrays) -> None:
        """Store arrays as `save` does; where that fails, log it and go on without them."""
        try:
            self.save(key, local, arrays)
        except Overloaded as error:
            log_event("index not stored", {"shard": key.shard, "reason": error}, logging.WARNING)

    def _warn(self, place: SidecarPlace, error: NotOurs) -> None:
        """Log once for each folder that it has an index that does not count."""
        folder = Path(str(place)).parent
        if folder in self._warned:
            return
        self._warned.add(folder)
        facts = {"folder": folder, "first": place, "reason": error.strerror}
        log_event("index ignored", facts, logging.WARNING)

    def _candidates(self, key: SidecarKey, local: LocalFile | None) -> Sequence[SidecarPlace]:
        """Where the sidecar may lie, the best place first."""
        digest = hashlib.blake2b(f"{key.location}\n{key.shard}".encode(), digest_size=16)
        name = digest.hexdigest() + self._suffix
        if self._index_dir:
            return [InFolder(self._index_dir / name)]
        fallback = InFolder(self._fallback / name)
        if local is None:
            return [fallback]
        return [BesideShard(local.sibling(local.path.name + self._suffix), local), fallback]


def _encode(arrays: Arrays) -> bytes:
    """A zip of npy files behind its digest."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    data = buffer.getvalue()
    return _digest(data) + data


def _read(place: SidecarPlace) -> Arrays:
    """Read what `_encode` made; the content is parsed only if the digest is right.

    Raises:
        ValueError: the file is damaged or foreign.
        OSError: there is none that counts.
    """
    with os.fdopen(place.open(), "rb") as file:
        data = file.read()
    if data[:_DIGEST_BYTES] != _digest(data[_DIGEST_BYTES:]):
        raise ValueError(f"{place} is no sidecar, or a damaged one")
    with np.load(io.BytesIO(data[_DIGEST_BYTES:]), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
