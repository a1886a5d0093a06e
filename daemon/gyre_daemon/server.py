"""One daemon process from start to end: claims its addresses, serves, drains and leaves nothing behind."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from gyre_daemon.config import DaemonConfig
from gyre_daemon.copiers import Copiers
from gyre_daemon.datasets.catalog import Catalog
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.datasets.unpacked import UnpackedShards
from gyre_daemon.doors import Door, Doors
from gyre_daemon.errors import ConfigError
from gyre_daemon.memory.budget import Budget
from gyre_daemon.memory.mapped import Mapped
from gyre_daemon.memory.sidechannel import SideChannel
from gyre_daemon.monitoring.exposition import Exposition
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.monitoring.scrape import ScrapeServer
from gyre_daemon.reload import Reloader, Reread
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.runtime.lag import LoopLag
from gyre_daemon.runtime.listen import SocketClaim, TcpAddress, UnixAddress, parse_address, parse_metrics_address
from gyre_daemon.runtime.notify import feed_watchdog, notify
from gyre_daemon.service import SERVICE_NAME, LoaderService, register
from gyre_daemon.sessions.census import take_census
from gyre_daemon.sessions.feed import Machinery
from gyre_daemon.sessions.session import SessionEnvironment
from gyre_daemon.sessions.table import SessionTable
from gyre_daemon.storage.cache.disk import open_disk_cache
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.engine.endpoint import Terms
from gyre_daemon.storage.opener import StorageOpener

_MAX_CONTROL_BYTES = 64 << 10
_SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # otherwise a second daemon would silently share the port
    ("grpc.max_receive_message_length", _MAX_CONTROL_BYTES),
    ("grpc.max_concurrent_streams", 4096),
]
_LAST_GRACE_S = 1.0
_LOOK_AFTER_COPIERS_S = 1.0  # reads go on without them, so nothing waits for it

Routine = Callable[[], Coroutine[None, None, None]]  # runs as long as the daemon


@dataclass(frozen=True, slots=True)
class Privacy:
    """A daemon that belongs to one process: it serves whatever its owner names and ends with it.

    Attributes:
        parent_pid: the owner; 0 for none.
        remove_dir: goes with the daemon; None for nothing.
    """

    parent_pid: int
    remove_dir: Path | None


async def serve(
    config: DaemonConfig, fallback_index_dir: Path, privacy: Privacy | None, reread: Reread | None, copiers: Copiers
) -> None:
    """Serve until SIGTERM, SIGINT or the end of the owner, then drain.

    Args:
        config: checked.
        fallback_index_dir: for indexes that can be stored nowhere else.
        privacy: of a daemon that belongs to one process; None for a node's.
        reread: gives the configuration anew, checked, on SIGHUP; None where there is no file to read.
        copiers: of this daemon.

    Raises:
        ConfigError: an address cannot be used or is taken.
    """
    stopping = asyncio.Event()
    _stop_on_signals(stopping)
    if privacy:
        _stop_with_owner(privacy.parent_pid, stopping)
    addresses = [parse_address(text) for text in config.listen]
    claims = [SocketClaim(address) for address in addresses if isinstance(address, UnixAddress)]
    executor = ThreadPoolExecutor(config.num_io_threads, thread_name_prefix="gyre-io")
    sides: list[SideChannel] = []
    try:
        sides += [SideChannel(address.path) for address in addresses if isinstance(address, UnixAddress)]
        daemon = _Daemon(config, fallback_index_dir, executor, sides, copiers, allow_ad_hoc=privacy is not None)
        if reread:
            daemon.reload_on_signal(reread)
        await daemon.run(addresses, [Door(*each) for each in zip(claims, sides, strict=True)], stopping)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for side in sides:
            side.close()
        for claim in claims:
            claim.give_up()
        if privacy and privacy.remove_dir:
            shutil.rmtree(privacy.remove_dir, ignore_errors=True)


class _Daemon:
    """The parts of a daemon, put together."""

    def __init__(
        self,
        config: DaemonConfig,
        fallback_index_dir: Path,
        executor: ThreadPoolExecutor,
        sides: Sequence[SideChannel],
        copiers: Copiers,
        *,
        allow_ad_hoc: bool,
    ) -> None:
        metrics = Metrics()
        workers = FairExecutor(executor, config.num_io_threads)
        terms = Terms(config.max_requests, config.read_deadline_s, config.hedge)
        opener = StorageOpener(workers, terms, metrics, copiers)
        self._config = config
        self._cache = _make_cache(config, workers, metrics)
        sidecars = SidecarStore(config.index_dir, fallback_index_dir)
        beside = Path(config.index_dir) / "unpacked" if config.index_dir else fallback_index_dir.with_name("unpacked")
        unpacked = UnpackedShards(Path(config.unpack_dir) if config.unpack_dir else beside, config.unpack_disk)
        self._catalog = Catalog(config.datasets, opener, sidecars, self._cache, allow_ad_hoc=allow_ad_hoc, unpacked=unpacked)
        budget, mapped = Budget(config.memory_budget), Mapped(config.memory_budget, copiers)
        machinery = Machinery(budget, mapped, workers, config.session_memory, time.monotonic)
        self._sessions = SessionTable(SessionEnvironment(machinery, metrics, config.lease_s), config.job_weights)
        self._loop_lag = LoopLag()
        self._routines: list[Routine] = [self._sessions.watch_leases, feed_watchdog, self._loop_lag.watch]
        self._routines.append(partial(_look_after, copiers))
        self._scrapes = ScrapeServer(Exposition(lambda: take_census(self._sessions, self._loop_lag)).text)
        self._service = LoaderService(self._catalog, self._sessions, sides, copiers, config.prefetch_batches)
        self._health = HealthServicer()
        self._servers: list[grpc.aio.Server] = []

    def reload_on_signal(self, reread: Reread) -> None:
        """SIGHUP has the configuration read again."""
        reloader = Reloader(self._config, reread, self._catalog, self._sessions)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
        self._routines.append(reloader.run)

    async def run(self, addresses: Sequence[UnixAddress | TcpAddress], doors: Sequence[Door], stopping: asyncio.Event) -> None:
        server = self._new_server()
        listening = [_bind(server, address) for address in addresses]
        serving_metrics = await self._serve_metrics()
        await server.start()
        self._servers.append(server)
        for door in doors:
            door.claim.open_to_group()
        await self._set_serving(True)
        watch = asyncio.create_task(Doors(doors, self._bind_again, self._set_serving).watch())
        background = [asyncio.create_task(routine()) for routine in self._routines]
        facts = {"listen": listening, "pid": os.getpid(), "datasets": sorted(self._config.datasets), **serving_metrics}
        log_event("ready", facts)
        notify("READY=1")
        await stopping.wait()
        notify("STOPPING=1")
        watch.cancel()
        await self._drain()
        await self._scrapes.stop()
        for task in background:
            task.cancel()
        self._catalog.close()
        if self._cache:
            await self._cache.close()
        log_event("stopped")

    def _new_server(self) -> grpc.aio.Server:
        """One that answers for this daemon, at no address yet."""
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        register(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    async def _bind_again(self, address: UnixAddress) -> None:
        """See `Doors`. A gRPC server that runs takes no further address, so there is one more of them."""
        server = self._new_server()
        _bind(server, address)
        await server.start()
        self._servers.append(server)

    async def _serve_metrics(self) -> dict[str, str]:
        """What there is to log of it."""
        if not self._config.metrics_listen:
            return {}
        address = parse_metrics_address(self._config.metrics_listen, is_public=self._config.metrics_public)
        return {"metrics": await self._scrapes.start(address)}

    async def _drain(self) -> None:
        """NOT_SERVING, no new session, the batches that are under way, goodbye."""
        await self._set_serving(False)
        log_event("draining", {"sessions": len(list(self._sessions)), "timeout_s": self._config.drain_timeout_s})
        await self._sessions.drain(self._config.drain_timeout_s)
        await asyncio.gather(*(server.stop(_LAST_GRACE_S) for server in self._servers))

    async def _set_serving(self, is_serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for service in ("", SERVICE_NAME):
            await self._health.set(service, states.SERVING if is_serving else states.NOT_SERVING)


async def _look_after(copiers: Copiers) -> None:
    """Those that died are replaced, for ever."""
    while True:
        await asyncio.sleep(_LOOK_AFTER_COPIERS_S)
        await asyncio.to_thread(copiers.look_after)


def _make_cache(config: DaemonConfig, workers: FairExecutor, metrics: Metrics) -> NodeCache | None:
    if not config.cache_memory:
        return None
    disk = open_disk_cache(Path(config.cache_dir), config.cache_disk) if config.cache_dir and config.cache_disk else None
    return NodeCache(config.cache_memory, disk, workers, metrics.cache)


def _bind(server: grpc.aio.Server, address: UnixAddress | TcpAddress) -> str:
    try:
        port = server.add_insecure_port(address.grpc_target)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address.grpc_target}: is another process using it?") from error
    if isinstance(address, TcpAddress):
        return f"tcp:{address.host}:{port}"
    return f"unix:{address.path}"


def _stop_on_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)


def _stop_with_owner(parent_pid: int, stopping: asyncio.Event) -> None:
    """A process descriptor becomes readable when its process ends, even by SIGKILL, and a pid used again does not fool it."""
    if not parent_pid:
        return
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        stopping.set()
        return
    if os.getppid() != parent_pid:  # it died before we looked, and its pid is another's
        stopping.set()

    def owner_ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        log_event("owner ended")
        stopping.set()

    loop.add_reader(descriptor, owner_ended)
