"""The entry of each format in the list of formats, by its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gyre_daemon.config import parse_options
from gyre_daemon.datasets.formats.base import Format
from gyre_daemon.datasets.formats.listed import ListedFormat


def _never(_head: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """A known format.

    Attributes:
        pattern: of the names of its shards; empty if no name says that this is the format.
        make: takes the keys of a dataset's configuration, and the place of the keys for error
            messages.
        recognises: takes up to 512 first bytes of a file, and says whether only this format begins
            so. Never, if its files have no signature.
        keys: that `make` knows.
        ambiguous_pattern: of names that other files have, too; such files are shards only where
            a folder has none of the pattern.
    """

    pattern: str
    make: Callable[[Mapping[str, Any], str], Format | ListedFormat]
    recognises: Callable[[bytes], bool] = _never
    keys: frozenset[str] = frozenset()
    ambiguous_pattern: str = ""

    @classmethod
    def of(cls, format_class: type[Any], options: type[Any]) -> "FormatEntry":
        """The entry of a class of formats.

        Args:
            format_class: has a `pattern`, and is made from its options. It may have `recognises`
                and an `ambiguous_pattern`.
            options: a dataclass with the keys of a dataset, and their defaults.
        """
        return cls(
            format_class.pattern,
            lambda keys, where: format_class(parse_options(options, keys, where)),
            getattr(format_class, "recognises", _never),
            frozenset(each.name for each in fields(options)),
            getattr(format_class, "ambiguous_pattern", ""),
        )
