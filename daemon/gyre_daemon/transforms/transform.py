"""The interface between transforms and the daemon."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

# The cost of a sample: `light` some microseconds, `heavy` about 1 ms, `slow` more than 10 ms.
# It decides how many samples a worker process is given at once.
Cost = Literal["light", "heavy", "slow"]
Sample = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a sample.

    Attributes:
        dtype: of its elements.
        shape: of one sample; None for a length in which samples differ.
        is_whole: of an image: whether its pixels are those of its file, one by one. A transform of
            it makes another field, which does not say so. Of boxes: whether nothing has moved them.
        image: of boxes and of a mask: the image that they belong to; empty if undeclared.
        is_index: of an image: whether its pixels are numbers, such as those of classes.
        is_final: of boxes: whether they no longer move with their image.
        is_normalized: of boxes: whether they are parts of its width and height.
        max_length: the most elements of a sample where samples differ in length; 0 if unknown.
            With it, no length has to be measured before a job begins.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int | None, ...]
    is_whole: bool = False
    image: str = ""
    is_index: bool = False
    is_final: bool = False
    is_normalized: bool = False
    max_length: int = 0


class Transform(ABC):
    """One step from stored fields to the fields of a batch.

    A subclass is a dataclass whose fields are its options. This one keeps every n-th element:

        @dataclass(frozen=True)
        class EveryNth(Transform):
            field: str
            step: int = 2
            length: int = 16

            @property
            def inputs(self):
                return [self.field]

            def outputs(self, fields):
                return {self.field: Field(fields[self.field].dtype, (self.length,))}

            def apply(self, sample, rng, out):
                self.put(self.field, sample[self.field][:: self.step][: self.length], sample, out)

    An exception of `apply` makes the sample a corrupt one.

    Attributes:
        version: of its results. Another version gives other samples, so that cursors do not fit.
        cost: of one sample.
    """

    version: ClassVar[int] = 1
    cost: ClassVar[Cost] = "heavy"

    @property
    @abstractmethod
    def inputs(self) -> Sequence[str]:
        """The fields that it reads."""

    def inputs_of(self, fields: Mapping[str, Field]) -> Sequence[str]:
        """The fields that it reads of those that a sample has before; asked before `outputs`."""
        return self.inputs

    @property
    def drops(self) -> Sequence[str]:
        """The fields that a sample no longer has afterwards."""
        return ()

    @property
    def is_random(self) -> bool:
        """Whether `apply` may draw random numbers. Only outputs without them can be cached."""
        return True

    @abstractmethod
    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """The fields that it makes, new ones or others in place of those of the same name.

        Args:
            fields: those that a sample has before.

        Raises:
            ValueError: its options do not fit these fields.
        """

    @abstractmethod
    def apply(self, sample: Sample, rng: "np.random.Generator", out: Sample) -> None:
        """Make the outputs for one sample; `put` stores one.

        Args:
            sample: the fields that it has so far. Stored bytes are uint8 [n] and read-only.
            rng: seeded for this sample alone, by the job's seed, the epoch and the sample's id. All
                transforms of a chain draw from it in their order.
            out: the memory of those outputs among the fields of the batch.

        Raises:
            ValueError: the sample is damaged; says how.
        """

    @property
    def engines(self) -> Sequence[str]:
        """Installed programs that may do the same faster, the fastest first.

        The daemon uses one if it makes the same of the dataset's first samples.
        """
        return ()

    def with_engine(self, engine: str) -> "Transform":
        """The transform by an engine; itself if it has no such engine.

        Raises:
            ValueError: the engine cannot do it.
        """
        return self

    @staticmethod
    def put(name: str, value: npt.NDArray[Any], sample: Sample, out: Sample) -> None:
        """Store an output: in the batch if it is a field of that, else for the next transforms."""
        if name in out:
            out[name][...] = value
        else:
            sample[name] = value


class TooLarge(ValueError):
    """A file may be sound, and declares more than is decoded."""


@dataclass(frozen=True)
class OneField(Transform):
    """A transform that reads one field, and draws no random numbers.

    Attributes:
        field: its name.
    """

    field: str

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field]

    @property
    def is_random(self) -> bool:
        return False


@dataclass(frozen=True)
class OfField(Transform):
    """A transform that makes others of one field, which samples no longer have afterwards.

    Attributes:
        field: its name.
    """

    field: str

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field]

    @property
    def drops(self) -> Sequence[str]:
        return [self.field]

    def require_bytes(self, fields: Mapping[str, Field]) -> None:
        """Refuse a field other than the bytes of files.

        Raises:
            ValueError: it has another dtype, or one shape.
        """
        stored = fields[self.field]
        if stored.dtype != np.uint8 or stored.shape != (None,):
            raise ValueError(f"{self.field!r:.100} is {stored.dtype.name}, no bytes of files")
