"""Compares the shards of a dataset with those of its last index."""

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats.base import array_of
from gyre_daemon.datasets.sidecars import Arrays, Check, SidecarKey, SidecarOf, SidecarStore
from gyre_daemon.storage.beneath import file_error
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.open_shards import CHECKSUM_BYTES, Checksums, ShardChecksums, num_blocks
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.shard import Shard

# indexed: it is new. kept: it is what it was. restored: its times moved, but its bytes are what
# they were. changed: it has other bytes, or may have, because no checksums of the earlier ones
# exist.
Change = Literal["indexed", "kept", "restored", "changed"]
RECORD_SUFFIX = ".gyre-dataset"  # of the sidecar of a dataset as a whole
_MAX_FINGERPRINT_BYTES = 64
# Shards of a dataset that is remembered: reading the names of more would hold up the event loop.
_MAX_REMEMBERED = 10_000
_MAX_NAMED = 3  # of the shards that differ in one way
CHECKSUMS_SUFFIX = ".gyre-checksums"
_CHECKSUMS_KIND = "checksums/1"
_CHECKSUMS = "checksums"


class PreviousIndex(Struct, frozen=True):
    """The records of a dataset from before it is indexed again.

    Attributes:
        shards: as they were listed, by name.
        fingerprint: of the dataset; empty if it is not known.
    """

    shards: Mapping[str, Shard]
    fingerprint: str


class ChecksumStore:
    """The checksums of all datasets of a daemon, in its index folder."""

    def __init__(self, sidecars: SidecarStore) -> None:
        """Read nothing yet."""
        self._sidecars = sidecars.sibling(CHECKSUMS_SUFFIX)

    def serve(self, location: str, shards: ShardChecksums) -> None:
        """Have the stored checksums of a shard loaded when a read needs them, in any thread."""
        loop = asyncio.get_running_loop()

        async def load(shard: int) -> Checksums | None:
            check = _check_of(shards, shard)
            arrays = await self._sidecars.load(_checksums_key(location, shards, shard), None, check)
            return None if arrays is None else arrays[_CHECKSUMS]

        def load_in_thread(shard: int) -> Checksums | None:
            return asyncio.run_coroutine_threadsafe(load(shard), loop).result()

        shards.load = load_in_thread

    async def take(
        self, location: str, shards: ShardChecksums, shard: int, stopped: threading.Event
    ) -> Checksums | None:
        """Take and store the checksums of one shard now.

        None if it has changed since it was listed, or `stopped` was set meanwhile.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
            Overloaded: they cannot be stored.
        """
        try:
            checksums = await MOUNTS.run(shards.folder(shard), shards.take, shard, stopped)
        except OSError as error:
            raise file_error(shards.listed[shard].name, error) from error
        if checksums is not None:
            key = _checksums_key(location, shards, shard)
            await self._sidecars.save(key, None, {_CHECKSUMS: checksums})
        return checksums

    async def keep(
        self, location: str, shards: ShardChecksums, shard: int, stopped: threading.Event
    ) -> None:
        """Store the checksums of one shard for later daemons; take them if there are none.

        Nothing is stored if `stopped` is set before all are taken.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
            Overloaded: they cannot be stored.
        """
        stored = await self.stored(location, shards, shard)
        if stored and stored[1]:
            shards.add(shard, stored[0])
        else:
            await self.take(location, shards, shard, stopped)

    async def stored(
        self, location: str, shards: ShardChecksums, shard: int
    ) -> tuple[Checksums, bool] | None:
        """The checksums last stored for a shard, and whether it was then as it is listed now.

        None if there are none.
        """
        wanted = SidecarOf(_checksums_key(location, shards, shard), None, _check_of(shards, shard))
        (found,) = await self._sidecars.load_all([wanted])
        if found is None or _CHECKSUMS not in found[0]:
            return None
        return found[0][_CHECKSUMS], found[1]


async def load_previous(
    records: SidecarStore, name: str, location: str, before: Dataset | None
) -> PreviousIndex:
    """A dataset's last state: as it is open now (`before`), or else as the records say."""
    if before:
        shards = {shard.name: shard for shard in before.storage.shards}
        return PreviousIndex(shards, before.fingerprint)
    arrays = await records.load(_key(location, name), None, _read_record)
    if arrays is None:
        return PreviousIndex({}, "")
    stored, digest = _read_record(arrays)
    return PreviousIndex({shard.name: shard for shard in stored}, digest)


def _read_record(arrays: Arrays) -> tuple[list[Shard], str]:
    """The shards and the fingerprint of a record, which may be forged.

    Raises:
        ValueError: it is none.
    """
    text = array_of(arrays, "shards", np.uint8).tobytes()
    digest = array_of(arrays, "fingerprint", np.uint8).tobytes()
    if len(digest) > _MAX_FINGERPRINT_BYTES or not digest.isalnum():
        raise ValueError("its fingerprint is none")
    try:
        listed = msgspec.json.decode(text, type=list[tuple[str, int, str]])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError("its list of shards is damaged") from error
    return [Shard(*each) for each in listed], digest.decode()


async def save_record(
    records: SidecarStore, name: str, location: str, shards: Sequence[Shard], fingerprint: str
) -> None:
    """Store the state of a dataset, for `load_previous` of this daemon and of later ones.

    Raises:
        Overloaded: it cannot be stored.
    """
    await records.save(_key(location, name), None, _arrays_of(shards, fingerprint))


async def save_version(
    records: SidecarStore, location: str, shards: Sequence[Shard], fingerprint: str
) -> None:
    """Store the state with a fingerprint, for `what_changed` of this daemon and of later ones.

    A failure to store it is logged.
    """
    if len(shards) > _MAX_REMEMBERED:
        return
    key = _key(location, f"version {fingerprint}")
    if await records.load(key, None, _read_record) is None:
        await records.try_to_save(key, None, _arrays_of(shards, fingerprint))


async def what_changed(records: SidecarStore, dataset: Dataset, fingerprint: str) -> str:
    """How the shards of a dataset differ from those that once had a fingerprint.

    Empty if nothing is known of these.
    """
    then = await remembered(records, dataset.uri, fingerprint)
    if not then:
        return ""
    before = {shard.name: shard.size_bytes for shard in then}
    now = {shard.name: shard.size_bytes for shard in dataset.shards}
    others = [name for name in now if name in before and now[name] != before[name]]
    parts = [
        f"{what} ({', '.join(names[:_MAX_NAMED])}{', ...' if len(names) > _MAX_NAMED else ''})"
        for what, names in (
            ("added", [name for name in now if name not in before]),
            ("removed", [name for name in before if name not in now]),
            ("changed in size", others),
        )
        if names
    ]
    if parts:
        text = f"since then shards were {' and '.join(parts)}"
        if list(now.items())[: len(before)] == list(before.items()):
            text += " behind the others" + (
                ", which have other contents or other options than they had"
                if dataset.grows
                else " (`append = true` in the dataset's table lets a state go on from there)"
            )
        return text
    return "its shards have the same names and sizes, but other contents or other options"


async def remembered(records: SidecarStore, location: str, fingerprint: str) -> Sequence[Shard]:
    """The shards that once had a fingerprint; empty if that is not known."""
    arrays = await records.load(_key(location, f"version {fingerprint}"), None, _read_record)
    return () if arrays is None else _read_record(arrays)[0]


def _arrays_of(shards: Sequence[Shard], fingerprint: str) -> Arrays:
    listed = json.dumps([(shard.name, shard.size_bytes, shard.version) for shard in shards])
    return {
        "shards": np.frombuffer(listed.encode(), np.uint8),
        "fingerprint": np.frombuffer(fingerprint.encode(), np.uint8),
    }


def _key(location: str, of: str) -> SidecarKey:
    return SidecarKey(location, of, 0, "", "dataset/1")


class ShardChanges:
    """Compares each shard of a dataset with its last state."""

    def __init__(
        self, location: str, storage: Storage, previous: PreviousIndex, checksums: ChecksumStore
    ) -> None:
        """Compare nothing yet."""
        self._location = location
        self._storage = storage
        self._previous = previous
        self._checksums = checksums

    async def of(
        self, shard: int, was_indexed: bool, is_fresh: bool, stopped: threading.Event
    ) -> Change:
        """How a shard has changed; a local one whose times moved is read whole.

        Args:
            shard: its number.
            was_indexed: whether it has a sidecar, of this or another version.
            is_fresh: whether that sidecar is of the listed version, or there is nothing to scan.
            stopped: set when nobody waits for the answer any more.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
        """
        listed = self._storage.shards[shard]
        then = self._previous.shards.get(listed.name)
        checksums = self._storage.checksums
        if checksums is None:
            return "kept" if was_indexed and is_fresh else "changed" if was_indexed else "indexed"
        stored = await self._checksums.stored(self._location, checksums, shard)
        if then == listed or (was_indexed and is_fresh) or (stored and stored[1]):
            return "kept"
        if stored is None:
            return "changed" if then or was_indexed else "indexed"
        now = await self._checksums.take(self._location, checksums, shard, stopped)
        return "restored" if now is not None and np.array_equal(now, stored[0]) else "changed"


def _check_of(shards: ShardChecksums, shard: int) -> Check:
    """Refuses arrays that are no checksums of a shard of this size."""

    def check(arrays: Arrays) -> None:
        checksums = arrays.get(_CHECKSUMS)
        expected = num_blocks(shards.listed[shard].size_bytes), CHECKSUM_BYTES
        if checksums is None or checksums.dtype != np.uint8 or checksums.shape != expected:
            raise ValueError("it has no checksums of this shard")

    return check


def _checksums_key(location: str, shards: ShardChecksums, shard: int) -> SidecarKey:
    listed = shards.listed[shard]
    return SidecarKey(location, listed.name, listed.size_bytes, listed.version, _CHECKSUMS_KIND)
