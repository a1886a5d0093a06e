"""The packed datasets of a daemon, so that jobs that pack alike share them."""

import asyncio
from dataclasses import replace

from gyre_daemon.config import PackConfig
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.packing import pack
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.runtime.threads import compute

# Each takes 20 bytes for each document. Jobs keep the one that they read in any case; with fewer,
# a job that describes one and then opens it may pack twice.
_MAX_KEPT = 8


class PackedDatasets:
    """Packs each dataset once in each way; the last few are kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, PackConfig], Dataset] = {}
        self._lock = asyncio.Lock()

    async def of(self, documents: Dataset, config: PackConfig) -> Dataset:
        """A dataset whose samples are the packed sequences of another one's.

        Raises:
            InvalidRequest: as `packing.pack`.
        """
        key = documents.fingerprint, documents.transforms, config
        found = self._kept.get(key)
        if found and found.storage is documents.storage:  # while another one may be packed
            self._kept[key] = self._kept.pop(key)
            return found
        async with self._lock:
            found = self._kept.pop(key, None)
            if found is None or found.storage is not documents.storage:
                packed = await compute(
                    pack,
                    documents.sized,
                    documents.fields,
                    documents.num_made,
                    documents.corrupt,
                    config,
                    documents.mixture,
                )
                fingerprint = packed.fingerprint(documents.fingerprint, documents.transforms)
                found = replace(
                    documents,
                    packed=packed,
                    mixture=packed.mixed.mixture if packed.mixed else None,
                    fingerprint=fingerprint,
                    corrupt=NO_SAMPLES,
                    grows=False,  # sequences of the first shards may have later documents too
                )
                self._kept = dict([*self._kept.items()][1 - _MAX_KEPT :])
            self._kept[key] = found
            return found

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
