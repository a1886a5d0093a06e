"""Numbers of another dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from gyre_daemon.transforms.messages import dtype_of
from gyre_daemon.transforms.transform import Cost, Field, Sample, Transform

Floating = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Cast(Transform):
    """Makes floating-point numbers of numbers, rounded to the nearest ones.

    Attributes:
        field: numbers of any shape.
        dtype: of the result.
    """

    field: str
    dtype: Floating

    cost: ClassVar[Cost] = "light"

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`."""
        return [self.field]

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return False

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
