"""A function of a training script as a transform; only private daemons run it.

[Note: Functions of a script] The client pickles a function into a file in the private daemon's
folder. Its fields are known only when it has run. So the client first asks for one sample of the
chain that ends with the function and has no `fields`: its only field is `LEARNT`, JSON of the
function's result. That becomes the option `fields`, and any other result is a corrupt sample; first
lengths vary only where the client says so. More samples would still be a guess, right or wrong by
chance; this one fails at once, with the line to write. A fingerprint of transforms has the option
`function`, the digest of the source and of captured values, but not the path of the file.
"""

import json
import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gyre_daemon.runtime.plug_ins import load_script_object
from gyre_daemon.transforms.transform import Cost, Field, Sample, Transform

LEARNT, LEARNT_BYTES = "learnt", 16 << 10
VARIES = -1  # a first length in which samples differ


@dataclass(frozen=True)
class MadeByFunction:
    """One field of the result.

    Attributes:
        dtype: numpy's name of it.
        shape: of one sample; the first length may be `VARIES`.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PythonFunction(Transform):
    """Replaces a sample's fields by the fields that a function returns.

    Attributes:
        title: the function's name.
        function: digest of the function.
        payload: absolute path of the file.
        is_drawing: whether the function takes a random generator.
        fields: of the results, by name; none to learn them.
    """

    title: str
    function: str
    payload: str
    is_drawing: bool
    fields: Mapping[str, MadeByFunction]

    cost: ClassVar[Cost] = "heavy"

    def __post_init__(self) -> None:
        """Load the function.

        Raises:
            ValueError: it cannot be loaded.
        """
        try:
            call, lines = load_script_object(self.payload)
        except MemoryError as error:
            raise ValueError(
                f"{self.title} cannot be loaded in a worker: it captures more than a worker may "
                "have, 2 GiB. Read files inside the function, or map them with numpy.memmap"
            ) from error
        except Exception as error:
            raise ValueError(
                f"{self.title} cannot be loaded in a worker: {type(error).__name__}: {error!s:.300}"
            ) from error
        self._set(call=call, lines=lines, names=())

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`: all fields."""
        return ()

    def inputs_of(self, fields: Mapping[str, Field]) -> Sequence[str]:
        """See `Transform.inputs_of`."""
        return list(fields)

    @property
    def drops(self) -> Sequence[str]:
        """See `Transform.drops`."""
        return self._names

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return self.is_drawing

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        self._set(names=tuple(fields))
        if not self.fields:
            return {LEARNT: Field(np.dtype(np.uint8), (LEARNT_BYTES,))}
        return {
            name: Field(
                np.dtype(made.dtype),
                tuple(None if length == VARIES else length for length in made.shape),
            )
            for name, made in self.fields.items()
        }

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        returned = self._returned({name: sample[name] for name in self._names}, rng)
        if self.fields:
            self._check(returned)
            for name, value in returned.items():
                self.put(name, value, sample, out)
            return
        learnt = json.dumps({name: [v.dtype.name, v.shape] for name, v in returned.items()})
        if len(learnt) > LEARNT_BYTES:
            raise ValueError(f"{self.title} returns {len(returned)} fields. Return fewer")
        text = np.frombuffer(learnt.ljust(LEARNT_BYTES).encode(), np.uint8)
        self.put(LEARNT, text, sample, out)

    def _returned(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """The function's results for a sample, as arrays.

        Raises:
            ValueError: it fails, or returns no dict of arrays.
        """
        try:
            found = self._call(sample, rng=rng) if self.is_drawing else self._call(sample)
        except Exception as error:
            told = self._told(error)
            if isinstance(error, KeyError) and not sample.keys() & error.args:
                told += f"; the sample has {', '.join(sorted(sample))}"
            raise ValueError(f"{self.title}: {told}") from error
        if not isinstance(found, Mapping) or not found:
            raise ValueError(
                f"{self.title} returned {type(found).__name__}, not a dict of arrays. Return one"
            )
        arrays = {}
        for name, value in found.items():
            array = np.asarray(value)
            if not isinstance(name, str) or array.dtype.kind not in "biuf":
                raise ValueError(
                    f"{self.title}: the field {name!r:.100} is {type(value).__name__}, not an "
                    "array of numbers. Return arrays by name"
                )
            arrays[name] = array
        return arrays

    def _check(self, returned: Mapping[str, npt.NDArray[Any]]) -> None:
        """Compare a result with the fields.

        Raises:
            ValueError: names the field that differs.
        """
        for name in {**self.fields, **returned}:
            made, value = self.fields.get(name), returned.get(name)
            if made is None or value is None:
                how = "returned" if made is None else "left out"
                raise ValueError(
                    f"{self.title}: {name!r:.100} is {how} for this sample, and was not for the "
                    "one that fields are learnt from. Return the same fields for every sample"
                )
            is_varying = made.shape[:1] == (VARIES,)
            expected = (value.shape[:1] if is_varying else made.shape[:1]) + made.shape[1:]
            if value.dtype.name != made.dtype or value.shape != expected:
                raise ValueError(
                    f"{self.title}: {name!r:.100} is {value.dtype.name} {list(value.shape)}, and "
                    f"was {made.dtype} {list(made.shape)} for the sample that fields are learnt "
                    f"from. If its length varies, pass {{'name': {self.title}, 'max_length': "
                    f"{{{name!r:.100}: N}}}}; None for N has the lengths measured"
                )

    def _told(self, error: Exception) -> str:
        """An error of the function and the line of the script that raised it."""
        text = f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is this file's
        if not frames:
            return text
        last = next((each for each in reversed(frames) if each.filename in self._lines), frames[-1])
        number = last.lineno or 0
        first, lines = self._lines.get(last.filename, (1, []))
        known = 0 <= number - first < len(lines)
        line = lines[number - first] if known else linecache.getline(last.filename, number)
        return f"{text} ({last.filename}, line {number}: {line.strip()})"

    _call: ClassVar[Callable[..., Any]]
    _lines: ClassVar[dict[str, tuple[int, list[str]]]]
    _names: ClassVar[tuple[str, ...]]

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, f"_{name}", value)  # it is frozen
