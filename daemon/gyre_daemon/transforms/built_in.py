"""Transforms of numbers, sequences and names of fields, functions of scripts, and the step `cache`.

[Note: Functions of a script] Only private daemons run them. The client pickles a function into a
file in the private daemon's folder. Its fields are known only when it has run. So the client first
asks for one sample of the chain that ends with the function and has no `fields`: its only field is
`LEARNT`, JSON of the function's result. That becomes the option `fields`, and any other result is a
corrupt sample; first lengths vary only where the client says so. More samples would still be a
guess, right or wrong by chance; this one fails at once, with the line to write. A fingerprint of
transforms has the option `function`, the digest of the source and of captured values, but not the
path of the file.
"""

import json
import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from gyre_daemon.runtime.plug_ins import load_script_object
from gyre_daemon.transforms.recipes import (
    Cost,
    Field,
    OneField,
    Sample,
    Transform,
    dtype_of,
    set_of,
)

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
        before = fields[self.field]
        if before.dtype.kind not in "biuf":
            raise ValueError(f"{self.field!r:.100} is {before.dtype.name}, which cannot be cast")
        return {self.field: replace(before, dtype=dtype_of(self.dtype))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
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
        masks: fields to cut alike, which have a value for each element of `field`.
    """

    field: str
    length: Annotated[int, Meta(ge=1, le=1 << 30)]
    start: Literal["beginning", "center", "random"] = "beginning"
    masks: tuple[str, ...] = ()

    cost: ClassVar[Cost] = "light"

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field, *self.masks]

    @property
    def is_random(self) -> bool:
        return self.start == "random"

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        if len({*self.inputs}) < len(self.inputs):
            raise ValueError(f"masks are {self.masks}; name each once, and no {self.field!r:.100}")
        if self.is_random:
            self._check_masks(fields)
        return {name: self._made_of(name, fields[name]) for name in self.inputs}

    def _check_masks(self, fields: Mapping[str, Field]) -> None:
        """Refuse a random cut that would leave a mask, or cut it elsewhere."""
        if fields[self.field].dtype == np.bool_:
            raise ValueError(
                f"{self.field!r:.100} is a mask, and would be cut elsewhere than its sequence. "
                "Name it in `masks` of the step that cuts the sequence"
            )
        for name in fields.keys() - self.inputs:
            if fields[name].dtype == np.bool_ and fields[name].shape == (None,):
                raise ValueError(
                    f"the mask {name!r:.100} would not be cut with {self.field!r:.100}. Name it "
                    "in `masks`, or drop it before"
                )

    def _made_of(self, name: str, before: Field) -> Field:
        if not before.shape:
            raise ValueError(f"{name!r:.100} is one number per sample, no sequence")
        if before.shape[0] is not None:
            return _cut(before, min(before.shape[0], self.length))
        return _cut(before, None, min(before.max_length or self.length, self.length))

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        for name, kept in self._kept(sample, rng).items():
            self.put(name, kept, sample, out)

    def _kept(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """The same part of the sequence and of its masks."""
        length = len(sample[self.field])
        for name in self.masks:
            if len(sample[name]) != length:
                raise ValueError(
                    f"the mask {name!r:.100} has {len(sample[name])} elements, and "
                    f"{self.field!r:.100} has {length}"
                )
        surplus, begin = length - self.length, 0
        if surplus > 0 and self.start != "beginning":
            begin = surplus // 2 if self.start == "center" else int(rng.integers(surplus + 1))
        return {name: sample[name][begin : begin + self.length] for name in self.inputs}


@dataclass(frozen=True)
class CropOrPad(Truncate):
    """Gives sequences one length: longer ones lose elements, shorter ones are filled up.

    Attributes:
        field: [n, ...], which becomes [length, ...].
        value: fills up shorter sequences, at their end; masks are filled with 0.
    """

    value: float = 0

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        made = super().outputs(fields)
        dtype = made[self.field].dtype
        if dtype.kind in "iu":
            limits = np.iinfo(dtype.str)
            if self.value != int(self.value) or not limits.min <= self.value <= limits.max:
                raise ValueError(f"value is {self.value}, which is no {dtype.name}")
        return {name: _cut(field, self.length) for name, field in made.items()}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        for name, kept in self._kept(sample, rng).items():
            into = out.get(name)
            if into is None:
                into = sample[name] = np.empty((self.length, *kept.shape[1:]), kept.dtype)
            into[: len(kept)] = kept
            into[len(kept) :] = self.value if name == self.field else 0


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
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        return {}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""


@dataclass(frozen=True)
class Cache(Transform):
    """Changes nothing: the node's cache keeps samples as they are here, see `kept`."""

    cost: ClassVar[Cost] = "light"

    @property
    def inputs(self) -> Sequence[str]:
        return ()

    @property
    def is_random(self) -> bool:
        return False

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        return {}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""


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
        set_of(self, _call=call, _lines=lines)

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`: all fields."""
        return ()

    def inputs_of(self, fields: Mapping[str, Field]) -> Sequence[str]:
        return list(fields)

    @property
    def drops(self) -> Sequence[str]:
        return self._names

    @property
    def is_random(self) -> bool:
        return self.is_drawing

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        set_of(self, _names=tuple(fields))
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
        """The function's results for a sample, as arrays."""
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
        """Compare a result with the fields."""
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
    _names: ClassVar[tuple[str, ...]] = ()
