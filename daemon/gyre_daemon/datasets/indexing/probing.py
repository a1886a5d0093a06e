"""Runs the probes of formats, and keeps their results.

The result for many shards, or for remote ones, is kept in one sidecar file. It counts for exactly
these shards in these versions.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gyre_daemon.datasets.formats.base import (
    Arrays,
    Probe,
    ProbeRequest,
    ProbeResponse,
    ProbeSteps,
)
from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.errors import ShardMissing
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.opener import StorageOpener
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.shard_files import read_ranges

# Up to this many local shards are probed at every opening. That takes less time than to write a
# sidecar; with more of them, the second opening of a large dataset would be slower.
_MAX_UNKEPT_SHARDS = 16


class ProbeRunner:
    """Probes the shards of a daemon's datasets."""

    def __init__(self, opener: StorageOpener, sidecars: SidecarStore) -> None:
        self._opener = opener
        self._sidecars = sidecars

    async def run(
        self,
        probe: Probe,
        storage: Storage,
        location: str,
        settings: Mapping[str, Any],
        *,
        refresh: bool,
        num_shards: int | None = None,
    ) -> Arrays:
        """The result of a probe for the shards of a dataset.

        Args:
            probe: the format's.
            storage: the shards.
            location: of the dataset, redacted.
            settings: of the storage driver.
            refresh: probe the shards even if a result was kept.
            num_shards: how many of the shards are probed, from the first on; None for all.

        Raises:
            CorruptSample: the shards are nothing that the format stores.
            ShardMissing, NotAllowed, StorageUnavailable: they cannot be read.
        """
        shards = storage.shards[:num_shards]
        if len(shards) <= _MAX_UNKEPT_SHARDS and storage.local_file(0):
            return await self._run(probe.run(shards), storage, settings)
        key = _key(location, shards, probe.version)
        check = partial(_check, probe, shards)
        arrays = None if refresh else await self._sidecars.load(key, None, check)
        if arrays is None:
            arrays = await self._run(probe.run(shards), storage, settings)
            await self._sidecars.try_to_save(key, None, arrays)
        return arrays

    async def _run(
        self, steps: ProbeSteps, storage: Storage, settings: Mapping[str, Any]
    ) -> Arrays:
        """Answer requests until the probe returns; the probe itself computes in a thread."""
        response: ProbeResponse | None = None
        while True:
            request = await compute(_advance, steps, response)
            if not isinstance(request, ProbeRequest):
                return request
            response = await self._answer(request, storage, settings)

    async def _answer(
        self, request: ProbeRequest, storage: Storage, settings: Mapping[str, Any]
    ) -> ProbeResponse | None:
        if not request.suffix:
            return await _read(storage, request.shard, request)
        shards = list(dict.fromkeys(request.shard))
        beside = await self._opener.open_beside(storage, shards, request.suffix, settings)
        if beside is not None:
            return await _read(beside, [shards.index(shard) for shard in request.shard], request)
        if request.is_optional:
            return None
        names = f"{storage.shards[shards[0]].name} to {storage.shards[shards[-1]].name}"
        raise ShardMissing(
            f"not each of the shards {names} has its {request.suffix} file next to it; restore the "
            "missing ones"
        )


def _check(probe: Probe, shards: Sequence[Shard], arrays: Arrays) -> None:
    probe.check(arrays, shards)


def _advance(steps: ProbeSteps, response: ProbeResponse | None) -> ProbeRequest | Arrays:
    """The probe's next request, or its result."""
    try:
        return steps.send(response)
    except StopIteration as end:
        arrays: Arrays = end.value
        return arrays


async def _read(storage: Storage, files: Sequence[int], request: ProbeRequest) -> ProbeResponse:
    """Read all ranges of a request, cut off at the ends of their files."""
    sizes = [storage.shards[file].size_bytes for file in files]
    starts = [min(start, size) for start, size in zip(request.start, sizes, strict=True)]
    stops = [min(stop, size) for stop, size in zip(request.stop, sizes, strict=True)]
    return ProbeResponse(await read_ranges(storage, files, starts, stops), sizes)


def _key(location: str, shards: Sequence[Shard], version: str) -> SidecarKey:
    """The key of the one sidecar for all shards, by a digest of how they were listed."""
    listed = json.dumps([(shard.name, shard.size_bytes, shard.version) for shard in shards])
    digest = hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
    num_bytes = sum(shard.size_bytes for shard in shards)
    return SidecarKey(location, "all shards' headers", num_bytes, digest, version)
