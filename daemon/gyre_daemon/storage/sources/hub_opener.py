"""What all datasets of the Hugging Face Hub share on one node: a budget, and threads that ask."""

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsspec.asyn import AsyncFileSystem

from gyre_daemon.storage.sources.connections import ConnectionBudget
from gyre_daemon.storage.sources.http_options import HttpOptions
from gyre_daemon.storage.sources.hub_budget import HubBudget

SCHEME = "hf"
# Threads wait for the hub's answers, or for their turn in the budget, and do nothing else.
_NUM_THREADS = 8


class HubOpener:
    """Opens datasets of the hub."""

    def __init__(self, requests_per_s: float) -> None:
        """Start no thread yet.

        Args:
            requests_per_s: that the node sends to the hub, in the long run.
        """
        self._budget = HubBudget(requests_per_s)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="gyre-hub")

    async def open(
        self, settings: Mapping[str, Any], options: HttpOptions, connections: ConnectionBudget
    ) -> AsyncFileSystem:
        """A file system for one dataset.

        Raises:
            ImportError: the extra `hf` is not installed.
            ConfigError: a setting is unknown or cannot be used.
        """
        make = await asyncio.to_thread(self._prepared, settings, options)
        return make(options, connections)

    def _prepared(
        self, settings: Mapping[str, Any], options: HttpOptions
    ) -> Callable[[HttpOptions, ConnectionBudget], AsyncFileSystem]:
        """Import the hub's library, which is an extra, and read the token."""
        from gyre_daemon.storage.sources.hub import HubClient  # noqa: PLC0415
        from gyre_daemon.storage.sources.hub_files import HubFileSystem  # noqa: PLC0415

        client = HubClient(settings, options.redirects, self._budget, self._threads)
        return functools.partial(HubFileSystem, client)

    def close(self) -> None:
        """Begin nothing more."""
        self._budget.closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
