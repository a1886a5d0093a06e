"""Which names a tensor of a batch may have."""

from collections.abc import Mapping, Sequence

from gyre_daemon.datasets.formats.base import (
    MASK,
    OFFSETS_SUFFIX,
    PRESENT_SUFFIX,
    SAMPLE_ID,
    SHAPE_SUFFIX,
)
from gyre_daemon.errors import ConfigError

_SUFFIXES = (OFFSETS_SUFFIX, PRESENT_SUFFIX, SHAPE_SUFFIX)
TAKEN = (
    f"a batch has {SAMPLE_ID}, {MASK} and offsets itself, and names that end with "
    f"{', '.join(_SUFFIXES)}"
)


def is_servable(name: str) -> bool:
    """Whether a tensor may have this name."""
    is_taken = name in (SAMPLE_ID, MASK) or name.endswith(_SUFFIXES)
    return name != "" and name.isprintable() and not is_taken


def renamed(texts: Sequence[str], key: str) -> list[tuple[str, str]]:
    """For each wanted column the name of its field and its own name, from `NAME` or `FIELD=NAME`.

    Args:
        texts: as the operator wrote them.
        key: where; for the error.

    Raises:
        ConfigError: no batch can have such fields.
    """
    parts = [each.partition("=") for each in texts]
    pairs = [(field, column if sign else field) for field, sign, column in parts]
    check_names([field for field, _ in pairs], key)
    return pairs


def check_names(names: Sequence[str], key: str) -> None:
    """Refuse names that no batch can have.

    Raises:
        ConfigError: with the name.
    """
    for name in names:
        if not is_servable(name):
            raise ConfigError(
                f"no field can have the name {name!r:.100}: {TAKEN}; rename it in `{key}`: "
                "FIELD=COLUMN"
            )
        if names.count(name) > 1:
            raise ConfigError(f"`{key}` has {name!r:.100} twice")


def ragged_fields(lengths: Mapping[str, int], pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The names of the fields whose columns have the length 0.

    Args:
        lengths: by the names of columns.
        pairs: names of the fields, and of their columns; empty where both are the same.
    """
    ragged = {name for name, length in lengths.items() if not length}
    served = [field for field, column in pairs if column in ragged]
    return (*served, *sorted(ragged - {column for _, column in pairs}))
