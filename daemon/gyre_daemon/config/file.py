"""How the configuration is read from its file and the environment."""

import difflib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_protos.toml import parse_toml

from gyre_daemon.config.secrets import has_secret
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
