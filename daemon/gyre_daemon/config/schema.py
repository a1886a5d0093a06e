"""The schema of the daemon's configuration, and values of its types out of tables.

Each table is a frozen dataclass. Types and ranges stand in the annotations, and msgspec checks
them; docs/adr/0031 says how and why. An error names the key. Storage keys and passwords stand in
the same file as all else, and a line that was moved by mistake puts one under any other key: so
messages show no value that may be a secret.
"""

import os
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from gyre_protos.text import bytes_of
from msgspec import Meta

from gyre_daemon.errors import ConfigError

_MAX_SIZE = 1 << 60  # an EiB; anything larger is a slip of the unit


class Size(int):
    """A number of bytes.

    In TOML an integer, or text such as "64MiB" (2^20 bytes each) or "64MB" (10^6 bytes each).
    """


def parse_size(text: str | int) -> Size:
    """Bytes from an integer or text such as "1.5GiB" or "1GB", rounded down to whole bytes.

    Raises:
        ValueError: it is neither, or its unit is unknown.
    """
    size = Size(bytes_of(str(text)))
    if size > _MAX_SIZE:
        raise ValueError(f"expected at most {_MAX_SIZE} bytes, an EiB")
    return size


_SECRET_KEY = re.compile(
    r"secret|token(?!_dtype|izer|s$)|passw|credential|signature|private|\bsas\b|_key\b|\bkey\b",
    re.IGNORECASE,
)
# Text to show: a word or a number with its unit. Secrets are longer, or mix both.
_PLAIN = re.compile(r"[A-Za-z]{0,8}|-?[0-9.,]{1,20} ?[A-Za-z]{0,8}")


def shown(value: object, key: str) -> str:
    """A value for a message about its key; only its kind if it may be a secret."""
    if not is_secret(key) and _is_plain(value):
        return f"{value!r:.200}"
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    kinds = {dict: "a table", list: "a list", int: "a number", float: "a number"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")


def is_secret(key: str) -> bool:
    """Whether the value of a key, as messages name it, may be a secret."""
    name = key.partition(" in ")[0]
    return ".storage" in name or bool(_SECRET_KEY.search(name.rpartition(".")[2]))


def hide(text: str, settings: Mapping[str, Any]) -> str:
    """A driver's message without the values of its settings."""
    for value in sorted({str(each) for each in _leaves(settings)}, key=len, reverse=True):
        if len(value) > 2:
            text = text.replace(value, "***")
    return text


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return len(value) < 10 and all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, list):
        return len(value) < 10 and all(map(_is_plain, value))
    return not isinstance(value, str) or bool(_PLAIN.fullmatch(value))


def has_secret(settings: object) -> bool:
    """Whether a table, or one in it, has a value under a key that names a secret."""
    if not isinstance(settings, dict):
        return False
    return any(
        has_secret(value) or (value and _SECRET_KEY.search(key)) for key, value in settings.items()
    )


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


Options = TypeVar("Options")


def parse_options(
    cls: type[Options], table: Mapping[str, Any], where: str, naming: str = "{0} in {1}"
) -> Options:
    """Build a frozen dataclass of options from a TOML table, or one of text.

    Annotations may carry msgspec's `Meta`. `where` is the table in words, for the error, and
    `naming` puts a key and these words together.

    Raises:
        ConfigError: names the key, and the nearest known one where it is unknown.
    """
    values = converted(cls, table, where, {key: naming.format(key, where) for key in table})
    for each in fields(cls):  # type: ignore[arg-type]
        if each.name not in values and each.default is each.default_factory:  # both are MISSING
            raise ConfigError(f"`{each.name}` is missing in {where}")
    return cls(**values)


def build(cls: type[Options], table: Mapping[str, Any], where: str) -> Options:
    """As `parse_options`, for a table of the configuration; errors call its keys `where.key`."""
    return parse_options(cls, table, where, "{1}.{0}")


def converted(
    cls: type[Any], table: Mapping[str, Any], where: str, names: Mapping[str, str]
) -> dict[str, Any]:
    """A table's values in the types that the dataclass annotates; errors use the keys' `names`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    check_keys(table, [each.name for each in fields(cls)], where)
    return {key: convert(value, hints[key], names[key]) for key, value in table.items()}


def check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise ConfigError for an unknown key, with the nearest one."""
    for key in table.keys() - set(known):
        import difflib  # noqa: PLC0415  # for an error alone

        close = difflib.get_close_matches(key, known, n=1)
        all_known = f"known are {', '.join(sorted(known))}" if known else "there are none"
        advice = f"did you mean `{close[0]}`?" if close else all_known
        raise ConfigError(f"unknown key `{key}` in {where}; {advice}")


def convert(value: Any, hint: Any, name: str) -> Any:
    """A value in the annotated type; text is parsed, since the environment holds nothing else."""
    if isinstance(value, str) and typing.get_origin(hint) is tuple:
        value = [part.strip() for part in value.split(",")]
    try:
        return msgspec.convert(value, hint, strict=False, dec_hook=lambda _, size: parse_size(size))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} is {shown(value, name)}: {_explain(error, hint)}") from error


def _explain(error: msgspec.ValidationError, hint: Any) -> str:
    """The expected value, with TOML's names for lists and tables."""
    if typing.get_origin(hint) is Literal:
        return f"expected one of {', '.join(typing.get_args(hint))}"
    text = str(error).partition(", got ")[0].partition(" - at ")[0]
    text = text.replace("`array`", "a list").replace("`object`", "a table")
    return text[0].lower() + text[1:]


MAX_PREFETCH_BATCHES = 1024
_MAX_NUMBER = 1e9  # refuses infinity; as seconds it is 30 years
# Upper bounds refuse slips: a thread takes a stack and each request a connection.
_MAX_THREADS, _MAX_REQUESTS = 1024, 1 << 20
Positive = Annotated[float, Meta(gt=0, le=_MAX_NUMBER)]
Text = Annotated[str, Meta(min_length=1)]
_AtLeast1 = Annotated[int, Meta(ge=1)]
_Fraction = Annotated[float, Meta(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class PackConfig:
    """The table `pack` of a dataset: its samples are documents, and sequences of them are served.

    Attributes:
        field: the one to pack: whole numbers, whose samples differ in length.
        length: of a sequence, in tokens.
        overlong: how to treat a document longer than a sequence: `fail` refuses the
            dataset, `drop` leaves it out, `truncate` keeps its beginning, `split` cuts it.
        padding_id: fills the rest of a sequence.
        window: the number of documents packed together.
        seed: of the shuffle before documents are packed; not that of the order of the sequences.
    """

    field: Text
    length: Annotated[int, Meta(ge=1, le=1 << 24)]
    overlong: Literal["fail", "drop", "truncate", "split"] = "fail"
    padding_id: int = 0
    window: Annotated[int, Meta(ge=1024)] = 1 << 20
    seed: Annotated[int, Meta(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class MixtureStep:
    """One entry of a mixture's `schedule`.

    Attributes:
        step: the global step from which on the weights count.
        weights: by the sources' names; a source without one is not read.
    """

    step: Annotated[int, Meta(ge=1, le=1 << 40)]
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """The keys of a mixture that no other dataset has. One of three keys shares out the batches.

    Attributes:
        weights: of each source, by the name of its dataset.
        epochs: how often each source is gone through in one epoch of the mixture.
        temperature: T: the weight of a source is its number of samples to the power 1 / T.
        sources: names of datasets; where there are weights or epochs, their keys.
        block: the number of positions in which every source has its exact quota.
        schedule: other weights, from steps on.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    epochs: Mapping[str, float] = field(default_factory=dict)
    temperature: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    sources: tuple[str, ...] = ()
    block: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024
    schedule: tuple[MixtureStep, ...] = ()


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One named dataset.

    Attributes:
        uri: a file, a folder, a glob or a brace list of shards; a path, or a URL with a scheme that
            fsspec knows.
        format: one of those that docs/formats.md lists; empty to decide by the names of the files.
        options: the remaining keys of the table, which the format reads.
        storage: settings of the storage driver, which reads them: endpoint, region, credentials.
        cache: whether blocks read from object storage or a slow mount are kept in the node's cache.
        allow: who may read it, as `access.policy` says; empty for the daemon's user and group.
        follow_links: whether links among local files may lead out of the dataset's folder.
        rename: new names of fields, by the names that they have.
        cast: dtypes of numeric fields, by their new names.
        on_corrupt: how to treat samples whose bytes fail the checks of their format: `fail` ends
            the job that reads one; `replace` gives another sample its place, and writes a report.
        max_corrupt: with `replace`, how many samples may be corrupt, as an integer, or as a
            fraction of all.
        filter: which samples are in its order, as an expression over lengths and indexed values;
            empty for all.
        append: whether the dataset may grow by shards behind all others; a cursor of its first
            shards then fits.
        pack: how documents are packed into sequences; None to serve them as they are.
        transforms: to apply to its samples, in this order: tables with a `name` and options.
            Jobs that bring their own transforms do without these.
        mixture: the sources of a mixture, whose samples are those of other datasets; None for a
            dataset with shards. It stands in the table `mixtures`.
    """

    uri: Text
    format: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache: bool = True
    allow: tuple[str, ...] = ()
    follow_links: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, str] = field(default_factory=dict)
    on_corrupt: Literal["fail", "replace"] = "fail"
    max_corrupt: Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0, le=0.5)] = 0.01
    filter: str = ""
    append: bool = False
    pack: PackConfig | None = None
    transforms: tuple[Mapping[str, Any], ...] = ()
    mixture: MixtureConfig | None = None


@dataclass(frozen=True, slots=True)
class UserLimits:
    """The limits of one user, with all jobs.

    Attributes:
        memory: of the memory that other users do not have, as a fraction. The rest is left for a
            user who comes later.
        sessions: open at once.
        connections: to the side channel at once.
        requests_per_s: calls in the long run.
    """

    memory: _Fraction = 0.875
    sessions: _AtLeast1 = 2048
    connections: _AtLeast1 = 2048
    requests_per_s: Positive = 500.0


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """The table `limits`.

    Attributes:
        user: of each user.
        users: of users whose name matches a pattern, such as "uid:1004" or "token:*"; the first
            that matches counts, with the values of `user` where it says nothing.
    """

    user: UserLimits = UserLimits()
    users: Mapping[str, UserLimits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """How a daemon runs: the keys of its file, which docs/deploy.md explains."""

    listen: tuple[str, ...] = ("unix:/run/gyre/gyre.sock",)
    memory_budget: Size = field(default_factory=lambda: Size(default_memory_budget()))
    session_memory: Size = Size(256 << 20)
    prefetch_batches: Annotated[int, Meta(ge=0, le=MAX_PREFETCH_BATCHES)] = 0
    lease_s: Positive = 30.0
    drain_timeout_s: Annotated[float, Meta(ge=0, le=_MAX_NUMBER)] = 10.0
    num_io_threads: Annotated[int, Meta(ge=1, le=_MAX_THREADS)] = 4
    mount_threads: Annotated[int, Meta(ge=1, le=_MAX_THREADS)] = 64
    num_copy_workers: Annotated[int, Meta(ge=0, le=_MAX_THREADS)] = 4
    num_transform_workers: Annotated[int, Meta(ge=0, le=_MAX_THREADS)] = 0
    transform_deadline_s: Positive = 60.0
    installed_transforms: tuple[str, ...] = ()
    max_requests: Annotated[int, Meta(ge=1, le=_MAX_REQUESTS)] = 1024
    read_deadline_s: Positive = 60.0
    hedge: bool = True
    hub_requests_per_s: Positive = 10.0
    archives: bool = False
    index_dir: str = ""
    cache_memory: Size = Size(1 << 30)
    cache_dir: str = ""
    cache_disk: Size = Size(64 << 30)
    unpack_dir: str = ""
    unpack_disk: Size = Size(64 << 30)
    report_dir: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "text", "json"] = "auto"
    metrics_listen: str = ""
    metrics_names: Literal["auto", "all", "none"] = "auto"
    metrics_public: bool = False
    health_listen: str = ""
    admin: tuple[str, ...] = ()
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, DatasetConfig] = field(default_factory=dict)
    job_weights: Mapping[str, float] = field(default_factory=dict)
    limits: LimitsConfig = LimitsConfig()

    def __post_init__(self) -> None:
        """Reject combinations of valid values with which no daemon can run."""
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


_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_PART_FOR_BATCHES = 4


def default_memory_budget() -> int:
    """A fourth of the memory that this process may have; reserved, not allocated."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes = memory_limit_bytes()
    may_have_bytes = machine_bytes if limit_bytes is None else min(machine_bytes, limit_bytes)
    return may_have_bytes // _PART_FOR_BATCHES


def check_memory_budget(budget_bytes: int, limit_bytes: int | None) -> None:
    """Refuse a memory budget above the control group's limit, where the kernel kills the daemon.

    Raises:
        ConfigError: the budget is larger than the limit.
    """
    if limit_bytes is not None and budget_bytes > limit_bytes:
        raise ConfigError(
            f"memory_budget is {budget_bytes} bytes, but this process's control group may use "
            f"{limit_bytes}. Lower memory_budget to leave some for the daemon itself, or raise the "
            "limit (MemoryMax=, --memory)."
        )


def memory_limit_bytes(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """The lowest memory limit of this process's control group and its parents; None for none.

    As cgroups(7) says, a line of the membership is `ID:CONTROLLERS:PATH`, and `0::PATH` in version
    2. In a container the path may be the host's; then the limit is found at the root of the mount.
    """
    limits = []
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, name = (
            (cgroups / "memory", "memory.limit_in_bytes")
            if controllers
            else (cgroups, "memory.max")
        )
        inside = Path("" if ".." in path.split("/") else path.lstrip("/"))
        texts = [_text(mount / folder / name) for folder in (inside, *inside.parents)]
        limits += [int(text) for text in texts if text.strip().isdecimal()]
    lowest = min(limits, default=None)
    # version 1 writes a number of that size for "no limit"
    return None if lowest is None or lowest >= 1 << 62 else lowest


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
