"""`gyred`: serve, or check a configuration."""

import argparse
import contextlib
import errno
import gc
import logging
import os
import stat
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# A line for each handshake that fails: a stranger could fill the log. gRPC reads this when it is
# imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import uvloop
from gyre_protos.text import printable

from gyre_daemon import __version__
from gyre_daemon.access.credentials import Credentials
from gyre_daemon.access.policy import Policy, check_patterns, unmatched
from gyre_daemon.config import DaemonConfig, DatasetConfig
from gyre_daemon.config.load import EffectiveConfig, load, rendered
from gyre_daemon.config.schema import check_memory_budget, memory_limit_bytes
from gyre_daemon.datasets.known_formats import check_keys_of_any, make_format
from gyre_daemon.errors import ConfigError, GyreError, StorageUnavailable
from gyre_daemon.runtime.events import log_event, start_log
from gyre_daemon.runtime.limits import (
    DescriptorShares,
    raise_descriptor_limit,
)
from gyre_daemon.runtime.listen import (
    check_metrics,
    check_tls,
    parse_address,
    parse_http_address,
)
from gyre_daemon.server import PrivateFolder, check_folders, serve
from gyre_daemon.storage.beneath import NotRegular, file_error
from gyre_daemon.storage.location import ARCHIVES, parse_location, redact
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.transforms.recipes import to_steps
from gyre_daemon.workers.copy_workers import CopyWorkers

# New objects before a pass of the garbage collector, then passes before one of an older
# generation. With Python's default of 700, passes over the objects of thousands of requests in
# flight took 40 % of a request's CPU time; a higher value frees objects in cycles later.
_COLLECT_AFTER = (50_000, 20, 50)
# Keys of the configuration with a flag each, next to `listen`.
_FLAG_KEYS = (
    "memory_budget",
    "log_level",
    "log_format",
    "index_dir",
    "prefetch_batches",
    "num_io_threads",
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits 2 for a configuration that cannot be used."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = _parser(with_completion=arguments[:1] != ["serve"]).parse_args(arguments)
    try:
        sys.exit(parsed.run(parsed))
    except ConfigError as error:
        print(printable(f"gyred: {error}"), file=sys.stderr)
        sys.exit(2)


def _parser(*, with_completion: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyred", description="One loader daemon per node for all its training jobs."
    )
    parser.add_argument("--version", action="version", version=f"gyred {__version__}")
    if with_completion:
        import shtab  # noqa: PLC0415  # its imports are a twentieth of a start

        shtab.add_argument_to(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        summary = f"{about[0].upper()}{about[1:]}."
        return commands.add_parser(name, help=about, description=summary)

    command = add("serve", "serve the datasets of a configuration")
    command.set_defaults(run=_serve)
    _add_config_flags(command)
    text = "a private daemon: serve ad-hoc datasets in this folder only, which each client keeps "
    text += "locked (shared); it goes into the background, and ends with the last lock"
    command.add_argument("--socket-dir", type=Path, metavar="DIR", help=text)

    text = (
        "print the effective configuration and where each value comes from; exit 2 if it is wrong"
    )
    command = add("check-config", text)
    command.set_defaults(run=_check_config, socket_dir=None)
    _add_config_flags(command)
    return parser


def _add_config_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    text = "unix:PATH, tcp:HOST:PORT or tls:HOST:PORT; repeat the flag for several"
    command.add_argument("--listen", action="append", metavar="ADDRESS", help=text)
    for key in _FLAG_KEYS:
        flag, metavar = f"--{key.replace('_', '-')}", key.rpartition("_")[2].upper()
        command.add_argument(flag, metavar=metavar, help=f"overrides `{key}` of the file")


def _load(parsed: argparse.Namespace) -> EffectiveConfig:
    """The configuration, with every mistake found that can be found before anything is bound."""
    flags: dict[str, Any] = {key: getattr(parsed, key) for key in (*_FLAG_KEYS, "listen")}
    if parsed.socket_dir:
        flags |= {"listen": [f"unix:{parsed.socket_dir}/gyre.sock"]}
        flags |= {"metrics_listen": "", "health_listen": ""}
        flags["admin"] = []  # the owner, whatever the environment says
    effective = load(parsed.config, os.environ, flags)
    config = effective.config
    addresses = [parse_address(address) for address in config.listen]
    check_tls(
        addresses,
        has_certificate=bool(config.tls_certificate),
        has_credentials=bool(config.tls_client_ca or config.tokens),
    )
    metrics = parse_http_address("metrics_listen", config.metrics_listen)
    check_metrics(metrics, is_public=config.metrics_public)
    parse_http_address("health_listen", config.health_listen)
    Policy(config)
    check_patterns(config)
    is_private = parsed.socket_dir is not None
    for name, dataset in config.datasets.items():
        _check_dataset(name, dataset, config, is_private=is_private)
    warnings = [*effective.warnings, *unmatched(config)]
    if not config.datasets and not is_private:
        warnings.append(_nothing_served(parsed.config))
    return replace(effective, warnings=warnings)


def _check_dataset(
    name: str, dataset: DatasetConfig, config: DaemonConfig, *, is_private: bool
) -> None:
    """Refuse a definition that this daemon cannot serve, but for options of its transforms."""
    try:
        to_steps(
            dataset.transforms,
            config.installed_transforms,
            allow_modules=is_private,
            allow_files=True,  # the operator names them
        )
    except GyreError as error:
        raise ConfigError(f"datasets.{name}: {error}") from error
    if dataset.mixture:  # it has no shards
        return
    if dataset.format:
        make_format(name, dataset)
    else:
        check_keys_of_any(name, dataset)
    try:
        location = parse_location(dataset.uri)
    except ValueError as error:
        raise ConfigError(f"datasets.{name}.uri: {error}") from error
    if location.scheme in ARCHIVES and not (config.archives or is_private):
        raise ConfigError(
            f"datasets.{name}.uri: {location.text} is in an archive. Unpack it, or set "
            "archives = true"
        )


def _nothing_served(path: Path | None) -> str:
    """Advice for a configuration without datasets."""
    text = "no dataset is configured, so no job can read anything: add a table such as "
    table = '[datasets.mine] with uri = "/data/shards"'
    if path:
        return f"{text}{table} to {path}, and let the daemon read it again (SIGHUP)"
    return f"{text}{table} to a file, and name the file with --config"


def _serve(parsed: argparse.Namespace) -> int:
    private = _in_background(parsed.socket_dir) if parsed.socket_dir else None
    effective = _load(parsed)
    config = effective.config
    if not private:  # the user of a private daemon chose no budget
        check_memory_budget(config.memory_budget, memory_limit_bytes())
    index_dir = _index_dir(config, parsed.socket_dir)
    start_log(config.log_level, config.log_format)
    _log_warnings(effective)
    reread = partial(_reread, parsed) if parsed.config else None
    gc.freeze()  # objects of now live as long as the daemon: no pass looks at them
    gc.set_threshold(*_COLLECT_AFTER)
    _log_descriptor_shortage(DescriptorShares.of(raise_descriptor_limit()), config)
    # More workers than cores or than threads that wait for them would be idle.
    num_workers = min(config.num_copy_workers, config.num_io_threads, len(os.sched_getaffinity(0)))
    with CopyWorkers(num_workers) as copy_workers:
        uvloop.run(serve(config, index_dir, private, reread, copy_workers))
    return 0


def _in_background(socket_dir: Path) -> PrivateFolder:
    """Go on in a process that is no child of the client, so that it outlives the client.

    The process that the client started ends with status 0 once the daemon serves, and otherwise
    as the daemon does.

    Raises:
        ConfigError: the folder cannot be opened.
    """
    try:
        folder = os.open(socket_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"--socket-dir {socket_dir}: {error.strerror}") from error
    reader, writer = os.pipe()
    daemon = os.fork()
    if daemon:
        os.close(writer)
        if os.read(reader, 1):
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(daemon, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    os.close(reader)

    def tell() -> None:
        with contextlib.suppress(BrokenPipeError):  # the client gave up meanwhile
            os.write(writer, b"1")
        os.close(writer)

    return PrivateFolder(socket_dir, folder, tell)


def _reread(parsed: argparse.Namespace) -> DaemonConfig:
    effective = _load(parsed)
    _log_warnings(effective)
    return effective.config


def _log_warnings(effective: EffectiveConfig) -> None:
    for text in effective.warnings:
        log_event("configuration warning", {"reason": text}, logging.WARNING)


def _log_descriptor_shortage(shares: DescriptorShares, config: DaemonConfig) -> None:
    """Warn where the process may not open as many descriptors as the configuration needs."""
    if shares.connections < config.max_requests:
        facts = {
            "descriptors": shares.limit,
            "max_requests": shares.connections,
            "configured": config.max_requests,
            "max_open_shards": shares.shards,
            "to_do": "raise LimitNOFILE= of the unit, or ulimit -n",
        }
        log_event("limited by descriptors", facts, logging.WARNING)


def _check_config(parsed: argparse.Namespace) -> int:
    effective = _load(parsed)
    check_memory_budget(effective.config.memory_budget, memory_limit_bytes())
    Credentials.of(effective.config)
    uvloop.run(check_folders(effective.config))
    _index_dir(effective.config)
    print(rendered(effective, redact))
    for text in effective.warnings:
        print(f"gyred: warning: {text}", file=sys.stderr)
    for name, error in uvloop.run(_missing_datasets(effective.config)).items():
        text = f"gyred: warning: dataset `{name}` cannot be served now: {error}"
        print(printable(text), file=sys.stderr)
    return 0


async def _missing_datasets(config: DaemonConfig) -> dict[str, GyreError]:
    """Why local datasets cannot be served, by name; lists and opens nothing.

    A file or folder is missing, may not be read, or is on a mount that hangs.
    """
    missing: dict[str, GyreError] = {}
    for name, dataset in sorted(config.datasets.items()):
        if dataset.mixture:  # its sources are looked for by themselves
            continue
        location = parse_location(dataset.uri)
        if location.scheme != "file":
            continue
        try:
            for path in location.paths:
                await MOUNTS.answered(path, _look_for, path)
        except TimeoutError as error:
            missing[name] = StorageUnavailable(f"{error.strerror}. Restore its server.")
        except GyreError as error:
            missing[name] = error
    return missing


def _look_for(path: str) -> None:
    """Raise the error of a missing or unreadable path; patterns are not tried."""
    try:
        mode = Path(path).stat().st_mode  # opening a device may do something
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise NotRegular
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileNotFoundError as error:
        if not any(letter in path for letter in "*?["):
            raise file_error(path, error) from error
    except OSError as error:
        raise file_error(path, error) from error


def _index_dir(config: DaemonConfig, socket_dir: Path | None = None) -> Path:
    """Where indexes go that can be stored nowhere else.

    Without a home, a private daemon keeps them in its own folder, as long as it runs.

    Raises:
        ConfigError: there is no such place.
    """
    if cache_home := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache_home) / "gyre" / "index"
    try:
        return Path.home() / ".cache" / "gyre" / "index"
    except RuntimeError as error:  # HOME is not set, and the user is in no table of users
        if config.index_dir or socket_dir:
            return Path(config.index_dir or socket_dir or "") / "index"
        raise ConfigError(
            "there is no place for indexes: HOME and XDG_CACHE_HOME are not set, and the "
            "daemon's user has no home folder. Set `index_dir`, or XDG_CACHE_HOME."
        ) from error
