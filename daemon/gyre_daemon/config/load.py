"""Reads a configuration, a TOML file overridden by `GYRE_*` variables, then by flags; and shows it.

So a daemon reads the same data wherever it was started. Where the file is a link, its folder is
that of the link. Paths in the environment and in flags count from the working directory, as those
of other programs do. A table of `mixtures` is a dataset whose samples are those of others.

`rendered` is the output of `gyred check-config`: the configuration in force, as TOML, with all
origins. It walks over the parsed values, so no key that the daemon reads can be missing.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gyre_protos.text import parse_toml

from gyre_daemon.config.schema import (
    DaemonConfig,
    DatasetConfig,
    LimitsConfig,
    MixtureConfig,
    PackConfig,
    Positive,
    Text,
    UserLimits,
    build,
    check_keys,
    convert,
    converted,
    has_secret,
    is_secret,
)
from gyre_daemon.errors import ConfigError

# A dataset takes some 200 bytes, so this is room for 20,000; a higher limit only delays the error
# for another kind of file.
_MAX_BYTES = 4 << 20
# Other variables of the programs and the examples, by how they begin.
_OTHER_PROGRAMS = (
    "GYRE_ADDRESS", "GYRE_DATA", "GYRE_TLS", "GYRE_TOKEN", "GYRE_TRACEBACK", "GYRE_TRAIN",
)  # fmt: skip
_CLOSE = 0.8


def read_toml(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The table of a file, and a warning if others may read the secrets in it.

    Never waits for another process, as a pipe would.

    Raises:
        ConfigError: it cannot be read, is no regular file, is too large, or is not TOML.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(
                    f"cannot read the configuration {path}: it is a pipe, a socket or a device. "
                    "Name a regular file, which a reload can read again."
                )
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"the configuration {path} is larger than {_MAX_BYTES >> 20} MiB; is it the right file?"
        )
    try:
        table = parse_toml(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {_reason(error)}") from error
    return table, _exposed(path, found.st_mode, table)


def misspelt_variables(environment: Iterable[str], known: Sequence[str]) -> list[str]:
    """A warning for each variable that nearly has the name of one that the daemon reads."""
    warnings = []
    for name in sorted(environment):
        if name in known or not name.startswith("GYRE_") or name.startswith(_OTHER_PROGRAMS):
            continue
        import difflib  # noqa: PLC0415  # for a warning alone

        if close := difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE):
            warnings.append(
                f"the environment has {name[:80]!r}, which nothing reads; did you mean {close[0]}?"
            )
    return warnings


def _exposed(path: Path, mode: int, table: Mapping[str, Any]) -> list[str]:
    readers = [who for who, bit in (("its group", 0o040), ("all users", 0o004)) if mode & bit]
    datasets = table.get("datasets", {})
    if not readers or not isinstance(datasets, dict):
        return []
    names = [
        name
        for name, dataset in datasets.items()
        if isinstance(dataset, dict) and has_secret(dataset.get("storage"))
    ]
    if not names:
        return []
    warning = (
        f"{path} holds secrets, such as those of dataset `{names[0]}`, and {' and '.join(readers)} "
        f"may read it (mode {stat.S_IMODE(mode):04o}); `chmod 0600` it and give it to the "
        "daemon's user, or hand the secrets in through the environment"
    )
    return [warning]


def _reason(error: Exception) -> str:
    """Why text is not TOML; a decoder's message would repeat bytes."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return str(error)


_KEYS = (
    "index_dir", "cache_dir", "unpack_dir", "report_dir", "tls_certificate", "tls_key",
    "tls_client_ca",
)  # fmt: skip
_STORAGE_KEYS = (
    "ca_file", "token_file", "service_account", "service_account_path", "google_service_account",
    "google_service_account_path", "application_credentials", "google_application_credentials",
)  # fmt: skip
_UNIX = "unix:"
# A brace list with an absolute path among its choices.
_ABSOLUTE_CHOICES = re.compile(r"\{+(?:[^{}]*,\{*)?/")
_BRACES, _WILDCARDS = re.compile(r"[\\{}]"), re.compile(r"[*?[]")


def from_folder(folder: Path, path: str) -> str:
    """A path as seen from a folder; an empty or absolute one, or a URL, stays as it is."""
    is_url = "://" in path or "::" in path or path.startswith("pipe:")
    if not path or is_url or Path(path).is_absolute():
        return path
    return f"{folder}/{path}"  # with all slashes and dots that it has


def scalars_from_folder(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Converted values by key; paths, also those of sockets, are seen from a folder."""
    found: dict[str, Any] = {
        key: from_folder(folder, values[key]) for key in _KEYS if key in values
    }
    if "listen" in values:
        found["listen"] = tuple(_address(folder, text) for text in values["listen"])
    return {**values, **found}


def dataset_from_folder(folder: Path, dataset: DatasetConfig) -> DatasetConfig:
    """A dataset whose shards, and files that its storage needs, are seen from a folder."""
    files = {
        key: from_folder(folder, path)
        for key in _STORAGE_KEYS
        if isinstance(path := dataset.storage.get(key), str)
    }
    uri = _uri_from_folder(folder, dataset.uri)
    return replace(dataset, uri=uri, storage={**dataset.storage, **files})


def _uri_from_folder(folder: Path, uri: str) -> str:
    """As `from_folder`; braces and wildcards count in the URI alone, not in the folder's name."""
    if _ABSOLUTE_CHOICES.match(uri):
        return uri
    name = _BRACES.sub(r"\\\g<0>", str(folder))
    if _WILDCARDS.search(uri):
        name = _WILDCARDS.sub(r"[\g<0>]", name)
    return from_folder(Path(name), uri)


def _address(folder: Path, text: str) -> str:
    path = text.removeprefix(_UNIX)
    return _UNIX + from_folder(folder, path) if text.startswith(_UNIX) else text


Origin = Literal["default", "file", "environment", "flag"]

ENVIRONMENT_PREFIX = "GYRE_"
_TABLES = ("datasets", "job_weights", "limits", "tokens")
_NO_KEYS = ("options", "mixture")  # of a dataset's table
SCALAR_KEYS = tuple(each.name for each in fields(DaemonConfig) if each.name not in _TABLES)


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """A checked configuration.

    Attributes:
        config: the values.
        origins: where the value of each of SCALAR_KEYS comes from.
        tables: those of the file with other keys, as they stand there.
        warnings: advice to the operator; the daemon can still run.
    """

    config: DaemonConfig
    origins: Mapping[str, Origin]
    tables: Mapping[str, Any] = field(default_factory=dict, repr=False)
    warnings: Sequence[str] = ()


def load(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> EffectiveConfig:
    """Merge defaults, file, environment and flags; each overrides those before it.

    Args:
        path: a TOML file; None for none. Relative paths in it count from its folder.
        environment: `GYRE_<KEY>` sets the scalar key of that name; lists are comma-separated.
        flags: values by key; None means not given.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    table, warnings = read_toml(path) if path else ({}, [])
    tables = {
        key: convert(table.pop(key, {}), dict[str, Any], key) for key in (*_TABLES, "mixtures")
    }
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
    folder = path.absolute().parent if path else Path()
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(SCALAR_KEYS, "default")
    for origin, given, names in set_by:
        found = converted(DaemonConfig, given, str(path), names)
        values |= scalars_from_folder(folder, found) if origin == "file" else found
        origins |= dict.fromkeys(given, origin)
    config = DaemonConfig(
        **values,
        datasets=_parse_datasets(folder, tables["datasets"], tables["mixtures"]),
        job_weights={
            pattern: convert(value, Positive, f"job_weights.{pattern}")
            for pattern, value in tables["job_weights"].items()
        },
        limits=parse_limits(tables["limits"]),
        tokens={
            name: from_folder(folder, convert(file, Text, f"tokens.{name}"))
            for name, file in tables["tokens"].items()
        },
    )
    warnings += misspelt_variables(environment, list(variables.values()))
    return EffectiveConfig(config, origins, tables, warnings)


def _parse_datasets(
    folder: Path, datasets: Mapping[str, Any], mixtures: Mapping[str, Any]
) -> dict[str, DatasetConfig]:
    both = sorted(datasets.keys() & mixtures.keys())
    if both:
        raise ConfigError(f"`{both[0]}` is the name of a dataset and of a mixture; rename one")
    parsed = {
        name: dataset_from_folder(folder, parse_dataset(name, entry))
        for name, entry in datasets.items()
    }
    parsed |= {name: parse_mixture(name, entry) for name, entry in mixtures.items()}
    for name in parsed:
        _check_sources(name, parsed, (name,))
    return parsed


def parse_dataset(name: str, table: object) -> DatasetConfig:
    """Check the keys that all datasets share; its format checks the rest when it is opened.

    Raises:
        ConfigError: a key is missing or has the wrong type; or as `parse_pack`.
    """
    where = f"datasets.{name}"
    rest = dict(convert(table, dict[str, Any], where))
    if rest.get("allow") in ([], ""):
        raise ConfigError(
            f"{where}.allow is empty; name who may read the dataset, or leave the key out for the "
            "daemon's own user and group"
        )
    keys = [each.name for each in fields(DatasetConfig) if each.name not in _NO_KEYS]
    common = {key: rest.pop(key) for key in keys if key in rest}
    packing = common.pop("pack", None)
    config = build(DatasetConfig, common | {"options": rest}, where)
    if packing is None:
        return config
    return replace(config, pack=parse_pack(packing, f"{where}.pack"))


def parse_pack(table: object, where: str) -> PackConfig:
    """Check how documents are packed; raises ConfigError for an unknown key or value."""
    keys = convert(table, dict[str, Any], where)
    if isinstance(lengths := keys.get("length"), list):
        raise ConfigError(
            f"{where}.length is {lengths!r:.100}: all sequences have one length. Give that, such "
            "as 8192."
        )
    return build(PackConfig, keys, where)


def parse_limits(table: object) -> LimitsConfig:
    """Check the table `limits`; raises ConfigError for an unknown key or value."""
    names = {each.name: f"limits.{each.name}" for each in fields(LimitsConfig)}
    given = convert(table, dict[str, Any], "limits")
    check_keys(given, names, "limits")
    tables = {key: convert(value, dict[str, Any], names[key]) for key, value in given.items()}
    user = build(UserLimits, tables.get("user", {}), "limits.user")
    users = {}
    for pattern, entry in tables.get("users", {}).items():
        where = f"limits.users.{pattern}"
        own = convert(entry, dict[str, Any], where)
        own_names = {key: f"{where}.{key}" for key in own}
        users[pattern] = replace(user, **converted(UserLimits, own, where, own_names))
    return LimitsConfig(user, users)


FORMAT = "mixture"  # as which a mixture is listed
KEYS_OF_DATASETS = ("allow", "transforms", "pack")  # keys that a mixture has like any dataset
_MAX_SOURCES = 32  # a cursor has a place for each, with its fingerprint


def parse_mixture(name: str, table: object) -> DatasetConfig:
    """Check one mixture by itself; its sources are checked by `_check_sources`.

    Raises:
        ConfigError: a key is unknown, has the wrong type, or does not fit the others.
    """
    where = f"mixtures.{name}"
    rest = dict(convert(table, dict[str, Any], where))
    common = {key: rest.pop(key) for key in KEYS_OF_DATASETS if key in rest}
    mixture = build(MixtureConfig, rest, where)
    given = [key for key in ("weights", "epochs", "temperature") if getattr(mixture, key)]
    if len(given) != 1:
        raise ConfigError(
            f"{where} has {' and '.join(given) or 'no weights'}; give it one of `weights`, "
            "`epochs` and `temperature`"
        )
    sources = mixture.sources or tuple(mixture.weights or mixture.epochs)
    if not 1 <= len(sources) <= _MAX_SOURCES or len(set(sources)) < len(sources):
        raise ConfigError(
            f"{where} names {len(sources)} sources; 1 to {_MAX_SOURCES} are possible, each once"
        )
    tables = {"weights": mixture.weights, "epochs": mixture.epochs}
    tables |= {f"schedule from step {each.step}": each.weights for each in mixture.schedule}
    for key, values in tables.items():
        _check_values(f"{where}.{key}", values, sources)
    steps = [each.step for each in mixture.schedule]
    if steps != sorted(set(steps)):
        raise ConfigError(f"{where}.schedule has the steps {steps}; they must rise")
    config = build(DatasetConfig, common | {"uri": f"{FORMAT}:{name}"}, where)
    return replace(config, format=FORMAT, mixture=replace(mixture, sources=sources))


def _check_values(where: str, values: Mapping[str, float], sources: tuple[str, ...]) -> None:
    for name, value in values.items():
        if name not in sources:
            raise ConfigError(
                f"{where} has `{name}`, which is none of the sources {', '.join(sources)}"
            )
        if not 0 <= value < 1e9:
            raise ConfigError(f"{where}.{name} is {value}: expected a number of at least 0")
    if values and not any(values.values()):
        raise ConfigError(f"{where} is 0 for every source; one must be above 0")


def sources_below(name: str, datasets: Mapping[str, DatasetConfig]) -> tuple[str, ...]:
    """The sources of a mixture, with those of its sources; none of any other dataset."""
    mixture = datasets[name].mixture
    own = mixture.sources if mixture else ()
    return tuple(each for source in own for each in (source, *sources_below(source, datasets)))


def mixture_height(config: DatasetConfig, datasets: Mapping[str, DatasetConfig]) -> int:
    """The depth of nested mixtures in a dataset: 0 for any other dataset."""
    if not config.mixture:
        return 0
    sources = [datasets[each] for each in config.mixture.sources if each in datasets]
    return 1 + max((mixture_height(each, datasets) for each in sources), default=0)


def _check_sources(
    name: str, datasets: Mapping[str, DatasetConfig], above: tuple[str, ...]
) -> None:
    """Refuse a mixture whose sources are missing, are itself, or cannot be mixed."""
    mixture = datasets[name].mixture
    for source in mixture.sources if mixture else ():
        where = f"mixtures.{name}"
        if source in above:
            raise ConfigError(f"{where} is a source of itself: {' > '.join((*above, source))}")
        if source not in datasets:
            raise ConfigError(
                f"{where} names the source `{source}`, and no dataset or mixture has this name"
            )
        config = datasets[source]
        if config.mixture and config.mixture.schedule:
            raise ConfigError(
                f"{where} has the source `{source}`, a mixture with a schedule, whose steps would "
                f"be none of the job's. Put the schedule into {where}"
            )
        if config.pack:
            raise ConfigError(
                f"{where} has the source `{source}` with `pack`, which cannot be mixed. Name it a "
                f"second time without it, and give {where} `pack`."
            )
        _check_sources(source, datasets, (*above, source))


_BARE = re.compile(r"[A-Za-z0-9_-]+")
# Fields of a dataset printed in another way than under their names.
_SPREAD = ("uri", "options", "storage", "mixture")


def rendered(effective: EffectiveConfig, redact: Callable[[str], str]) -> str:
    """The configuration in force, as TOML with the origin of each value.

    Secrets are left out; only their keys are shown. Keys that are not set and have no default stand
    in comments. `redact` takes credentials out of a URI.
    """
    config = effective.config
    lines = [
        f"{key} = {_toml(getattr(config, key))}  # {effective.origins[key]}" for key in SCALAR_KEYS
    ]
    given = effective.tables
    limits = given.get("limits", {})
    lines += _table("limits.user", config.limits.user, limits.get("user", {}))
    for pattern, each in config.limits.users.items():
        its = limits["users"][pattern]
        lines += _table(f"limits.users.{_key(pattern)}", each, its, "limits.user")
    for name in ("job_weights", "tokens"):
        if table := getattr(config, name):
            lines += _table(name, table, table)
    for name, dataset in sorted(config.datasets.items()):
        lines += _dataset(name, dataset, given, redact(dataset.uri))
    return "\n".join(lines)


def _dataset(
    name: str, dataset: DatasetConfig, given: Mapping[str, Any], uri: str
) -> Iterator[str]:
    """The table of a dataset or a mixture, then the tables in it."""
    kind = "mixtures" if dataset.mixture else "datasets"
    title, its = f"{kind}.{_key(name)}", given.get(kind, {}).get(name, {})
    values = {each.name: getattr(dataset, each.name) for each in fields(dataset)}
    values = {key: value for key, value in values.items() if key not in _SPREAD}
    if dataset.mixture:
        values = {key: values[key] for key in KEYS_OF_DATASETS} | {
            each.name: getattr(dataset.mixture, each.name) for each in fields(dataset.mixture)
        }
    else:
        values = {"uri": uri} | values
        values |= {key: _hidden(each, key) for key, each in dataset.options.items()}
    values["transforms"] = _hidden(dataset.transforms, "transforms")
    tables = {key: value for key, value in values.items() if is_dataclass(value)}
    yield from _table(title, {key: each for key, each in values.items() if key not in tables}, its)
    if dataset.storage:
        yield f"# storage = {{ {', '.join(sorted(map(_key, dataset.storage)))} }}, values not shown"
    for key, value in tables.items():
        yield from _table(f"{title}.{key}", value, its.get(key, {}))


def _table(title: str, table: Any, given: Any, otherwise: str = "default") -> Iterator[str]:
    """A table and its values; those that are not `given` in the file come otherwise."""
    if is_dataclass(table):
        table = {each.name: getattr(table, each.name) for each in fields(table)}
    yield f"\n[{title}]"
    for key, value in table.items():
        origin = "file" if key in given else otherwise
        if value is None or (origin == "default" and value in ("", (), [], {})):
            yield f"# {_key(key)} is not set"
        else:
            yield f"{_key(key)} = {_toml(value)}  # {origin}"


def _hidden(value: Any, key: str) -> Any:
    """A value in which those under keys that name secrets are replaced."""
    if is_secret(key):
        return "***"
    if isinstance(value, Mapping):
        return {name: _hidden(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(each, "") for each in value]
    return value


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    """Quoted; control characters are escaped, since a terminal would obey them."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)


def _toml(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_toml(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return _text(value)
    return str(value).lower()  # of booleans
