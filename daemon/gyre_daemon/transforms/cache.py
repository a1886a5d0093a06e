"""The step of a chain that caches its samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gyre_daemon.transforms.transform import Cost, Field, Sample, Transform


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
