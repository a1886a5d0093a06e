"""A configuration file and its overrides as a table, and checks of the run's folder.

The ranges of configured values, as annotations that msgspec checks.

Each upper bound is far beyond any run, and within what torch, msgspec and the kernel can hold. A
value beyond it would fail later, or keep a command busy for ever.
"""

import os
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from gyre_protos.text import parse_toml
from msgspec import Meta

from gyre_trainer.errors import ConfigError
from gyre_trainer.shards.tensor_files import read_regular

_MAX_INT = 2**31 - 1
_MAX_FLOAT = 3.4e38  # parameters are float32

AtLeast0 = Annotated[int, Meta(ge=0, le=_MAX_INT)]
AtLeast1 = Annotated[int, Meta(ge=1, le=_MAX_INT)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NumLayers = Annotated[int, Meta(ge=1, le=10_000)]
NumThreads = Annotated[int, Meta(ge=0, le=4096)]
Positive = Annotated[float, Meta(gt=0, le=_MAX_FLOAT)]
NotNegative = Annotated[float, Meta(ge=0, le=_MAX_FLOAT)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
# A smaller epsilon is 0 in float32, and a parameter without a gradient would become 0 / 0.
Epsilon = Annotated[float, Meta(ge=1e-37, le=_MAX_FLOAT)]
# A base below 1 makes frequencies that float32 cannot hold.
RotaryBase = Annotated[float, Meta(ge=1, le=_MAX_FLOAT)]
Seconds = Annotated[float, Meta(ge=0.001, le=1e8)]
Text = Annotated[str, Meta(min_length=1)]


def read(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The table in the file ``path``, with ``section.key=value`` overrides.

    Raises:
        ConfigError: the file cannot be read or is not TOML, or an override has another form.
    """
    try:
        table = parse_toml(read_regular(path).decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also of encodings, and of a path with a NUL
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    override(table, overrides)
    return table


def override(table: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set values of a table, each given as ``section.key=value``.

    Raises:
        ConfigError: a text has another form.
    """
    for text in overrides:
        name, equals, value = (part.strip() for part in text.partition("="))
        section, dot, key = name.partition(".")
        if not equals or not dot or not key:
            raise ConfigError(f"--set {name!r} is not of the form section.key=value")
        if not text.isprintable():
            raise ConfigError(f"--set {name!r}: the text has control characters, or is not UTF-8")
        target = table.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"`{section}` must be a table: [{section}]")
        try:
            target[key] = parse_toml(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            target[key] = value  # so that paths and names need no quotes
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"--set {name}: the value has too many digits, or is nested too deeply"
            ) from error


def make_folder(folder: Path, key: str) -> None:
    """Make the folder that a configuration key or a flag names, unless it is there.

    Raises:
        ConfigError: it cannot be made, or may not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"`{key}` is {folder}: {error.strerror}; choose another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"`{key}` is {folder}, which cannot be written to; choose another folder")


def require_regular(path: Path) -> None:
    """Check that a regular file is at ``path``, or nothing: to open a pipe could take for ever.

    Raises:
        ConfigError: something else is there.
        OSError: it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ConfigError(
            f"{path} is no regular file but a folder, a pipe, a socket or a device; remove it, "
            "or choose another `run.out`"
        )
