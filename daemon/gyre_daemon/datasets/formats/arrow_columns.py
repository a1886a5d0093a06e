"""What formats have in common whose columns pyarrow reads."""

import importlib.util
from dataclasses import dataclass

from gyre_daemon.datasets.formats.names import renamed
from gyre_daemon.datasets.formats.schemas import SchemaOptions
from gyre_daemon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which columns are served.

    Attributes:
        pairs: names of the fields, and of their columns; empty for all columns.
        may_lack: whether a file may lack some; columns of the type null are lacking, too.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    may_lack: bool = False


@dataclass(frozen=True, slots=True)
class ColumnOptions(SchemaOptions):
    """The keys of an `arrow` or `parquet` dataset.

    Attributes:
        columns: names of the columns to serve, such as `text`, or `label=class` to serve the column
            `class` under the name `label`; empty for all.
    """

    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse fields that no batch can have."""
        SchemaOptions.__post_init__(self)
        renamed(self.columns, "columns")

    @property
    def wanted(self) -> Wanted:
        """The columns that are chosen."""
        return Wanted(tuple(renamed(self.columns, "columns")), self.schema == "union")


def require_pyarrow(name: str) -> None:
    """Refuse a format of this name where pyarrow is not installed.

    Raises:
        ConfigError: names the extra, which is called as the format is.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f'the format {name} needs the extra of that name: pip install "gyre-ml[{name}]"'
        )


def scan_version(version: str, wanted: Wanted) -> str:
    """What changes with what a scan finds: its own version, and the columns that are chosen."""
    union = ["union"] * wanted.may_lack
    return " ".join([version, *union, *(f"{field}={column}" for field, column in wanted.pairs)])
