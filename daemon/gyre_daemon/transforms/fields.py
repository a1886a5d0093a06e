"""Fields under another name, so that several transforms can begin with them, and fields that go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gyre_daemon.transforms.transform import Cost, Field, Sample, Transform


@dataclass(frozen=True)
class Copy(Transform):
    """Gives a sample one of its fields a second time; transforms change either alone.

    Attributes:
        field: which.
        to: the name of the second.
    """

    field: str
    to: str

    cost: ClassVar[Cost] = "light"

    def __post_init__(self) -> None:
        """Refuse one name for both."""
        if self.field == self.to:
            raise ValueError(f"field and to are both {self.to!r:.100}; give the copy its own name")

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
        return {self.to: fields[self.field]}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`: no transform writes to its inputs, so memory is shared."""
        self.put(self.to, sample[self.field], sample, out)


@dataclass(frozen=True)
class Drop(Transform):
    """Takes a field away from samples: batches do not have it.

    Attributes:
        field: which.
    """

    field: str

    cost: ClassVar[Cost] = "light"

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`."""
        return [self.field]

    @property
    def drops(self) -> Sequence[str]:
        """See `Transform.drops`."""
        return [self.field]

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return False

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        return {}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
