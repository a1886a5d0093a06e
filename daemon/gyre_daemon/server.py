"""One daemon process from start to end: claims its addresses, serves, reloads, drains, cleans up.

A clean-up of a folder may remove the sockets of a daemon that still runs.

On SIGHUP, a `Reloader` takes over datasets, operators, job weights and limits of the configuration.
The sessions of a user who may no longer read their dataset end. A file without any dataset is
refused where some are served: it may be half-written. A configuration of thousands of datasets
takes seconds to read, check and compare, and the names of users may come from a server that does
not answer. So all that happens in a thread.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from msgspec import Struct

from gyre_daemon.access.credentials import Credentials
from gyre_daemon.access.policy import Limits, Policy
from gyre_daemon.config import SCALAR_KEYS, DaemonConfig
from gyre_daemon.config.schema import memory_limit_bytes
from gyre_daemon.datasets.checks import CorruptReports
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.errors import ConfigError, InvalidInput, NotAllowed
from gyre_daemon.fetching.columns import Measurer
from gyre_daemon.fetching.transformed import keep_records
from gyre_daemon.memory.arenas import ArenaRegistry, Budget
from gyre_daemon.memory.sidechannel import MayConnect, SideChannel
from gyre_daemon.monitoring.http_ports import (
    HttpPort,
    Probes,
    metrics_application,
    new_registry,
)
from gyre_daemon.monitoring.metrics import OTHERS, Census, LoopLag, Metrics, MountGauges
from gyre_daemon.runtime.events import log_event, notify, ping_watchdog
from gyre_daemon.runtime.limits import Connections, descriptor_shares, own_bytes, own_limit_bytes
from gyre_daemon.runtime.listen import (
    NotOurs,
    SocketClaim,
    TcpAddress,
    UnixAddress,
    check_folder,
    parse_address,
    parse_http_address,
)
from gyre_daemon.runtime.threads import DaemonThreads, FairExecutor, in_thread
from gyre_daemon.service.guard import (
    SERVER_OPTIONS,
    Callers,
    Guard,
    server_credentials,
)
from gyre_daemon.service.methods import SERVICE_NAME, LoaderService, register
from gyre_daemon.sessions.session_request import Reservations
from gyre_daemon.sessions.shared_stream import DaemonResources
from gyre_daemon.sessions.table import SessionTable, take_census
from gyre_daemon.storage.cache.blocks import DiskCache, open_disk_cache
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.transforms.declared import Transforms, TransformWorkers
from gyre_daemon.workers.compute_workers import ComputeServer
from gyre_daemon.workers.copy_workers import CopyWorkers
from gyre_daemon.workers.supervisor import start_spawner

# How often sockets, files of credentials, connections and clients are looked at, some microseconds
# each: nobody can connect for this long at most, so long does a token last that was taken away, and
# so long has an attacker to open more connections than it may have.
_LOOK_EVERY_S = 1.0

Listen = Callable[[Sequence[UnixAddress]], Awaitable[object]]


class UnixListener(SocketClaim):
    """The claim to one Unix address, where a gRPC server binds, and the side channel beside it."""

    def __init__(self, address: UnixAddress, may_connect: MayConnect) -> None:
        """Claim the address and bind its side channel.

        Raises:
            ConfigError: another daemon has the address, or it cannot be used.
        """
        super().__init__(address)
        try:
            self.side_channel = SideChannel(address.path, may_connect)
        except ConfigError:
            self.give_up()
            raise

    @property
    def serves(self) -> bool:
        """Whether clients that connect find both sockets of this daemon."""
        return self.is_reachable and self.side_channel.is_reachable

    async def restore(self, listen: Listen) -> str:
        """Make missing files and sockets again; returns why clients cannot connect, or nothing."""
        did_serve = self.serves
        try:
            self.claim()
            if not self.is_reachable:
                await listen([self.address])
                self.open_to_group()
            if not self.side_channel.is_reachable:
                self.side_channel.bind_again()
        except (ConfigError, OSError) as error:
            return "" if did_serve else str(error)
        if not did_serve:
            log_event("socket made again", {"path": str(self.address.path)}, logging.WARNING)
        return ""

    def close(self) -> None:
        """Disconnect the clients of the side channel; remove the sockets and the lock file."""
        self.side_channel.close()
        self.give_up()


async def watch_listeners(
    listeners: Sequence[UnixListener],
    listen: Listen,
    set_serving: Callable[[bool], Awaitable[None]],
) -> None:
    """Check bound listeners every second, without end, and restore missing ones.

    `listen` starts a gRPC server at addresses whose paths are free. `set_serving` is told False
    when a listener cannot be restored, and True when all are back.
    """
    problem = ""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        before = problem
        problem = "; ".join([text for each in listeners if (text := await each.restore(listen))])
        if problem and problem != before:
            log_event("socket lost", {"reason": problem}, logging.ERROR)
        if bool(problem) != bool(before):
            await set_serving(not problem)


async def watch_credentials(credentials: Credentials) -> None:
    """Have certificates and tokens read again when their files change, without end."""
    threads = DaemonThreads(1, "gyre-credentials")
    while credentials.have_files:
        await asyncio.sleep(_LOOK_EVERY_S)
        await threads.run(credentials.refresh)


# After the drain, how long calls may take to end. Clients have been told to leave, so calls that
# are open then are stuck; a longer grace only delays the exit.
_LAST_GRACE_S = 1.0


class DatasetParts:
    """The parts of a daemon that open datasets; they own the cache, too."""

    def __init__(
        self,
        config: DaemonConfig,
        fallback_index_dir: Path,
        workers: FairExecutor,
        metrics: Metrics,
        cache: NodeCache | None,
        copy_workers: CopyWorkers,
        *,
        is_private: bool,
    ) -> None:
        """Make them; a private daemon lets clients define datasets and transforms."""
        terms = EndpointOptions(
            config.max_requests,
            config.read_deadline_s,
            config.hedge,
            config.hub_requests_per_s,
            config.mount_threads,
        )
        self._cache = cache
        self._opener = StorageOpener(workers, terms, metrics, copy_workers)
        self._compute_server = ComputeServer()
        sidecars = SidecarStore(config.index_dir, fallback_index_dir)
        own_folder = Path(config.index_dir) if config.index_dir else fallback_index_dir.parent
        unpack_dir = Path(config.unpack_dir or own_folder / "unpacked")
        reports = CorruptReports(Path(config.report_dir or own_folder / "reports"))
        self.catalog = Catalog(
            config.datasets,
            self._opener,
            sidecars,
            cache,
            allow_ad_hoc=is_private,
            compute_server=self._compute_server,
            unpacked=UnpackedShards(unpack_dir, config.unpack_disk),
            reports=reports,
        )
        num_workers = config.num_transform_workers or len(os.sched_getaffinity(0))
        self.transforms = Transforms(
            TransformWorkers(
                self._compute_server, num_workers, config.transform_deadline_s, metrics.transforms
            ),
            config.installed_transforms,
            partial(keep_records, cache, workers) if cache else None,
            allow_modules=is_private,
        )
        self.measurer = Measurer(sidecars, workers, reports)

    async def close(self) -> None:
        """End their processes and requests, and close their files."""
        self.catalog.close()
        self.measurer.close()
        self.transforms.close()
        self._compute_server.close()
        self._opener.close()
        if self._cache:
            await self._cache.close()


class PrivateFolder(Struct, frozen=True):
    """The folder of a private daemon, which ends when no client has a lock on it.

    Each client holds a shared lock on the folder, and the kernel drops it however the client ends.
    `is_serving` is called once the daemon serves.
    """

    path: Path
    descriptor: int
    is_serving: Callable[[], None]

    async def watch_clients(self, stopping: asyncio.Event) -> None:
        """Set `stopping` when the last client has gone."""
        while True:
            if self._lock():
                log_event("last client gone")
                stopping.set()
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def remove(self) -> None:
        """Remove the folder, unless clients need it for the next daemon."""
        if self._lock():
            shutil.rmtree(self.path, ignore_errors=True)

    def _lock(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


async def serve(
    config: DaemonConfig,
    fallback_index_dir: Path,
    private: PrivateFolder | None,
    reread: Callable[[], DaemonConfig] | None,
    copy_workers: CopyWorkers,
) -> None:
    """Serve until SIGTERM, SIGINT or, if it is private, the end of its last client; then drain.

    Args:
        config: checked.
        fallback_index_dir: for indexes that can be stored nowhere else.
        private: of a daemon that serves what its clients define; None for that of a node.
        reread: on SIGHUP, reads and checks the configuration again; None where there is no file.
        copy_workers: started.

    Raises:
        ConfigError: an address cannot be used or is taken.
    """
    start_spawner()
    probes = Probes(LoopLag())
    with ExitStack() as cleanup:
        watching = asyncio.create_task(probes.loop_lag.watch())
        cleanup.callback(watching.cancel)
        ports = {}
        if probed := parse_http_address("health_listen", config.health_listen):
            port = HttpPort("health_listen", probes.answer)
            ports["health"] = port.start(probed)
            cleanup.callback(port.stop)
        await check_folders(config)
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        if private:
            cleanup.callback(private.remove)
        # a private daemon has one user, who takes nothing from anybody
        limits = Limits(None if private else config.limits)
        listeners = []
        addresses = [parse_address(text) for text in config.listen]
        for address in addresses:
            if isinstance(address, UnixAddress):
                listeners.append(UnixListener(address, limits.why_no_connection))
                cleanup.callback(listeners[-1].close)
        daemon = _Daemon(
            config,
            fallback_index_dir,
            await _open_disk_cache(config),
            listeners,
            copy_workers,
            stopping,
            limits,
            private,
            probes,
        )
        await daemon.run(addresses, reread, ports)


class _Daemon:
    """Owns the parts of a daemon; `run` puts them to work."""

    def __init__(
        self,
        config: DaemonConfig,
        fallback_index_dir: Path,
        disk: DiskCache | None,
        listeners: Sequence[UnixListener],
        copy_workers: CopyWorkers,
        stopping: asyncio.Event,
        limits: Limits,
        private: PrivateFolder | None,
        probes: Probes,
    ) -> None:
        metrics = Metrics()
        threads = DaemonThreads(config.num_io_threads, "gyre-io")
        workers = FairExecutor(threads, config.num_io_threads)
        self._config = config
        self._private = private
        self._listeners = listeners
        cache = _make_cache(config, workers, disk, metrics)
        self._parts = DatasetParts(
            config,
            fallback_index_dir,
            workers,
            metrics,
            cache,
            copy_workers,
            is_private=bool(private),
        )
        self._registry = ArenaRegistry(config.memory_budget, copy_workers)
        budget = Budget(config.memory_budget)
        resources = DaemonResources(
            budget,
            self._registry,
            workers,
            metrics,
            Reservations(budget, limits, config.session_memory),
            config.lease_s,
            limits=limits,
        )
        self._sessions = SessionTable(resources, config.job_weights)
        self._policy = Policy(config)
        self._probes = probes
        self._scrapes: HttpPort | None = None
        self._credentials = Credentials.of(config)
        channels = [each.side_channel for each in listeners]
        callers = Callers(channels, self._credentials.tokens, limits)
        self._connections = Connections()
        self._guard = Guard(callers, self._connections, metrics)
        self._service = LoaderService(
            self._parts.catalog,
            self._sessions,
            callers,
            self._policy,
            copy_workers,
            self._parts.transforms,
            self._parts.measurer,
            config,
            self._ask_to_stop,
        )
        self._health = HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._stopping = stopping

    async def run(
        self,
        addresses: Sequence[UnixAddress | TcpAddress],
        reread: Callable[[], DaemonConfig] | None,
        ports: Mapping[str, str],
    ) -> None:
        """Serve until `stopping` is set, then drain. Failures in the background end it too."""
        if address := parse_http_address("metrics_listen", self._config.metrics_listen):
            application = metrics_application(new_registry(self._census))
            self._scrapes = HttpPort("metrics_listen", application)
            ports = {"metrics": self._scrapes.start(address), **ports}
        facts = {
            "listen": await self._listen(addresses),
            "pid": os.getpid(),
            "datasets": sorted(self._config.datasets),
            **ports,
        }
        for listener in self._listeners:
            listener.open_to_group()
        await self._set_serving(True)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(
                watch_listeners(self._listeners, self._listen, self._set_serving)
            )
            background = [
                tasks.create_task(each)
                for each in (
                    self._sessions.watch_leases(),
                    ping_watchdog(),
                    watch_credentials(self._credentials),
                    self._watch_resources(),
                )
            ]
            if reread:
                reloader = Reloader(
                    self._config, reread, self._parts.catalog, self._sessions, self._policy
                )
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
                background.append(tasks.create_task(reloader.run()))
            if self._private:
                background.append(tasks.create_task(self._private.watch_clients(self._stopping)))
            log_event("ready", facts)
            notify("READY=1")
            if self._private:
                self._private.is_serving()
            await self._stopping.wait()
            notify("STOPPING=1")
            watch.cancel()
            await self._drain()
            for task in background:
                task.cancel()
        if self._scrapes:
            self._scrapes.stop()
        self._registry.files.close()
        await self._parts.close()
        log_event("stopped")

    async def _watch_resources(self) -> None:
        """Close files without a reader, and connections that take too much memory, without end.

        Mounts and the ends of credentials go into the metrics.
        """
        metrics = self._sessions.resources.metrics
        limit_bytes = own_limit_bytes(memory_limit_bytes())
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            MOUNTS.look()
            metrics.mounts = {
                (each.path, each.file_system): MountGauges(
                    each.hangs_since_s or 0.0, each.latency.median_s or 0.0
                )
                for each in MOUNTS
            }
            metrics.expires = self._credentials.expiries()
            self._parts.catalog.close_idle_files()
            cached = metrics.cache.memory_bytes
            readers = {session.request.owner.pid for session in self._sessions}
            with contextlib.suppress(OSError):  # no descriptor is free to look with
                self._connections.close_strangers()
                self._connections.close_for_memory(own_bytes() - cached, limit_bytes, readers)

    def _ask_to_stop(self) -> float:
        """Drain and end, and return the seconds that this takes at most."""
        self._stopping.set()
        return self._config.drain_timeout_s + _LAST_GRACE_S

    def _census(self) -> Census:
        """The metrics' values; names of jobs only by `metrics_names`."""
        names = self._config.metrics_names
        users = {job.user for job in self._sessions.resources.metrics.jobs}
        is_open = not self._policy.has_rules and len(users - {OTHERS.user}) <= 1
        with_names = names == "all" or (names == "auto" and is_open)
        return take_census(self._sessions, self._probes.loop_lag, with_names=with_names)

    async def _listen(self, addresses: Sequence[UnixAddress | TcpAddress]) -> list[str]:
        """Start a gRPC server at these addresses; return them with the ports that it got.

        A server that runs takes no further address, so a socket that is restored gets a new one.
        """
        # as many as the side channel takes, on each address
        max_connections = ("grpc.max_allowed_incoming_connections", descriptor_shares().clients)
        server = grpc.aio.server(
            interceptors=(self._guard,), options=[*SERVER_OPTIONS, max_connections]
        )
        register(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        bound = [self._bind(server, address) for address in addresses]
        await server.start()
        self._servers.append(server)
        return bound

    def _bind(self, server: grpc.aio.Server, address: UnixAddress | TcpAddress) -> str:
        certificates = self._credentials.certificates
        try:
            if isinstance(address, TcpAddress) and address.is_tls and certificates:
                target, credentials = address.grpc_target, server_credentials(certificates)
                port = server.add_secure_port(target, credentials)
            else:
                port = server.add_insecure_port(address.grpc_target)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address.grpc_target}: is another process using it?"
            ) from error
        if isinstance(address, UnixAddress):
            self._connections.listen_at(str(address.path))
            return f"unix:{address.path}"
        self._connections.listen_at(port)
        return f"{'tls' if address.is_tls else 'tcp'}:{address.host}:{port}"

    async def _drain(self) -> None:
        """Refuse new sessions, finish the batches in flight, and end all calls."""
        await self._set_serving(False)
        log_event(
            "draining",
            {"sessions": len(list(self._sessions)), "timeout_s": self._config.drain_timeout_s},
        )
        await self._sessions.drain(self._config.drain_timeout_s)
        await asyncio.gather(*(server.stop(_LAST_GRACE_S) for server in self._servers))

    async def _set_serving(self, is_serving: bool) -> None:
        why_not = "draining" if self._stopping.is_set() else "a socket is lost"
        self._probes.why_not_ready = "" if is_serving else why_not
        states = health_pb2.HealthCheckResponse
        for service in ("", SERVICE_NAME):
            await self._health.set(service, states.SERVING if is_serving else states.NOT_SERVING)


async def check_folders(config: DaemonConfig) -> None:
    """Refuse folders that others control; missing ones are made when they are needed.

    One on a mount that hangs is passed over.

    Raises:
        ConfigError: names the folder's key, and the fix.
    """
    named = {key: getattr(config, key) for key in ("cache_dir", "index_dir", "unpack_dir")}
    for key, text in named.items():
        try:
            if text:
                await MOUNTS.answered(text, check_folder, Path(text))
        except NotOurs as error:
            raise ConfigError(f"{key} cannot be used: {error.strerror}") from error
        except OSError:
            continue  # unusable folders are told when they are needed


async def _open_disk_cache(config: DaemonConfig) -> DiskCache | None:
    """See `open_disk_cache`; the daemon works without a folder whose mount hangs, too."""
    if not (config.cache_memory and config.cache_dir and config.cache_disk):
        return None
    folder = Path(config.cache_dir)
    try:
        return await MOUNTS.answered(folder, open_disk_cache, folder, config.cache_disk)
    except TimeoutError as error:
        facts = {"folder": folder, "reason": error.strerror}
        log_event("no disk cache", facts, logging.WARNING)
        return None


def _make_cache(
    config: DaemonConfig, workers: FairExecutor, disk: DiskCache | None, metrics: Metrics
) -> NodeCache | None:
    if not config.cache_memory:
        return None
    metrics.cache.is_disk_failing = bool(config.cache_dir and config.cache_disk and not disk)
    disk_workers = workers
    if disk:  # a disk that hangs holds up only its own files
        disk_workers = FairExecutor(MOUNTS.at(disk.folder).readers, config.num_io_threads)
    return NodeCache(config.cache_memory, disk, workers, metrics.cache, disk_workers=disk_workers)


# Sessions checked at once after a reload: some microseconds each.
_CHECKED_AT_ONCE = 200
# Next to the datasets, a reload takes over these; other keys count from a restart on.
_RULES = ("admin", "job_weights", "limits")


class _Reading(Struct, frozen=True):
    """A configuration that was read, its rules, and how it differs from the one in force."""

    config: DaemonConfig
    policy: Policy
    differences: dict[str, list[str]]


def _read(reread: Callable[[], DaemonConfig], running: DaemonConfig) -> _Reading:
    """Read the configuration and compare it with the one in force.

    Raises:
        ConfigError: it cannot be used.
    """
    wanted = reread()
    before, after = running.datasets, wanted.datasets
    if before and not after:
        raise ConfigError(
            "the file has no dataset at all, as if it was empty or half-written; "
            "to serve none, restart the daemon instead of reloading it"
        )
    others = [
        key
        for key in (*SCALAR_KEYS, "job_weights", "limits", "tokens")
        if getattr(running, key) != getattr(wanted, key)
    ]
    differences = {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(
            name for name in before.keys() & after.keys() if before[name] != after[name]
        ),
        "rules": [key for key in others if key in _RULES],
        "need_restart": [key for key in others if key not in _RULES],
    }
    return _Reading(wanted, Policy(wanted), differences)


class Reloader:
    """Reads the configuration again when it is asked to, and applies it."""

    def __init__(
        self,
        running: DaemonConfig,
        reread: Callable[[], DaemonConfig],
        catalog: Catalog,
        sessions: SessionTable,
        policy: Policy,
    ) -> None:
        """Keep what a reload changes; `reread` raises ConfigError where the file cannot be used."""
        self._running = running
        self._reread = reread
        self._catalog = catalog
        self._sessions = sessions
        self._policy = policy
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have the file read; once more if it is being read now."""
        self._asked.set()

    async def run(self) -> None:
        """Reload after each `ask`, without end."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self.reload()

    async def reload(self) -> None:
        """Read the file and apply it; log the result and tell the service manager."""
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        metrics = self._sessions.resources.metrics
        try:
            read = partial(_read, self._reread, self._running)
            await self._apply(await in_thread(read, "gyre-reload"))
        except InvalidInput as error:
            metrics.is_reload_good = False
            facts = {"reason": error, "kept": sorted(self._running.datasets)}
            log_event("reload refused", facts, logging.WARNING)
        else:
            metrics.is_reload_good = True
        metrics.reloaded_at = time.time()
        notify("READY=1")

    async def _apply(self, reading: _Reading) -> None:
        """Replace datasets, rules and weights; open sessions keep the dataset that they read."""
        wanted = reading.config
        log_event("reloaded", reading.differences)
        self._catalog.replace(wanted.datasets)
        self._sessions.reweigh(wanted.job_weights)
        self._policy.take_over(reading.policy)
        self._sessions.resources.limits.replace(wanted.limits)
        rules = {key: getattr(wanted, key) for key in _RULES}
        self._running = replace(self._running, datasets=wanted.datasets, **rules)
        await self._end_sessions_without_access()

    async def _end_sessions_without_access(self) -> None:
        for number, session in enumerate(list(self._sessions), 1):
            request = session.request
            try:
                self._policy.check_session(request.owner, request.dataset.name, request.reader.job)
            except NotAllowed as reason:
                self._sessions.close(session.session_id, reason)
            if number % _CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)
