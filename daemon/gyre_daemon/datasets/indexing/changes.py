"""Compares the shards of a dataset with those of its last index."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats.base import Arrays, array_of
from gyre_daemon.datasets.indexing.checksum_store import ChecksumStore
from gyre_daemon.datasets.sidecars.store import SidecarKey, SidecarStore
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.checksums import Checksums
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


@dataclass(frozen=True, slots=True)
class PreviousIndex:
    """The records of a dataset from before it is indexed again.

    Attributes:
        shards: as they were listed, by name.
        checksums: of some of them, by name.
        fingerprint: of the dataset; empty if it is not known.
    """

    shards: Mapping[str, Shard]
    checksums: Mapping[str, Checksums]
    fingerprint: str


async def load_previous(
    records: SidecarStore, name: str, location: str, before: Dataset | None
) -> PreviousIndex:
    """A dataset's last state: as it is open now (`before`), or else as the records say."""
    if before:
        storage = before.storage
        taken = storage.checksums.known if storage.checksums else {}
        named = {storage.shards[number].name: checksums for number, checksums in taken.items()}
        shards = {shard.name: shard for shard in storage.shards}
        return PreviousIndex(shards, named, before.fingerprint)
    arrays = await records.load(_key(name, location), None, _read_record)
    if arrays is None:
        return PreviousIndex({}, {}, "")
    stored, digest = _read_record(arrays)
    return PreviousIndex({shard.name: shard for shard in stored}, {}, digest)


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
    await records.save(_key(name, location), None, _arrays_of(shards, fingerprint))


async def save_version(
    records: SidecarStore, location: str, shards: Sequence[Shard], fingerprint: str
) -> None:
    """Store the state with a fingerprint, for `what_changed` of this daemon and of later ones.

    A failure to store it is logged.
    """
    if len(shards) > _MAX_REMEMBERED:
        return
    key = _version_key(location, fingerprint)
    if await records.load(key, None, _read_record) is None:
        await records.try_to_save(key, None, _arrays_of(shards, fingerprint))


async def what_changed(
    records: SidecarStore, location: str, fingerprint: str, dataset: Dataset
) -> str:
    """How the shards of a dataset differ from those that once had a fingerprint.

    Empty if nothing is known of these.
    """
    then = await remembered(records, location, fingerprint)
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
    arrays = await records.load(_version_key(location, fingerprint), None, _read_record)
    return () if arrays is None else _read_record(arrays)[0]


def _arrays_of(shards: Sequence[Shard], fingerprint: str) -> Arrays:
    listed = json.dumps([(shard.name, shard.size_bytes, shard.version) for shard in shards])
    return {
        "shards": np.frombuffer(listed.encode(), np.uint8),
        "fingerprint": np.frombuffer(fingerprint.encode(), np.uint8),
    }


def _key(name: str, location: str) -> SidecarKey:
    return SidecarKey(location, name, 0, "", "dataset/1")


def _version_key(location: str, fingerprint: str) -> SidecarKey:
    return SidecarKey(location, f"version {fingerprint}", 0, "", "dataset/1")


class ShardChanges:
    """Compares each shard of a dataset with its last state."""

    def __init__(
        self, location: str, storage: Storage, previous: PreviousIndex, checksums: ChecksumStore
    ) -> None:
        """Compare nothing yet.

        Args:
            location: of the dataset, without credentials.
            storage: the shards as they are listed now.
            previous: the dataset's last state.
            checksums: takes checksums, and has those of earlier daemons.
        """
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
        known = self._previous.checksums.get(listed.name)
        known = stored[0] if known is None and stored else known
        if known is None:
            return "changed" if then or was_indexed else "indexed"
        now = await self._checksums.take(self._location, checksums, shard, stopped)
        return "restored" if now is not None and np.array_equal(now, known) else "changed"
