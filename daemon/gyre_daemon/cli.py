"""`gyred`: serve, check a configuration, ask for a daemon's health."""

import argparse
import gc
import json
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import shtab
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gyre_daemon import __version__
from gyre_daemon.checks import missing_datasets, open_datasets
from gyre_daemon.config import DaemonConfig, EffectiveConfig, load
from gyre_daemon.copiers import Copiers
from gyre_daemon.datasets.formats import make_format
from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import log_event, start_log
from gyre_daemon.runtime.limits import DescriptorShares, check_memory_budget, memory_limit_bytes, raise_descriptor_limit
from gyre_daemon.runtime.listen import parse_address, parse_metrics_address
from gyre_daemon.server import Privacy, serve
from gyre_daemon.storage.location import parse_location

_COLLECT_AFTER = (50_000, 20, 50)  # objects that may be in cycles; then generations
_FLAG_KEYS = ("memory_budget", "log_level", "log_format", "index_dir", "prefetch_batches", "num_io_threads")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits 2 for a configuration that cannot be used."""
    parsed = _parser().parse_args(arguments)
    try:
        sys.exit(parsed.run(parsed))
    except ConfigError as error:
        print(f"gyred: {error}", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gyred", description="One loader daemon per node for all its training jobs.")
    parser.add_argument("--version", action="version", version=f"gyred {__version__}")
    shtab.add_argument_to(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serving = commands.add_parser("serve", help="serve the datasets of a configuration")
    _add_config_flags(serving)
    serving.add_argument(
        "--embedded", action="store_true", help="a private daemon: serve ad-hoc datasets, on --socket-dir only"
    )
    serving.add_argument("--socket-dir", type=Path, metavar="DIR", help="with --embedded: a private folder; removed at the end")
    serving.add_argument("--parent-pid", type=int, default=0, metavar="PID", help="with --embedded: end when this process ends")
    serving.set_defaults(run=_serve)

    checking = commands.add_parser("check-config", help="print the effective configuration and where each value comes from")
    _add_config_flags(checking)
    checking.add_argument(
        "--open", action="store_true", help="open every dataset as the daemon would; exit 1 if one of them cannot be"
    )
    checking.set_defaults(run=_check_config)

    asking = commands.add_parser("health", help="exit 0 if the daemon at an address serves, 1 if not")
    asking.add_argument("--address", required=True, metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT")
    asking.set_defaults(run=_health)
    return parser


def _add_config_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    parser.add_argument(
        "--listen", action="append", metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT; several times for several"
    )
    for key in _FLAG_KEYS:
        parser.add_argument(
            f"--{key.replace('_', '-')}", metavar=key.rpartition("_")[2].upper(), help=f"overrides `{key}` of the file"
        )


def _load(parsed: argparse.Namespace) -> EffectiveConfig:
    flags: dict[str, Any] = {key: getattr(parsed, key) for key in (*_FLAG_KEYS, "listen")}
    if getattr(parsed, "socket_dir", None):
        flags |= {"listen": [f"unix:{parsed.socket_dir}/gyre.sock"], "metrics_listen": ""}
    return load(parsed.config, os.environ, flags)


def _serve(parsed: argparse.Namespace) -> int:
    if parsed.embedded != (parsed.socket_dir is not None):
        raise ConfigError("--embedded and --socket-dir go together")
    config = _load(parsed).config
    _check(config)
    if not parsed.embedded:  # whoever has a private daemon chose no budget
        check_memory_budget(config.memory_budget, memory_limit_bytes())
    privacy = Privacy(parsed.parent_pid, parsed.socket_dir) if parsed.embedded else None
    start_log(config.log_level, config.log_format)
    reread = (lambda: _reread(parsed)) if parsed.config else None
    _collect_rarely()
    _tell_of_descriptors(DescriptorShares.of(raise_descriptor_limit()), config)
    with Copiers(_num_copiers(config)) as copiers:
        uvloop.run(serve(config, _index_home(), privacy, reread, copiers))
    return 0


def _tell_of_descriptors(shares: DescriptorShares, config: DaemonConfig) -> None:
    """Where they bound what the configuration allows, the log says so."""
    if shares.connections < config.max_requests:
        facts = {
            "descriptors": shares.limit,
            "max_requests": shares.connections,
            "configured": config.max_requests,
            "max_open_shards": shares.shards,
            "to_do": "raise LimitNOFILE= of the unit, or ulimit -n",
        }
        log_event("limited by descriptors", facts, logging.WARNING)


def _num_copiers(config: DaemonConfig) -> int:
    """More would have nobody to work for, or nowhere to."""
    return min(config.num_copiers, config.num_io_threads, len(os.sched_getaffinity(0)))


def _collect_rarely() -> None:
    """Have the collector of cycles look less often, and never at what is there for good.

    Thousands of requests in flight are as many objects that it would go through again and again and that are in no cycle: that
    took 40 % of the processor time of a request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def _reread(parsed: argparse.Namespace) -> DaemonConfig:
    config = _load(parsed).config
    _check(config)
    return config


def _check_config(parsed: argparse.Namespace) -> int:
    effective = _load(parsed)
    _check(effective.config)
    check_memory_budget(effective.config.memory_budget, memory_limit_bytes())
    _print_config(effective)
    if parsed.open:
        return _open_datasets(effective.config)
    for name, error in missing_datasets(effective.config):
        print(f"gyred: warning: dataset `{name}` cannot be served now: {error}", file=sys.stderr)
    return 0


def _print_config(effective: EffectiveConfig) -> None:
    for field in fields(DaemonConfig):
        if field.name in effective.origins:
            value = getattr(effective.config, field.name)
            print(f"{field.name} = {json.dumps(value)}  # {effective.origins[field.name]}")
    if effective.config.job_weights:
        print("\n[job_weights]")
        for pattern, weight in effective.config.job_weights.items():
            print(f"{json.dumps(pattern)} = {weight:g}")
    for name, dataset in sorted(effective.config.datasets.items()):
        print(
            f"\n[datasets.{name}]\nuri = {json.dumps(parse_location(dataset.uri).text)}\nformat = {json.dumps(dataset.format)}"
        )
        for key, value in dataset.options.items():
            print(f"{key} = {json.dumps(value)}")
        if dataset.storage:
            print(f"# storage settings: {', '.join(sorted(dataset.storage))}")


def _open_datasets(config: DaemonConfig) -> int:
    start_log("warning", config.log_format)
    raise_descriptor_limit()
    findings = uvloop.run(open_datasets(config, _index_home()))
    print()
    for found in findings:
        if found.is_open:
            print(f"# dataset `{found.name}` opens: {found.text}")
        else:
            print(f"gyred: dataset `{found.name}` cannot be opened: {found.text}", file=sys.stderr)
    return 0 if all(found.is_open for found in findings) else 1


def _health(parsed: argparse.Namespace) -> int:
    target = parse_address(parsed.address).grpc_target
    with grpc.insecure_channel(target) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        except grpc.RpcError as error:
            print(f"gyred: no daemon answers at {parsed.address}: {error.code().name}", file=sys.stderr)
            return 1
    serving = response.status == health_pb2.HealthCheckResponse.SERVING
    print("serving" if serving else "not serving")
    return 0 if serving else 1


def _check(config: DaemonConfig) -> None:
    """Find every mistake before anything is bound."""
    for address in config.listen:
        parse_address(address)
    if config.metrics_listen:
        parse_metrics_address(config.metrics_listen, is_public=config.metrics_public)
    for name, dataset in config.datasets.items():
        make_format(name, dataset)
        try:
            parse_location(dataset.uri)
        except ValueError as error:
            raise ConfigError(f"datasets.{name}.uri: {error}") from error


def _index_home() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "gyre" / "index"
