"""Stores findings about shards in sidecar files, so that none is made twice.

A sidecar is next to its local shard. It is in the index folder instead if one is configured, if
the shard is remote, or if the shard's own folder cannot be written. It is valid for one size and
version of the shard. One that is stale reads as absent. One that is damaged, or that has arrays
which no inspection could have found, does too, with a warning: whoever can write beside a shard can
forge it.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from gyre_daemon.datasets.sidecars.file import Arrays, decode, encode
from gyre_daemon.datasets.sidecars.places import BesideShard, InFolder, SidecarPlace
from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.ownership import NotOurs
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.mounts import MOUNTS

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SUFFIX = ".gyre-index"
_LAYOUT_VERSION = 3
# A sidecar has at most four times the bytes of its shard: a line of text of three bytes and its end
# takes 16 bytes here. The constant is for datasets of many small files; a larger one lets a forged
# file take more memory for a moment.
_ALWAYS_ALLOWED_BYTES, _PER_SHARD_BYTE = 64 << 20, 4

# Takes arrays and raises ValueError if no inspection finds them.
Check = Callable[[Arrays], object]
Loaded = tuple[Arrays, bool]  # the arrays of a sidecar, and whether its whole key fits


@dataclass(frozen=True, slots=True)
class SidecarKey:
    """The subject of a sidecar; it is valid for exactly this.

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
        return max(_ALWAYS_ALLOWED_BYTES, self.size_bytes * _PER_SHARD_BYTE)


@dataclass(frozen=True, slots=True)
class SidecarOf:
    """A shard whose sidecar is wanted; see `SidecarStore.load`."""

    key: SidecarKey
    local: LocalFile | None
    check: Check


class SidecarStore:
    """Loads and saves sidecars, in threads of the mounts that they lie on.

    Several daemons may share one folder, since files only ever appear whole. A folder of the
    daemon's whose mount hangs counts as one that cannot be used, so that datasets elsewhere open;
    for the folder of a shard it waits.
    """

    def __init__(self, index_dir: str, fallback_dir: Path, suffix: str = SUFFIX) -> None:
        """Name the folders; nothing is read or made yet.

        Args:
            index_dir: the folder of all sidecars; empty to store them next to their shards.
            fallback_dir: for sidecars that cannot be written next to a shard.
            suffix: of the files; each kind of sidecar has its own.
        """
        self._index_dir = Path(index_dir) if index_dir else None
        self._fallback = fallback_dir
        self._suffix = suffix
        self._warned: set[Path] = set()

    def sibling(self, suffix: str) -> "SidecarStore":
        """The store of another kind of sidecars in the same folders."""
        return SidecarStore(str(self._index_dir or ""), self._fallback, suffix)

    async def load(self, key: SidecarKey, local: LocalFile | None, check: Check) -> Arrays | None:
        """The arrays stored under exactly this key, or None.

        Args:
            key: of the sidecar.
            local: the shard, if it is on this machine.
            check: refuses arrays that no inspection finds.
        """
        found = await self.load_latest(key, local, check)
        return found[0] if found and found[1] else None

    async def load_latest(
        self, key: SidecarKey, local: LocalFile | None, check: Check
    ) -> Loaded | None:
        """The arrays of this kind last stored for a shard, and whether the whole key fits.

        None if there are none for any size and version of the shard. Only the arrays of a key that
        fits are checked.

        Args:
            key: as for `load`.
            local: as for `load`.
            check: as for `load`.
        """
        return (await self.load_all([SidecarOf(key, local, check)]))[0]

    async def load_all(self, wanted: Sequence[SidecarOf]) -> list[Loaded | None]:
        """Do as `load_latest` for each of some shards, with a call of a thread for each folder."""
        found: list[Loaded | None] = [None] * len(wanted)
        places = [self._candidates(each.key, each.local) for each in wanted]
        for rank in range(max(map(len, places), default=0)):
            by_folder: dict[tuple[bool, Path], list[int]] = {}
            for number, its in enumerate(places):
                known = found[number]
                if rank < len(its) and not (known and known[1]):
                    folder = isinstance(its[rank], InFolder), Path(str(its[rank])).parent
                    by_folder.setdefault(folder, []).append(number)
            for numbers in by_folder.values():
                some = [(places[number][rank], wanted[number]) for number in numbers]
                try:
                    loaded = await _in_thread(some[0][0], self._loaded, some)
                except TimeoutError as error:
                    self._warn(some[0][0], error)
                    continue
                for number, its_own in zip(numbers, loaded, strict=True):
                    found[number] = its_own if its_own and its_own[1] else found[number] or its_own
        return found

    def _loaded(self, wanted: Sequence[tuple[SidecarPlace, SidecarOf]]) -> list[Loaded | None]:
        """As `load_all`, from one place for each; waits for the disk."""
        return [self._one_loaded(place, each.key, each.check) for place, each in wanted]

    def _one_loaded(self, place: SidecarPlace, key: SidecarKey, check: Check) -> Loaded | None:
        """As `load_latest`, from one place; waits for the disk."""
        try:
            stored, arrays = decode(_read(place, key.max_bytes))
            if stored == key.encoded():
                check(arrays)
                return arrays, True
        except NotOurs as error:
            self._warn(place, error)
            return None
        except OSError:
            return None
        except ValueError as error:
            facts = {"shard": key.shard, "path": place, "reason": error}
            log_event("index thrown away", facts, logging.WARNING)
            return None
        return (arrays, False) if _kind(stored) == key.kind else None

    async def save(self, key: SidecarKey, local: LocalFile | None, arrays: Arrays) -> None:
        """Store arrays whole or not at all.

        Raises:
            Overloaded: no folder could take them; names the first one and why.
        """
        data = await compute(encode, key.encoded(), arrays)
        failures: list[tuple[SidecarPlace, OSError]] = []
        for place in self._candidates(key, local):
            try:
                await _in_thread(place, place.write, data)
            except OSError as failure:
                failures.append((place, failure))
            else:
                return
        place, error = failures[0]
        raise Overloaded(
            f"the index of shard {key.shard} ({len(data)} bytes) cannot be stored at {place}: "
            f"{error.strerror}. Free some space, or set `index_dir` to another folder.",
            {"shard": key.shard, "needed_bytes": len(data), "reason": error.strerror or "unknown"},
        ) from error

    async def try_to_save(self, key: SidecarKey, local: LocalFile | None, arrays: Arrays) -> None:
        """Store arrays as `save` does; where that fails, log it and go on without them."""
        try:
            await self.save(key, local, arrays)
        except Overloaded as error:
            log_event("index not stored", {"shard": key.shard, "reason": error}, logging.WARNING)

    def _warn(self, place: SidecarPlace, error: OSError) -> None:
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


async def _in_thread(
    place: SidecarPlace,
    work: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """Call `work`, which touches a place, in a thread of its mount.

    Raises:
        TimeoutError: the mount of a folder of the daemon's hangs.
    """
    run = MOUNTS.answered if isinstance(place, InFolder) else MOUNTS.run
    return await run(Path(str(place)).parent, work, *args, **kwargs)


def _read(place: SidecarPlace, max_bytes: int) -> bytes:
    """The bytes of a sidecar.

    Raises:
        OSError: there is none that counts.
        ValueError: it is larger than this.
    """
    with os.fdopen(place.open(), "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise ValueError(f"it has {num_bytes} bytes, more than {max_bytes}")
        return file.read(num_bytes)


def _kind(stored: str) -> str | None:
    """The kind of a stored key; None if it is none."""
    try:
        parts = json.loads(stored)
    except (ValueError, RecursionError):
        return None
    return parts[-1] if isinstance(parts, list) and parts else None
