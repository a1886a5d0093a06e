"""The configuration: a TOML file, overridden by `GYRE_*` variables, overridden by flags, checked whole before anything runs."""

import dataclasses
import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

from gyre_daemon.errors import ConfigError

Options = TypeVar("Options")
Origin = Literal["default", "file", "environment", "flag"]

ENVIRONMENT_PREFIX = "GYRE_"
MAX_PREFETCH_BATCHES = 1024
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]{0,3})", re.ASCII)
_BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL_UNITS = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNIT_BYTES = {"": 1, "B": 1} | _BINARY_UNITS | _DECIMAL_UNITS


class Size(int):
    """A number of bytes; in TOML an integer, or text such as "64MiB" (2^20 bytes each) or "64MB" (10^6 bytes each)."""


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One named dataset.

    Attributes:
        uri: a file, a folder, a glob or a brace list of shards; a path, or a URL of a scheme that fsspec knows.
        format: `tokens` or `webdataset`.
        options: the remaining keys of the table; the format reads them.
        storage: settings of the storage driver (endpoint, region, credentials); the driver reads them.
        cache: what is read from object storage is kept in the node's cache.
    """

    uri: str
    format: str
    options: Mapping[str, Any] = field(default_factory=dict)
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache: bool = True


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """How a daemon runs.

    Attributes:
        listen: addresses, `unix:PATH` or `tcp:HOST:PORT`.
        memory_budget: bytes that the batch buffers of all sessions may take together.
        session_memory: bytes that those of one session may take; more only where a single batch needs it.
        prefetch_batches: batches in flight or ready ahead of each trainer, unless it asks otherwise; 0 lets their size decide.
        lease_s: a client silent for longer loses its session.
        drain_timeout_s: how long SIGTERM lets batches in flight finish.
        num_io_threads: threads that read local files and decode.
        num_copiers: processes that copy local samples for them, no more than cores; with 0 the kernel copies.
        max_requests: requests in flight to one object storage, at most; how many it takes well is found out.
        read_deadline_s: after which a read from object storage fails, whatever is tried.
        hedge: late requests to object storage are sent a second time.
        index_dir: where indexes of shards are kept; beside local shards where absent and writable.
        cache_memory: bytes of object storage's blocks that are kept in memory, beside memory_budget; 0 for no cache at all.
        cache_dir: a folder for blocks that outlive the daemon; empty for none. One daemon at a time has it.
        cache_disk: bytes of blocks in that folder.
        unpack_dir: where compressed shards are unpacked; empty for a folder among the indexes.
        unpack_disk: bytes of unpacked shards there.
        log_level: debug, info, warning or error.
        log_format: text, json, or auto, which is text on a terminal and JSON elsewhere.
        metrics_listen: where Prometheus may ask for metrics, `tcp:HOST:PORT`; empty for nowhere.
        metrics_public: metrics_listen may be open to other hosts, who then learn the names of jobs and what they read.
        datasets: by name.
        job_weights: by pattern of jobs' names, a job's share of reading and decoding relative to others; 1 where none matches.
    """

    listen: tuple[str, ...] = ("unix:/run/gyre/gyre.sock",)
    memory_budget: Size = Size(1 << 30)
    session_memory: Size = Size(256 << 20)
    prefetch_batches: int = 0
    lease_s: float = 30.0
    drain_timeout_s: float = 10.0
    num_io_threads: int = 4
    num_copiers: int = 4
    max_requests: int = 1024
    read_deadline_s: float = 60.0
    hedge: bool = True
    index_dir: str = ""
    cache_memory: Size = Size(1 << 30)
    cache_dir: str = ""
    cache_disk: Size = Size(64 << 30)
    unpack_dir: str = ""
    unpack_disk: Size = Size(64 << 30)
    log_level: str = "info"
    log_format: str = "auto"
    metrics_listen: str = ""
    metrics_public: bool = False
    datasets: Mapping[str, DatasetConfig] = field(default_factory=dict)
    job_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse values that no daemon can run with."""
        for name in ("memory_budget", "session_memory", "lease_s", "num_io_threads", "max_requests", "read_deadline_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive and finite, but is {getattr(self, name)}")
        for name in ("drain_timeout_s", "num_copiers", "prefetch_batches", "cache_memory", "cache_disk", "unpack_disk"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must not be negative and must be finite, but is {getattr(self, name)}")
        if self.prefetch_batches > MAX_PREFETCH_BATCHES:
            raise ConfigError(f"prefetch_batches is {self.prefetch_batches}; a session can have at most {MAX_PREFETCH_BATCHES}")
        if self.cache_dir and not self.cache_memory:
            raise ConfigError(
                "cache_dir is set and cache_memory is 0: blocks reach the disk through memory; give it some, 64MiB say"
            )
        if not self.listen:
            raise ConfigError('listen is empty; name an address such as "unix:/run/gyre/gyre.sock"')
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f'log_level is "{self.log_level}"; it must be debug, info, warning or error')
        if self.log_format not in ("auto", "text", "json"):
            raise ConfigError(f'log_format is "{self.log_format}"; it must be auto, text or json')


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """A checked configuration and where each of its top-level values came from."""

    config: DaemonConfig
    origins: Mapping[str, Origin]


def load(path: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> EffectiveConfig:
    """Merge defaults, file, environment and flags, the later over the earlier.

    Args:
        path: a TOML file; None for none.
        environment: `GYRE_<KEY>` sets the scalar key of that name; lists are comma-separated.
        flags: values by key; None means not given.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    table = _read_toml(path) if path else {}
    datasets = {name: parse_dataset(name, entry) for name, entry in _table(table, "datasets", "[datasets.NAME]").items()}
    weights = {name: _weight(name, value) for name, value in _table(table, "job_weights", "[job_weights]").items()}
    origins: dict[str, Origin] = dict.fromkeys(_scalar_names(), "default")
    where = str(path) if path else "the configuration"
    layers: list[tuple[Origin, Mapping[str, Any], Callable[[str], str]]] = [
        ("file", table, lambda key: f"{key} in {where}"),
        ("environment", _from_environment(environment), lambda key: ENVIRONMENT_PREFIX + key.upper()),
        ("flag", flags, lambda key: "--" + key.replace("_", "-")),
    ]
    values: dict[str, Any] = {}
    for origin, layer, name_of in layers:
        given = {key: value for key, value in layer.items() if value is not None}
        values |= _converted(DaemonConfig, given, where, name_of)
        origins |= dict.fromkeys(given, origin)
    return EffectiveConfig(DaemonConfig(**values, datasets=datasets, job_weights=weights), origins)


def parse_dataset(name: str, table: object) -> DatasetConfig:
    """Check what every dataset has in common; its format checks the rest when it is opened.

    Raises:
        ConfigError: `uri` or `format` is absent or no text, or `storage` no table.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"datasets.{name} must be a table with `uri` and `format`")
    rest = dict(table)
    storage = rest.pop("storage", {})
    if not isinstance(storage, dict):
        raise ConfigError(f"datasets.{name}.storage must be a table")
    cache = _convert(rest.pop("cache", True), bool, f"datasets.{name}.cache")
    texts = []
    for key in ("uri", "format"):
        value = rest.pop(key, None)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"datasets.{name}.{key} is missing or no text")
        texts.append(value)
    return DatasetConfig(texts[0], texts[1], rest, storage, cache)


def parse_options(cls: type[Options], table: Mapping[str, Any], where: str) -> Options:
    """Make a frozen options dataclass of a TOML table.

    Args:
        cls: a dataclass whose fields are int, float, str, bool, Size or tuples of str.
        table: key to value as TOML or text gives them.
        where: what the table is, for the error.

    Raises:
        ConfigError: names the key, and the nearest known one where it is unknown.
    """
    values = _converted(cls, table, where, lambda key: f"{key} in {where}")
    missing = [name for name in _required(cls) if name not in values]
    if missing:
        raise ConfigError(f"`{missing[0]}` is missing in {where}")
    return cls(**values)


def _converted(cls: type[Any], table: Mapping[str, Any], where: str, name_of: Callable[[str], str]) -> dict[str, Any]:
    """The values of a table in the types of the dataclass's fields; `name_of` says where a key stands, for the error."""
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in table.items():
        if key not in hints:
            raise ConfigError(f"unknown key `{key}` in {where}{_nearest(key, list(hints))}")
        values[key] = _convert(value, hints[key], name_of(key))
    return values


def _required(cls: type[Any]) -> list[str]:
    nothing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is nothing and f.default_factory is nothing]


def parse_size(text: str | int, where: str) -> Size:
    """Bytes from an integer or text such as "1.5GiB" or "1GB"; a fraction of a byte is cut off.

    Raises:
        ConfigError: it is neither, or its unit is unknown; names `where`.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if not match or match[2] not in _UNIT_BYTES:
        raise ConfigError(
            f'{where} must be a number of bytes such as 1073741824, "512MiB" (binary) or "1GB" (decimal), but is {text!r:.200}'
        )
    return Size(Fraction(match[1]) * _UNIT_BYTES[match[2]])


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _table(table: dict[str, Any], key: str, example: str) -> dict[str, Any]:
    part = table.pop(key, {})
    if not isinstance(part, dict):
        raise ConfigError(f"{key} must be a table, written {example}")
    return part


def _weight(pattern: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"job_weights.{pattern} must be a number above 0, but is {value!r:.200}")
    return float(value)


def _scalar_names() -> list[str]:
    return [f.name for f in dataclasses.fields(DaemonConfig) if f.name not in ("datasets", "job_weights")]


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = {ENVIRONMENT_PREFIX + name.upper(): name for name in _scalar_names()}
    return {names[key]: value for key, value in environment.items() if key in names}


def _nearest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(sorted(known))}"


def _convert(value: Any, hint: Any, where: str) -> Any:
    """A value of the hinted type; text is parsed, since environment and ad-hoc options are text."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if hint is Size:
        return parse_size(value, where)
    if typing.get_origin(hint) is tuple:
        return _convert_list(value, where)
    if hint in (int, float) and isinstance(value, str):
        value = _parse_number(value, hint, where)
    if hint is bool and value in ("true", "false"):
        value = value == "true"
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where} must be of type {hint.__name__}, but is {value!r:.200}")
    return value


def _convert_list(value: Any, where: str) -> tuple[str, ...]:
    items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{where} must be a list of texts, but is {value!r:.200}")
    return tuple(items)


def _parse_number(text: str, kind: type[int] | type[float], where: str) -> int | float:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{where} must be of type {kind.__name__}, but is {text!r:.200}") from error
