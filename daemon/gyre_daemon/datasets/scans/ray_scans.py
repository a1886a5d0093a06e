"""Has shards scanned by Ray, through a driver in a process of its own; see `ray_driver`."""

import asyncio
import contextlib
import importlib.util
import itertools
import pickle
import re
import socket
import sys
from collections.abc import AsyncIterator

from gyre_daemon.datasets.scans.processes import scanned
from gyre_daemon.datasets.scans.ray_driver import LOCAL
from gyre_daemon.datasets.scans.tasks import ShardTask
from gyre_daemon.datasets.sidecars.file import Arrays
from gyre_daemon.errors import ConfigError, CorruptSample, InvalidRequest, StorageUnavailable
from gyre_daemon.workers.protocol import HEADER, Kind, read

# Shards that Ray has at once. It queues those for which it has no worker, and a cluster that grows
# with its queue sees it. Ten times as many would keep ten times as many sidecars open.
MAX_IN_RAY = 1000
_CLUSTER = re.compile(r"ray://[A-Za-z0-9.\-]+:[0-9]{1,5}|ray://\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")
# From closing the connection to the end of the driver. A private Ray ends in two seconds.
_MAX_STOP_S = 60.0


def ray_address(engine: str) -> str | None:
    """The address of Ray for the `engine` of a request; None if the daemon itself scans.

    Raises:
        InvalidRequest: there is no such engine.
        ConfigError: Ray is not installed.
    """
    if engine in ("", "local"):
        return None
    if engine != "ray" and not _CLUSTER.fullmatch(engine):
        raise InvalidRequest(
            f"no engine is {engine[:200]!r}; write `local`, `ray` for a Ray of this machine's own, "
            "or `ray://HOST:PORT` for the cluster there"
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            'scans by Ray need ray, which is not installed. Run pip install "gyre-ml[ray]".'
        )
    return LOCAL if engine == "ray" else engine


class RayScans:
    """Scans shards by Ray; nothing is started before the first.

    Used in a context; at its end the driver has ended.
    """

    def __init__(self, address: str) -> None:
        """Start nothing yet.

        Args:
            address: from `ray_address`.
        """
        self._address = address
        self._starting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._has_ended = False  # the driver has, and answers nothing more
        self._cleanup = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "RayScans":
        """Start nothing yet."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the driver, with the Ray that it started."""
        await self._cleanup.aclose()

    async def scan(self, task: ShardTask) -> Arrays:
        """Scan one shard.

        Raises:
            CorruptSample: as the format's scan; or the workers that scanned it died.
            InvalidRequest: Ray cannot be used.
            GyreError: the shard cannot be read.
        """
        writer = await self._started()
        if self._has_ended:
            raise self._ended()
        number = next(self._numbers)
        payload = pickle.dumps(task)
        reply = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            writer.writelines([HEADER.pack(Kind.COMPUTE, number, len(payload)), payload])
            arrays = await scanned(await reply)
        except CorruptSample as error:
            name, reason = task.shard.name, error.facts["reason"]
            if "shard" in error.facts:
                raise
            facts = {"shard": name, "reason": reason}
            raise CorruptSample(f"shard {name} has no index: {reason}", facts) from error
        finally:
            del self._waiting[number]
        return arrays

    async def _started(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is None:
                self._writer = await self._cleanup.enter_async_context(self._driver())
            return self._writer

    @contextlib.asynccontextmanager
    async def _driver(self) -> AsyncIterator[asyncio.StreamWriter]:
        """A driver that is connected to Ray, for as long as the context lasts."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gyre_daemon.datasets.scans.ray_driver",
                str(theirs.fileno()),
                self._address,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the daemon
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        first = self._waiting[0] = asyncio.get_running_loop().create_future()
        receiving = asyncio.create_task(self._receive(reader))
        try:
            await scanned(await first)
            yield writer
        finally:
            receiving.cancel()
            writer.close()
            await asyncio.gather(receiving, return_exceptions=True)
            try:
                async with asyncio.timeout(_MAX_STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Hand out replies until the driver ends; then fail those that wait."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                reply = await read(reader)
                waiting = self._waiting.get(reply.number)
                if waiting and not waiting.done():
                    waiting.set_result(bytes(reply.body))
        self._has_ended = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._ended())

    def _ended(self) -> StorageUnavailable:
        return StorageUnavailable(
            f"the driver of Ray at {self._address} ended; see what it wrote to the daemon's log"
        )
