"""The fields of the samples of tar shards, and the place of each field of each sample.

A field is named after the extension of its members. `jpg;png` takes whichever of the two a sample
has, `jpg` before `png`. Its name is then `jpg`, or `image` if it is written `image=jpg;png`.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, CodecName
from gyre_daemon.datasets.formats.names import TAKEN, is_servable
from gyre_daemon.datasets.formats.webdataset.scan import codec_of, corrupt, num_samples
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.storage.shard import Shard

_NAMES_ARE_TAKEN = f"{TAKEN}; name the other `fields` to serve, or rename it: `NAME=EXTENSION`"


@dataclass(frozen=True, slots=True)
class TarField:
    """A field to serve.

    Attributes:
        name: of the tensor.
        extensions: of the members that may hold it, the preferred one first.
        is_optional: whether samples may lack it.
    """

    name: str
    extensions: tuple[str, ...]
    is_optional: bool

    @property
    def codec(self) -> CodecName:
        """How it is stored; all of its extensions are stored in the same way."""
        return codec_of(self.extensions[0])

    @property
    def members(self) -> str:
        """Its extensions, for messages."""
        return " or ".join(f".{extension}" for extension in self.extensions)


@dataclass(frozen=True, slots=True)
class TarShard:
    """A shard and its scan; see `scan_tar` for the arrays and for `meta`."""

    shard: Shard
    scan: Arrays
    meta: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The shard's name."""
        return self.shard.name

    @property
    def num_samples(self) -> int:
        """How many samples the shard has."""
        return num_samples(self.scan)


@dataclass(frozen=True, slots=True)
class FieldLocations:
    """The places of one field of the n samples of a shard.

    Attributes:
        start: int64 [n], first byte; the sample's own first byte if it lacks the field.
        size: int64 [n], in bytes; 0 if the sample lacks the field.
        member: int64 [n], which member of the shard holds it; -1 if the sample lacks the field.
    """

    start: Int64Array
    size: Int64Array
    member: Int64Array


def parse_fields(texts: Sequence[str], optional: Sequence[str]) -> tuple[TarField, ...]:
    """The fields that a configuration names.

    Raises:
        ConfigError: no batch can have them, or they contradict each other.
    """
    fields = tuple(_parse_field(text, optional) for text in texts)
    names = [field.name for field in fields]
    for field in fields:
        if not is_servable(field.name) or not all(field.extensions):
            raise ConfigError(
                f"a webdataset cannot serve a field `{field.name}`: {_NAMES_ARE_TAKEN}"
            )
        if len({codec_of(extension) for extension in field.extensions}) > 1:
            raise ConfigError(
                f"field `{field.name}` cannot be {field.members}: they are stored in different ways"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"fields of a webdataset names one twice: {', '.join(names)}")
    for name in optional:
        if fields and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"they are {', '.join(names)}"
            raise ConfigError(
                f"optional of a webdataset has `{name}`, which is none of its fields; {hint}"
            )
    return fields


def all_fields(shards: Sequence[TarShard], optional: Sequence[str]) -> tuple[TarField, ...]:
    """A field for every extension that any sample has, in order of appearance.

    Optional fields that no sample has come last.
    """
    found: dict[str, None] = {}
    for shard in shards:
        for extension in shard.meta["extensions"]:
            if not is_servable(extension):
                reason = f"it has members .{ascii(extension)[1:-1]}: {_NAMES_ARE_TAKEN}"
                raise corrupt(shard.name, int(shard.scan["start"][0]), reason)
            found[extension] = None
    names = dict.fromkeys([*found, *optional])
    return tuple(TarField(name, (name,), name in optional) for name in names)


def check_members(shard: TarShard, field: TarField) -> None:
    """Check that all members of a field can be served.

    Raises:
        CorruptSample: with shard and field.
    """
    unsound = shard.meta["unsound"]
    for extension in field.extensions:
        if extension in unsound:
            offset, reason = unsound[extension]
            raise corrupt(shard.name, offset, reason, field=field.name)


def check_complete(shard: TarShard, field: TarField) -> None:
    """Check that no sample lacks a required field.

    Raises:
        CorruptSample: with shard, sample and field.
    """
    extensions = shard.meta["extensions"]
    if field.is_optional:
        return
    numbers = {extensions.index(name) for name in field.extensions if name in extensions}
    lacking = [kind for kind in shard.meta["kinds"] if numbers.isdisjoint(kind[0])]
    if lacking:
        _, _, offset, key = min(lacking, key=lambda kind: int(kind[1]))
        reason = (
            f"sample `{key}` has no member {field.members}; name the fields that all samples have "
            f'(`fields`), or those that some may lack (`optional = ["{field.name}"]`)'
        )
        if all(len(kind[0]) == 1 for kind in shard.meta["kinds"]) and len(extensions) > 1:
            reason = (
                f"sample `{key}` has no member {field.members}: every sample has one member. Those "
                "of a sample have one name up to its first dot, folders included, and follow each "
                "other; name them so and write the shard with `tar --sort=name`"
            )
        raise corrupt(shard.name, offset, reason, field=field.name, key=key)


def locate_field(shard: TarShard, field: TarField) -> FieldLocations:
    """The places of a field in the samples of a shard."""
    scan, extensions = shard.scan, shard.meta["extensions"]
    sample = np.searchsorted(scan["first"], np.arange(len(scan["start"])), side="right") - 1
    member = np.full(shard.num_samples, -1, np.int64)
    for extension in reversed(field.extensions):
        if extension in extensions:
            its = np.flatnonzero(scan["extension"] == extensions.index(extension))
            member[sample[its]] = its
    source = np.where(member < 0, scan["first"][:-1], member)
    size = np.where(member < 0, 0, scan["size"][source])
    return FieldLocations(scan["start"][source], size, member)


def check_inside(shard: TarShard) -> None:
    """Check that an index points into its shard: its numbers become addresses.

    Raises:
        CorruptSample: it does not.
    """
    start, size = shard.scan["start"], shard.scan["size"]
    if ((start < 0) | (size < 0) | (start > shard.shard.size_bytes - size)).any():
        raise corrupt(shard.name, 0, "its index points outside it; remove the index")


def _parse_field(text: str, optional: Sequence[str]) -> TarField:
    name, equals, rest = text.partition("=")
    extensions = tuple(part.strip() for part in (rest if equals else text).split(";"))
    name = name.strip() if equals else extensions[0]
    return TarField(name, extensions, name in optional)
