"""Datasets of the hub in the cache that its library and `hf download` fill, without any request.

Compute nodes often have no way to the hub. What lies in the cache are snapshots of commits: folders
of links to files that are named by the digests of their contents, as the hub tells them too. So a
dataset has one fingerprint, wherever it is read.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gyre_daemon.errors import ShardMissing
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.location import Location
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.sources.hub import HubClient, HubPath, hub_home

OFFLINE = "HF_HUB_OFFLINE is set"
_TRUE = ("1", "ON", "YES", "TRUE")  # as the hub's library reads its variables
_DIGEST_CHARS = (40, 64)  # of Git's names of files, and of SHA-256


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A commit of a dataset in the cache.

    Attributes:
        location: the local paths.
        commit: its name.
        folder: of the commit.
    """

    location: Location
    commit: str
    folder: Path


def is_offline() -> bool:
    """Whether the hub must not be asked."""
    named = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return named.upper() in _TRUE


def snapshot_of(client: HubClient, location: Location, why: str) -> Snapshot:
    """The snapshot that a location stands for. Reads files.

    Args:
        client: knows which revision is meant.
        location: on the hub.
        why: the hub is not asked; for the error.

    Raises:
        ShardMissing: the cache has none.
    """
    paths = [HubPath.of(path) for path in location.paths]
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    cache = Path(os.path.expandvars(named)).expanduser() if named else hub_home() / "hub"
    repository, revision = paths[0].repository, client.revision_of(paths[0])
    folder = cache / f"datasets--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / revision).read_text("ascii").strip()
    except (OSError, UnicodeError):
        commit = revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        there = sorted(path.name for path in (folder / "snapshots").glob("*"))
        others = f"; it has the commits {', '.join(there)}" if there else ""
        raise ShardMissing(
            f"{why}, and the hub's cache {cache} has no snapshot of {repository} at "
            f"{revision:.100}{others}; run `hf download --repo-type dataset {repository}` where "
            "there is a way to the hub, with the same HF_HOME",
            {"location": location.text},
        )
    local = Location("file", tuple(f"{snapshot}/{path.name}" for path in paths), location.text)
    return Snapshot(local, commit, snapshot)


def with_digests(files: Sequence[LocalFile], shards: Sequence[Shard]) -> list[Shard]:
    """The files of a snapshot, as shards with the digests that the hub tells of them."""
    digests = (_digest_of(file.path) for file in files)
    return [replace(shard, digest=digest) for shard, digest in zip(shards, digests, strict=True)]


def _digest_of(path: Path) -> str:
    """The digest by which the cache names a file; empty where it is no link of the cache."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if len(name) in _DIGEST_CHARS else ""
