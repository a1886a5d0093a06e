"""Transforms of sequences: text, tokens, and other fields whose samples differ in length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from gyre_daemon.transforms.transform import Cost, Field, Sample, Transform


@dataclass(frozen=True)
class CropOrPad(Transform):
    """Gives sequences one length: longer ones lose elements, shorter ones are filled up.

    Attributes:
        field: [n, ...], which becomes [length, ...].
        length: in elements.
        start: which part of a longer sequence stays: its `beginning`, its `center`, or a `random`
            one.
        value: what shorter sequences are filled up with, at their end.
    """

    field: str
    length: Annotated[int, Meta(ge=1, le=1 << 30)]
    start: Literal["beginning", "center", "random"] = "beginning"
    value: float = 0

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
        if before.dtype.kind in "iu":
            limits = np.iinfo(before.dtype.str)
            if self.value != int(self.value) or not limits.min <= self.value <= limits.max:
                raise ValueError(f"value is {self.value}, which is no {before.dtype.name}")
        return {self.field: Field(before.dtype, (self.length, *before.shape[1:]))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        stored = sample[self.field]
        surplus = len(stored) - self.length
        begin = 0
        if surplus > 0 and self.start != "beginning":
            begin = surplus // 2 if self.start == "center" else int(rng.integers(surplus + 1))
        kept = stored[begin : begin + self.length]
        into = out.get(self.field)
        if into is None:
            into = sample[self.field] = np.empty((self.length, *stored.shape[1:]), stored.dtype)
        into[: len(kept)] = kept
        into[len(kept) :] = self.value
