"""A chain of transforms at work; pure. Runs in worker processes.

They follow from the job's seed, the epoch and the sample's id alone. So a sample is transformed
alike on any number of ranks, by any worker, and after any restart.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.transforms.transform import Cost, Field, Sample, Transform

_KEY = struct.Struct("<3Q")


class SampleGenerators:
    """Generators of random numbers for one sample after the other.

    One generator is seeded again and again: that takes 3 us, and a new one 14.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._state = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def of(self, seed: int, epoch: int, sample_id: int) -> np.random.Generator:
        """The generator of a sample; valid until the next call."""
        digest = hashlib.blake2b(_KEY.pack(seed, epoch, sample_id), digest_size=16).digest()
        state = self._state
        state["state"]["key"] = np.frombuffer(digest, "<u8")
        state["state"]["counter"] = np.zeros(4, np.uint64)
        self._bits.state = state  # with an empty buffer, as it was at first
        return self._generator


_COSTS: Sequence[Cost] = ("light", "heavy", "slow")
_MAX_RAGGED = 16  # the lengths of all samples of a portion must fit into one answer


class TransformFailed(Exception):
    """A transform refused a sample.

    Attributes:
        name: of the transform.
        reason: in words.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


class Chain:
    """Transforms applied one after the other.

    Attributes:
        made: the fields of the batch that they make.
        ragged: the names of those whose samples differ in length.
        passed: the fields that samples had before and that no transform makes or drops.
        read: the fields of the source that some transform reads.
        cost: of one sample, that of its most expensive transform.
    """

    def __init__(self, steps: Sequence[tuple[str, Transform]], source: Mapping[str, Field]) -> None:
        """Check that each transform finds the fields it needs.

        Args:
            steps: each transform with its name.
            source: the fields of a stored sample.

        Raises:
            ValueError: a transform needs an absent field, or the batch would have a field
                whose samples differ in more than the first length.
        """
        fields = dict(source)
        origin: dict[str, int] = {}  # the last transform that makes a field
        read: set[str] = set()
        for place, (name, transform) in enumerate(steps):
            where = f"transforms[{place}] ({name})"
            for needed in transform.inputs_of(fields):
                if needed not in fields:
                    there = ", ".join(fields) or "none"
                    raise ValueError(f"{where} needs the field {needed!r:.100}; there are {there}")
                if needed not in origin:
                    read.add(needed)
            try:
                made = dict(transform.outputs(fields))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            for dropped in transform.drops:
                fields.pop(dropped, None)
                origin.pop(dropped, None)
            fields |= made
            origin |= dict.fromkeys(made, place)
        self.made = {name: fields[name] for name in origin}
        for name, field in self.made.items():
            if None in field.shape[1:]:
                raise ValueError(
                    f"the samples of {name!r:.100} differ in shape {_shown(field)}. End with a "
                    "transform that gives them one, such as random_resized_crop or crop_or_pad, or "
                    "with flatten."
                )
        self.ragged = [name for name, field in self.made.items() if None in field.shape]
        if len(self.ragged) > _MAX_RAGGED:
            raise ValueError(
                f"{len(self.ragged)} fields differ in length; at most {_MAX_RAGGED} of a batch may"
            )
        self._origin = {name: steps[place][0] for name, place in origin.items()}
        self.passed = [name for name in source if name in fields and name not in origin]
        self.read = [name for name in source if name in read]
        costs: list[Cost] = [transform.cost for _, transform in steps]
        self.cost: Cost = max(costs, key=_COSTS.index, default="light")
        self._steps = [
            (name, transform, [key for key, last in origin.items() if last == place])
            for place, (name, transform) in enumerate(steps)
        ]

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """Make the fields of the batch for one sample.

        Args:
            sample: its stored fields; it is changed.
            rng: seeded for the sample.
            out: the memory of each field of `made` but the ragged ones, which `sample` has then.

        Raises:
            TransformFailed: names the transform.
        """
        for name, transform, last_for in self._steps:
            own = {key: out[key] for key in last_for if key in out}
            try:
                transform.apply(sample, rng, own)
            except MemoryError as error:
                raise TransformFailed(name, "it needs too much memory") from error
            except ValueError as error:
                raise TransformFailed(name, str(error)) from error
            except Exception as error:
                raise TransformFailed(name, f"{type(error).__name__}: {error}") from error
            sample.update(own)

    def scratch(self) -> Sample:
        """Memory for `out` of results that no caller reads."""
        made = self.made.items()
        return {
            name: np.empty([length or 0 for length in field.shape], field.dtype)
            for name, field in made
            if name not in self.ragged
        }

    def made_ragged(self, sample: Sample) -> list[npt.NDArray[Any]]:
        """Each ragged field of a sample to which the chain was applied.

        Raises:
            TransformFailed: one differs from the declaration of its transform.
        """
        found = []
        for name in self.ragged:
            value, shape = sample.get(name), self.made[name].shape
            if value is None or value.shape[1:] != shape[1:] or value.ndim != len(shape):
                what = "nothing" if value is None else f"the shape {_shown(value)}"
                raise TransformFailed(
                    self._origin[name],
                    f"it makes {what} for {name!r:.100}, and declares {_shown(self.made[name])}",
                )
            found.append(value)
        return found


def _shown(field: Field | npt.NDArray[Any]) -> str:
    return f"[{', '.join('*' if length is None else str(length) for length in field.shape)}]"
