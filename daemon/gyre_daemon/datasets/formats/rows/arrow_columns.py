"""The options and versions that formats with pyarrow's columns share."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from gyre_daemon.datasets.formats.names import ragged_fields, renamed
from gyre_daemon.datasets.formats.schemas import SchemaOptions
from gyre_daemon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which columns are served.

    Attributes:
        pairs: names of the fields, and of their columns; empty for all columns.
        may_lack: whether a file may lack some; columns of the type null are lacking, too.
        lengths: of lists that all have one, by the names of their columns.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    may_lack: bool = False
    lengths: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ColumnOptions(SchemaOptions):
    """The keys of an `arrow` or `parquet` dataset.

    Attributes:
        columns: names of the columns to serve, such as `text`, or `label=class` to serve the column
            `class` under the name `label`; empty for all.
        lengths: of columns of lists whose rows all have this many elements, which then are arrays
            of one shape, also where shards are appended; 0 where they stay ragged.
    """

    columns: tuple[str, ...] = ()
    lengths: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse fields that no batch can have."""
        SchemaOptions.__post_init__(self)
        renamed(self.columns, "columns")
        for name, length in self.lengths.items():
            if length < 0:
                raise ConfigError(f"`lengths` of {name!r:.100} must be at least 0 (got {length})")

    @property
    def wanted(self) -> Wanted:
        """The chosen columns."""
        pairs = tuple(renamed(self.columns, "columns"))
        lengths = {name: length for name, length in self.lengths.items() if length}
        return Wanted(pairs, self.schema == "union", tuple(sorted(lengths.items())))

    @property
    def ragged(self) -> tuple[str, ...]:
        """See `Scan.ragged`."""
        return ragged_fields(self.lengths, renamed(self.columns, "columns"))


def require_pyarrow(name: str) -> None:
    """Refuse a format of this name where pyarrow is not installed.

    Raises:
        ConfigError: names the extra.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"the format {name} needs pyarrow, which is not installed. "
            'Run pip install "gyre-ml[arrow]".'
        )


def scan_version(version: str, wanted: Wanted) -> str:
    """A version of scans that changes with their code and with the chosen columns."""
    union = ["union"] * wanted.may_lack
    pairs = [f"{field}={column}" for field, column in wanted.pairs]
    return " ".join([version, *union, *pairs, *(f"{name}:{size}" for name, size in wanted.lengths)])
