"""Which fields the samples of tar shards have, and where each field of each sample lies.

A field is called by the extension of its members. Where samples may have one of several, `jpg;png` takes whichever is there,
the first of them before the others, and is called by the first, or `image` where it is written `image=jpg;png`.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import MASK, OFFSETS_SUFFIX, PRESENT_SUFFIX, SAMPLE_ID, SHAPE_SUFFIX, Arrays, Codec
from gyre_daemon.datasets.formats.tarscan import codec_of, corrupt
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.shard import Shard

_SUFFIXES = (OFFSETS_SUFFIX, PRESENT_SUFFIX, SHAPE_SUFFIX)
UNSERVABLE = (
    f"a batch has {SAMPLE_ID}, {MASK} and offsets of its own, and names that end with {', '.join(_SUFFIXES)}; name the other "
    "`fields` to serve, or call it otherwise: `NAME=EXTENSION`"
)

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TarField:
    """A field that is to be served.

    Attributes:
        name: of the tensor.
        extensions: of the members that may hold it, the preferred one first.
        is_optional: samples may lack it.
    """

    name: str
    extensions: tuple[str, ...]
    is_optional: bool

    @property
    def codec(self) -> Codec:
        """How it is stored: all alternatives in the same way."""
        return codec_of(self.extensions[0])

    @property
    def members(self) -> str:
        """As an error tells it."""
        return " or ".join(f".{extension}" for extension in self.extensions)


@dataclass(frozen=True, slots=True)
class ScannedShard:
    """A shard, and what its scan found."""

    shard: Shard
    scan: Arrays
    meta: Mapping[str, Any]

    @property
    def num_samples(self) -> int:
        """In it."""
        return len(self.scan["first"]) - 1


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a shard's samples.

    Attributes:
        start: int64 [n], first byte; where a sample lacks the field, that of the sample.
        size: int64 [n], in bytes.
        member: int64 [n], which member of the shard holds it; -1 where the sample lacks it.
    """

    start: _Integers
    size: _Integers
    member: _Integers


def parse_fields(texts: Sequence[str], optional: Sequence[str]) -> tuple[TarField, ...]:
    """The fields that an operator wrote.

    Raises:
        ConfigError: no batch can have them, or they contradict each other.
    """
    fields = tuple(_parse(text, optional) for text in texts)
    names = [field.name for field in fields]
    for field in fields:
        if not is_servable(field.name) or not all(field.extensions):
            raise ConfigError(f"a webdataset cannot serve a field `{field.name}`: {UNSERVABLE}")
        if len({codec_of(extension) for extension in field.extensions}) > 1:
            raise ConfigError(f"field `{field.name}` cannot be {field.members}: they are stored in different ways")
    if len(set(names)) < len(names):
        raise ConfigError(f"fields of a webdataset names one twice: {', '.join(names)}")
    for name in optional:
        if fields and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"they are {', '.join(names)}"
            raise ConfigError(f"optional of a webdataset has `{name}`, which is none of its fields; {hint}")
    return fields


def is_servable(name: str) -> bool:
    """Whether a batch can have a field of this name beside its own tensors."""
    return name.isprintable() and name != "" and name not in (SAMPLE_ID, MASK) and not name.endswith(_SUFFIXES)


def all_fields(shards: Sequence[ScannedShard], optional: Sequence[str]) -> tuple[TarField, ...]:
    """Every extension that any sample has, in the order in which they are met; and what may be missing from all."""
    found: dict[str, None] = {}
    for each in shards:
        for extension in each.meta["extensions"]:
            if not is_servable(extension):
                reason = f"it has members .{ascii(extension)[1:-1]}: {UNSERVABLE}"
                raise corrupt(each.shard.name, int(each.scan["start"][0]), reason)
            found[extension] = None
    return tuple(
        TarField(name, (name,), name in optional) for name in [*found, *(name for name in optional if name not in found)]
    )


def check_members(each: ScannedShard, field: TarField) -> None:
    """See that the members of a field can be served, and that every sample has one, unless it may lack it.

    Raises:
        CorruptSample: names shard, sample and field.
    """
    for extension in field.extensions:
        if extension in each.meta["unsound"]:
            offset, reason = each.meta["unsound"][extension]
            raise corrupt(each.shard.name, offset, reason, field=field.name)
    if field.is_optional:
        return
    numbers = {each.meta["extensions"].index(name) for name in field.extensions if name in each.meta["extensions"]}
    lacking = [kind for kind in each.meta["kinds"] if numbers.isdisjoint(kind[0])]
    if lacking:
        _, _, offset, key = min(lacking, key=lambda kind: int(kind[1]))
        reason = (
            f"sample `{key}` has no member {field.members}; name the fields that all samples have (`fields`), or those that "
            f'some may lack (`optional = ["{field.name}"]`)'
        )
        raise corrupt(each.shard.name, offset, reason, field=field.name, key=key)


def column(each: ScannedShard, field: TarField) -> Column:
    """Where a field lies in each sample of a shard."""
    scan, extensions = each.scan, each.meta["extensions"]
    sample = np.searchsorted(scan["first"], np.arange(len(scan["start"])), side="right") - 1
    member = np.full(each.num_samples, -1, np.int64)
    for extension in reversed(field.extensions):
        if extension in extensions:
            its = np.flatnonzero(scan["extension"] == extensions.index(extension))
            member[sample[its]] = its
    source = np.where(member < 0, scan["first"][:-1], member)
    return Column(scan["start"][source], np.where(member < 0, 0, scan["size"][source]), member)


def check_inside(each: ScannedShard) -> None:
    """See that an index points into its shard: addresses are made of its numbers.

    Raises:
        CorruptSample: it does not.
    """
    start, size = each.scan["start"], each.scan["size"]
    if ((start < 0) | (size < 0) | (start > each.shard.size_bytes - size)).any():
        raise corrupt(each.shard.name, 0, "its index points outside it; remove the index")


def _parse(text: str, optional: Sequence[str]) -> TarField:
    name, equals, rest = text.partition("=")
    extensions = tuple(part.strip() for part in (rest if equals else text).split(";"))
    name = name.strip() if equals else extensions[0]
    return TarField(name, extensions, name in optional)
