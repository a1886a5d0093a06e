"""The daemon's configuration: a TOML file, overridden by `GYRE_*` variables, then by flags.

All of it is checked before anything starts. Types and ranges stand in the annotations of the
dataclasses and msgspec checks them; docs/adr/0031 says how and why.
"""

import difflib
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gyre_daemon.config_file import misspelt_variables, read_toml, shown
from gyre_daemon.errors import ConfigError

Options = TypeVar("Options")
Origin = Literal["default", "file", "environment", "flag"]

ENVIRONMENT_PREFIX = "GYRE_"
MAX_PREFETCH_BATCHES = 1024
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]{0,3})", re.ASCII)
_BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL_UNITS = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNIT_BYTES = {"": 1, "B": 1} | _BINARY_UNITS | _DECIMAL_UNITS
_MAX_NUMBER = 1e9  # refuses infinity; as seconds it is 30 years
_MAX_SIZE = 1 << 60  # an EiB; anything larger is a slip of the unit
# Upper bounds refuse slips: a thread takes a stack and each request a connection.
_MAX_THREADS, _MAX_REQUESTS = 1024, 1 << 20
_Positive = Annotated[float, Meta(gt=0, le=_MAX_NUMBER)]
_AtLeast1 = Annotated[int, Meta(ge=1)]
_Fraction = Annotated[float, Meta(gt=0, le=1)]
_Text = Annotated[str, Meta(min_length=1)]


class Size(int):
    """A number of bytes.

    In TOML an integer, or text such as "64MiB" (2^20 bytes each) or "64MB" (10^6 bytes each).
    """


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One named dataset.

    Attributes:
        uri: a file, a folder, a glob or a brace list of shards; a path, or a URL with a scheme that
            fsspec knows.
        format: one of those that docs/formats.md lists; empty to decide by the names of the files.
        options: the remaining keys of the table, which the format reads.
        storage: settings of the storage driver, which reads them: endpoint, region, credentials.
        cache: whether blocks read from object storage are kept in the node's cache.
        allow: who may read it, as `access.rules` says; empty for the daemon's user and group.
        follow_links: whether links among local files may lead out of the dataset's folder.
    """

    uri: _Text
    format: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache: bool = True
    allow: tuple[str, ...] = ()
    follow_links: bool = False


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What one job may take.

    Attributes:
        memory: of the memory budget, as a fraction.
        sessions: that are open at once.
        requests_per_s: sessions that are opened, in the long run.
    """

    memory: _Fraction = 1.0
    sessions: _AtLeast1 = 1024
    requests_per_s: _Positive = 100.0


@dataclass(frozen=True, slots=True)
class UserLimits:
    """What one user may take, with all jobs.

    Attributes:
        memory: of the memory that other users do not have, as a fraction. The rest is left for a
            user who comes later.
        sessions: that are open at once.
        connections: to the side channel at once.
        requests_per_s: calls in the long run.
    """

    memory: _Fraction = 0.875
    sessions: _AtLeast1 = 2048
    connections: _AtLeast1 = 2048
    requests_per_s: _Positive = 500.0


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """The table `limits`.

    Attributes:
        user: of each user.
        job: of each job.
        users: of users whose name matches a pattern, such as "uid:1004" or "token:*"; the first
            that matches counts, with the values of `user` where it says nothing.
    """

    user: UserLimits = UserLimits()
    job: JobLimits = JobLimits()
    users: Mapping[str, UserLimits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """How a daemon runs.

    Attributes:
        listen: addresses, `unix:PATH`, `tcp:HOST:PORT` or `tls:HOST:PORT`.
        memory_budget: bytes that the batch buffers of all sessions may take together.
        session_memory: bytes that the batch buffers of one session may take; a session gets more
            only where a single batch needs it.
        prefetch_batches: batches in flight or ready ahead of each trainer that does not ask for a
            number; 0 derives the number from the size of the batches.
        lease_s: a session ends when its client has been silent for longer than this.
        drain_timeout_s: after SIGTERM, how long batches in flight may take to finish.
        num_io_threads: threads that read local files and decode.
        num_copy_workers: processes that copy local samples into arenas, at most one per core; with
            0 the kernel copies.
        max_requests: the most requests in flight to one object storage; the daemon finds out how
            many of these the storage handles well.
        read_deadline_s: a read from object storage fails after this time, retries included.
        hedge: whether a late request to object storage is sent a second time.
        index_dir: where the indexes of shards are kept; empty for beside local shards where that
            folder is writable.
        cache_memory: bytes of object storage's blocks kept in memory, on top of memory_budget; 0
            for no cache.
        cache_dir: a folder for blocks that outlive the daemon; empty for none. Only one daemon at a
            time can use it.
        cache_disk: bytes of blocks in that folder.
        unpack_dir: where compressed shards are unpacked; empty for a folder among the indexes.
        unpack_disk: bytes of unpacked shards in that folder.
        log_level: debug, info, warning or error.
        log_format: text, json, or auto: text on a terminal and JSON elsewhere.
        metrics_listen: where Prometheus scrapes metrics, `tcp:HOST:PORT`; empty for nowhere.
        metrics_names: whether metrics tell jobs apart by name: `all`, `none`, or `auto`, which is
            `all` until a dataset has an `allow` or jobs of a second user have run.
        metrics_public: whether metrics_listen may be open to other hosts, which then learn the
            names of jobs and what they read.
        admin: operators, who may read and see everything, as `access.rules` says; empty for the
            daemon's user and root.
        audit_log: a file for the lines of the log that say who read what; empty for none.
        tls_certificate: a file with the certificate of `tls:` addresses, and those that lead to its
            root; empty for none.
        tls_key: the file of its private key.
        tls_client_ca: a file with the roots of clients' certificates; where it is given, clients on
            `tls:` addresses need one.
        tokens: files with tokens of callers over TCP, by the name that a token stands for.
        datasets: by name.
        job_weights: a job's share of reading and decoding, 1 where no pattern matches. A pattern of
            the job's name weighs it among the jobs of its user; a pattern `USER/JOB` weighs it
            against other users too.
        limits: what one user and one job may take.
    """

    listen: tuple[str, ...] = ("unix:/run/gyre/gyre.sock",)
    memory_budget: Size = Size(1 << 30)
    session_memory: Size = Size(256 << 20)
    prefetch_batches: Annotated[int, Meta(ge=0, le=MAX_PREFETCH_BATCHES)] = 0
    lease_s: _Positive = 30.0
    drain_timeout_s: Annotated[float, Meta(ge=0, le=_MAX_NUMBER)] = 10.0
    num_io_threads: Annotated[int, Meta(ge=1, le=_MAX_THREADS)] = 4
    num_copy_workers: Annotated[int, Meta(ge=0, le=_MAX_THREADS)] = 4
    max_requests: Annotated[int, Meta(ge=1, le=_MAX_REQUESTS)] = 1024
    read_deadline_s: _Positive = 60.0
    hedge: bool = True
    index_dir: str = ""
    cache_memory: Size = Size(1 << 30)
    cache_dir: str = ""
    cache_disk: Size = Size(64 << 30)
    unpack_dir: str = ""
    unpack_disk: Size = Size(64 << 30)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "text", "json"] = "auto"
    metrics_listen: str = ""
    metrics_names: Literal["auto", "all", "none"] = "auto"
    metrics_public: bool = False
    admin: tuple[str, ...] = ()
    audit_log: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, DatasetConfig] = field(default_factory=dict)
    job_weights: Mapping[str, float] = field(default_factory=dict)
    limits: LimitsConfig = LimitsConfig()

    def __post_init__(self) -> None:
        """Refuse values that are fine one by one and that no daemon can run with."""
        for name in ("memory_budget", "session_memory"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is 0: no batch fits; give it some, 256MiB say")
        if not self.listen:
            raise ConfigError('listen is empty; name an address such as "unix:/run/gyre/gyre.sock"')
        if self.cache_dir and not self.cache_memory:
            raise ConfigError(
                "cache_dir is set and cache_memory is 0: "
                "blocks reach the disk through memory; give it some, 64MiB say"
            )
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("tls_certificate and tls_key go together; set both or neither")
        if self.tls_client_ca and not self.tls_certificate:
            raise ConfigError("tls_client_ca needs tls_certificate and tls_key")


_TABLES = ("datasets", "job_weights", "limits", "tokens")
SCALAR_KEYS = tuple(each.name for each in fields(DaemonConfig) if each.name not in _TABLES)


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """A checked configuration.

    Attributes:
        config: the values.
        origins: where the value of each of SCALAR_KEYS comes from.
        warnings: what the operator should change although the daemon can run with it.
    """

    config: DaemonConfig
    origins: Mapping[str, Origin]
    warnings: Sequence[str] = ()


def load(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> EffectiveConfig:
    """Merge defaults, file, environment and flags; each overrides those before it.

    Args:
        path: a TOML file; None for none.
        environment: `GYRE_<KEY>` sets the scalar key of that name; lists are comma-separated.
        flags: values by key; None means not given.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    table, warnings = read_toml(path) if path else ({}, [])
    datasets = _convert(table.pop("datasets", {}), dict[str, Any], "datasets")
    weights = _convert(table.pop("job_weights", {}), dict[str, Any], "job_weights")
    limits = parse_limits(table.pop("limits", {}))
    tokens = _convert(table.pop("tokens", {}), dict[str, Any], "tokens")
    variables = {key: ENVIRONMENT_PREFIX + key.upper() for key in SCALAR_KEYS}
    set_by: list[tuple[Origin, dict[str, Any], dict[str, str]]] = [
        ("file", table, {key: f"{key} in {path}" for key in table}),
        (
            "environment",
            {key: environment[name] for key, name in variables.items() if name in environment},
            variables,
        ),
        (
            "flag",
            {key: value for key, value in flags.items() if value is not None},
            {key: "--" + key.replace("_", "-") for key in flags},
        ),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(SCALAR_KEYS, "default")
    for origin, given, names in set_by:
        values |= _converted(DaemonConfig, given, str(path), names)
        origins |= dict.fromkeys(given, origin)
    config = DaemonConfig(
        **values,
        datasets={name: parse_dataset(name, entry) for name, entry in datasets.items()},
        job_weights={
            pattern: _convert(value, _Positive, f"job_weights.{pattern}")
            for pattern, value in weights.items()
        },
        limits=limits,
        tokens={name: _convert(path, _Text, f"tokens.{name}") for name, path in tokens.items()},
    )
    warnings += misspelt_variables(environment, list(variables.values()))
    return EffectiveConfig(config, origins, warnings)


def parse_dataset(name: str, table: object) -> DatasetConfig:
    """Check what every dataset has in common; its format checks the rest when it is opened.

    Raises:
        ConfigError: `uri` is missing, `uri` or `format` is not text, or `storage` is not a table.
    """
    where = f"datasets.{name}"
    rest = dict(_convert(table, dict[str, Any], where))
    if rest.get("allow") in ([], ""):
        raise ConfigError(
            f"{where}.allow is empty; name who may read the dataset, or leave the key out for the "
            "daemon's own user and group"
        )
    keys = [each.name for each in fields(DatasetConfig) if each.name != "options"]
    common = {key: rest.pop(key) for key in keys if key in rest}
    return _build(DatasetConfig, common | {"options": rest}, where, f"{where}.{{}}")


def parse_limits(table: object) -> LimitsConfig:
    """Check the table `limits`.

    Raises:
        ConfigError: a key is unknown, or a value is out of range.
    """
    tables = _converted_tables(table)
    user = _build(UserLimits, tables.get("user", {}), "limits.user", "limits.user.{}")
    job = _build(JobLimits, tables.get("job", {}), "limits.job", "limits.job.{}")
    users = {}
    for pattern, entry in tables.get("users", {}).items():
        where = f"limits.users.{pattern}"
        given = _convert(entry, dict[str, Any], where)
        names = {key: f"{where}.{key}" for key in given}
        users[pattern] = replace(user, **_converted(UserLimits, given, where, names))
    return LimitsConfig(user, job, users)


def _converted_tables(table: object) -> dict[str, dict[str, Any]]:
    names = {each.name: f"limits.{each.name}" for each in fields(LimitsConfig)}
    given = _convert(table, dict[str, Any], "limits")
    _check_keys(given, names, "limits")
    return {key: _convert(value, dict[str, Any], names[key]) for key, value in given.items()}


def parse_options(cls: type[Options], table: Mapping[str, Any], where: str) -> Options:
    """Build a frozen dataclass of options from a TOML table.

    Args:
        cls: a dataclass; its annotations may carry msgspec's `Meta`.
        table: values by key, as TOML or text gives them.
        where: what the table is, for the error.

    Raises:
        ConfigError: names the key, and the nearest known one where it is unknown.
    """
    return _build(cls, table, where, f"{{}} in {where}")


def parse_size(text: str | int) -> Size:
    """Bytes from an integer or text such as "1.5GiB" or "1GB", rounded down to whole bytes.

    Raises:
        ValueError: it is neither, or its unit is unknown.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if not match or match[2] not in _UNIT_BYTES or ("." in match[1] and match[2] in ("", "B")):
        raise ValueError(
            'expected a number of bytes such as 1073741824, "512MiB" (binary) or "1GB" (decimal)'
        )
    size = Size(Fraction(match[1]) * _UNIT_BYTES[match[2]])
    if size > _MAX_SIZE:
        raise ValueError(f"expected at most {_MAX_SIZE} bytes, an EiB")
    return size


def _build(cls: type[Options], table: Mapping[str, Any], where: str, name: str) -> Options:
    """The dataclass with the values of a table, where `name` is how an error calls the key {}."""
    values = _converted(cls, table, where, {key: name.format(key) for key in table})
    for each in fields(cls):  # type: ignore[arg-type]
        if each.name not in values and each.default is each.default_factory:  # both are MISSING
            raise ConfigError(f"`{each.name}` is missing in {where}")
    return cls(**values)


def _converted(
    cls: type[Any], table: Mapping[str, Any], where: str, names: Mapping[str, str]
) -> dict[str, Any]:
    """A table's values in the types that the dataclass annotates; errors use the keys' `names`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    _check_keys(table, hints, where)
    return {key: _convert(value, hints[key], names[key]) for key, value in table.items()}


def _check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in table.keys() - set(known):
        close = difflib.get_close_matches(key, known, n=1)
        advice = f"did you mean `{close[0]}`?" if close else f"known are {', '.join(sorted(known))}"
        raise ConfigError(f"unknown key `{key}` in {where}; {advice}")


def _convert(value: Any, hint: Any, name: str) -> Any:
    """A value in the annotated type; text is parsed, since the environment holds nothing else."""
    if isinstance(value, str) and typing.get_origin(hint) is tuple:
        value = [part.strip() for part in value.split(",")]
    try:
        return msgspec.convert(value, hint, strict=False, dec_hook=lambda _, size: parse_size(size))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} is {shown(value, name)}: {_explain(error, hint)}") from error


def _explain(error: msgspec.ValidationError, hint: Any) -> str:
    """What was expected, with TOML's names for lists and tables."""
    if typing.get_origin(hint) is Literal:
        return f"expected one of {', '.join(typing.get_args(hint))}"
    text = str(error).partition(", got ")[0].partition(" - at ")[0]
    text = text.replace("`array`", "a list").replace("`object`", "a table")
    return text[0].lower() + text[1:]
