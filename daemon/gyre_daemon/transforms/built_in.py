"""Transforms of numbers, sequences and names of fields, and the step of a chain that caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from gyre_daemon.transforms.messages import dtype_of
from gyre_daemon.transforms.transform import Cost, Field, OneField, Sample, Transform

Floating = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Cast(OneField):
    """Makes floating-point numbers of numbers, rounded to the nearest ones.

    Attributes:
        field: numbers of any shape.
        dtype: of the result.
    """

    dtype: Floating

    cost: ClassVar[Cost] = "light"

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        before = fields[self.field]
        if before.dtype.kind not in "biuf":
            raise ValueError(f"{self.field!r:.100} is {before.dtype.name}, which cannot be cast")
        return {self.field: replace(before, dtype=dtype_of(self.dtype))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        if self.field in out:
            out[self.field][...] = sample[self.field]
        else:
            sample[self.field] = sample[self.field].astype(dtype_of(self.dtype))


@dataclass(frozen=True)
class Truncate(Transform):
    """Cuts sequences longer than a length; shorter ones stay as they are.

    Attributes:
        field: [n, ...], which becomes [min(n, length), ...].
        length: in elements.
        start: which part of a longer sequence stays: its `beginning`, its `center`, or a `random`
            one.
    """

    field: str
    length: Annotated[int, Meta(ge=1, le=1 << 30)]
    start: Literal["beginning", "center", "random"] = "beginning"

    cost: ClassVar[Cost] = "light"

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`."""
        return [self.field]

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return self.start == "random"

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        before = fields[self.field]
        if not before.shape:
            raise ValueError(f"{self.field!r:.100} is one number per sample, no sequence")
        if before.shape[0] is not None:
            return {self.field: _cut(before, min(before.shape[0], self.length))}
        most = min(before.max_length or self.length, self.length)
        return {self.field: _cut(before, None, most)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        self.put(self.field, self._kept(sample[self.field], rng), sample, out)

    def _kept(self, stored: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
        surplus = len(stored) - self.length
        begin = 0
        if surplus > 0 and self.start != "beginning":
            begin = surplus // 2 if self.start == "center" else int(rng.integers(surplus + 1))
        return stored[begin : begin + self.length]


@dataclass(frozen=True)
class CropOrPad(Truncate):
    """Gives sequences one length: longer ones lose elements, shorter ones are filled up.

    Attributes:
        field: [n, ...], which becomes [length, ...].
        value: fills up shorter sequences, at their end.
    """

    value: float = 0

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        ((_, made),) = super().outputs(fields).items()
        if made.dtype.kind in "iu":
            limits = np.iinfo(made.dtype.str)
            if self.value != int(self.value) or not limits.min <= self.value <= limits.max:
                raise ValueError(f"value is {self.value}, which is no {made.dtype.name}")
        return {self.field: _cut(made, self.length)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        stored = sample[self.field]
        kept = self._kept(stored, rng)
        into = out.get(self.field)
        if into is None:
            into = sample[self.field] = np.empty((self.length, *stored.shape[1:]), stored.dtype)
        into[: len(kept)] = kept
        into[len(kept) :] = self.value


def _cut(field: Field, length: int | None, max_length: int = 0) -> Field:
    """Boxes stay those of their image; an image no longer has all pixels of its file."""
    is_whole = field.is_whole and len(field.shape) != 3
    shape = (length, *field.shape[1:])
    return replace(field, shape=shape, is_whole=is_whole, max_length=max_length)


@dataclass(frozen=True)
class Copy(OneField):
    """Gives a sample one of its fields a second time; transforms change either alone.

    Attributes:
        field: which.
        to: the name of the second.
    """

    to: str

    cost: ClassVar[Cost] = "light"

    def __post_init__(self) -> None:
        """Refuse one name for both."""
        if self.field == self.to:
            raise ValueError(f"field and to are both {self.to!r:.100}; give the copy its own name")

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        return {self.to: fields[self.field]}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`: no transform writes to its inputs, so memory is shared."""
        self.put(self.to, sample[self.field], sample, out)


@dataclass(frozen=True)
class Drop(OneField):
    """Takes a field away from samples: batches do not have it.

    Attributes:
        field: which.
    """

    cost: ClassVar[Cost] = "light"

    @property
    def drops(self) -> Sequence[str]:
        """See `Transform.drops`."""
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        return {}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""


@dataclass(frozen=True)
class Cache(Transform):
    """Changes nothing: the node's cache keeps samples as they are here, see `kept`."""

    cost: ClassVar[Cost] = "light"

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`."""
        return ()

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return False

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        return {}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
