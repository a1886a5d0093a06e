"""Checks the environment variables with which torchrun, or another launcher, names a rank."""

import reprlib
from collections.abc import Mapping

from gyre_trainer.errors import ConfigError

_LARGEST = 2**31 - 1
_ADVICE = "start the ranks with torchrun, or unset RANK and use --nproc"


def require_rank(environment: Mapping[str, str]) -> None:
    """Check the variables of one rank, before torch reads them.

    Raises:
        ConfigError: a variable is missing, is no number, or does not fit the others.
    """
    world_size = _number(environment, "WORLD_SIZE", 1, _LARGEST)
    _number(environment, "RANK", 0, world_size - 1)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", 1, world_size, missing=1)
    _number(environment, "LOCAL_RANK", 0, local_world_size - 1, missing=0)
    _number(environment, "MASTER_PORT", 1, 2**16 - 1)
    if not environment.get("MASTER_ADDR", "").strip():
        raise ConfigError(f"RANK is set, but MASTER_ADDR is not; {_ADVICE}")


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int, missing: int | None = None
) -> int:
    text = environment.get(name)
    if text is None and missing is not None:
        return missing
    if text is None:
        raise ConfigError(f"RANK is set, but {name} is not; {_ADVICE}")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(
            f"{name} is {reprlib.repr(text)}: expected a number from {least} to {most}; {_ADVICE}"
        )
    return int(text)
