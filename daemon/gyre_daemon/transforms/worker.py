"""Runs chains of transforms in a compute worker.

A process answers the requests of `recipes`, one after the other. It reads bytes that anybody may
have written, with large libraries and the code of others. Random numbers follow from the job's
seed, the epoch and the sample's id alone. So a sample is transformed alike on any number of ranks,
by any worker, and after any restart.
"""

import contextlib
import functools
import hashlib
import importlib
import mmap
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.config.schema import parse_options
from gyre_daemon.errors import ConfigError
from gyre_daemon.transforms.recipes import (
    ENCODER,
    HEAD,
    PORTION_DECODER,
    RECIPE_DECODER,
    Cost,
    Described,
    Done,
    Field,
    Kind,
    MadeField,
    Output,
    Portion,
    Recipe,
    Sample,
    Step,
    Transform,
    dtype_of,
    name_of,
    own_target,
    shown,
)

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
                    f"the samples of {name!r:.100} differ in shape {shown(field.shape)}. End with "
                    "a transform that gives them one, such as random_resized_crop or crop_or_pad, "
                    "or with flatten."
                )
        self.ragged = [name for name, field in self.made.items() if None in field.shape]
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
                what = "nothing" if value is None else f"the shape {shown(value.shape)}"
                raise TransformFailed(
                    self._origin[name],
                    f"it makes {what} for {name!r:.100}, and declares {shown(shape)}",
                )
            found.append(value)
        return found


# Exchanges that stay mapped: to map one again faults in its pages once more. Files that the daemon
# gave up stay in memory as long as they are mapped here.
_MAX_MAPPED = 8
_MAX_CHAINS = 16
_MAX_REASON_CHARS = 1000
# The extra with the libraries of a transform, by its module.
_EXTRAS = {
    "gyre_media.audio": "media",
    "gyre_media.video": "media",
    "gyre_media": "images",
    "gyre_daemon.transforms.tokenizer": "text",
    "gyre_daemon.transforms.chat": "text",
}
# Transforms of most jobs with images, whose libraries take long to import.
_PRELOADED = ("decode_image", "random_resized_crop", "horizontal_flip", "to_chw")


class Transforming:
    """The chains and the memory that one process has at hand; see `compute_workers.Computation`."""

    def __init__(self) -> None:
        self._exchanges: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._generators = SampleGenerators()

    @classmethod
    def preload(cls) -> None:
        """Import the libraries of most jobs with images."""
        with contextlib.suppress(ImportError):  # an extra
            for name in _PRELOADED:
                importlib.import_module(own_target(name).partition(":")[0])

    def answer(self, body: memoryview, descriptors: Sequence[int]) -> bytes:
        """Answer a request of `recipes`."""
        kind, start, stop = HEAD.unpack_from(body)
        if kind == Kind.DESCRIBE:
            return ENCODER.encode(self._describe(bytes(body[HEAD.size :])))
        numbers = np.frombuffer(body, "<i4", offset=HEAD.size).tolist()
        done = self._transform(Kind(kind), descriptors[0], slice(start, stop), numbers)
        return ENCODER.encode(done)

    def _describe(self, recipe: bytes) -> Described:
        """The properties of a chain, or why there can be none."""
        try:
            steps, source = _made(RECIPE_DECODER.decode(recipe))
            chain = Chain(steps, source)
            made = [
                # parts of an image's lengths are no longer places in it
                MadeField(
                    name,
                    name_of(field.dtype),
                    field.shape,
                    "" if field.is_normalized else field.image,
                    field.max_length,
                )
                for name, field in chain.made.items()
            ]
        except (ConfigError, ValueError) as error:
            return Described(str(error)[:_MAX_REASON_CHARS])
        except Exception as error:
            text = f"the transforms cannot be made: {type(error).__name__}: {error}"
            return Described(text[:_MAX_REASON_CHARS])
        versions = [transform.version for _, transform in steps]
        engines = dict.fromkeys(name for _, transform in steps for name in transform.engines)
        return Described(
            versions=versions,
            made=made,
            passed=chain.passed,
            read=chain.read,
            cost=chain.cost,
            engines=list(engines),
            random=[place for place, (_, transform) in enumerate(steps) if transform.is_random],
        )

    def _transform(self, kind: Kind, descriptor: int, where: slice, numbers: list[int]) -> Done:
        """Transform some samples of the portion in an exchange."""
        began_s = time.process_time()
        memory = self._mapped(descriptor)
        portion = PORTION_DECODER.decode(memoryview(memory)[where])
        try:
            chain = _chain(portion.recipe)
        except ConfigError as error:
            return Done(numbers[0], reason=str(error)[:_MAX_REASON_CHARS])
        samples = _Samples(portion, memory)
        if kind == Kind.VERIFY:
            return self._verify(chain, portion, samples, numbers)
        scratch = {} if samples.have_places else chain.scratch()
        for number in numbers:
            sample_id, epoch = samples.identity(number)
            rng = self._generators.of(portion.seed, epoch, sample_id)
            sample = samples.stored(number)
            try:
                chain.apply(sample, rng, samples.out(number) or scratch)
                samples.put_ragged(number, chain.made_ragged(sample))
            except TransformFailed as error:
                return Done(number, error.name, error.reason[:_MAX_REASON_CHARS])
        return Done(cpu_s=time.process_time() - began_s)

    def _verify(
        self, chain: Chain, portion: Portion, samples: "_Samples", numbers: list[int]
    ) -> Done:
        """Compare a chain's outputs with those without its engine."""
        recipe = msgspec.structs.replace(RECIPE_DECODER.decode(portion.recipe), engine="")
        plain = _chain(ENCODER.encode(recipe))
        for number in numbers:
            first, second = [
                _results(each, samples.stored(number), self._generators.of(portion.seed, 0, number))
                for each in (plain, chain)
            ]
            if first is None or second is None:
                is_equal = first is second
            else:
                is_equal = all(map(np.array_equal, first, second))
            if not is_equal:
                return Done(
                    number, reason=f"{recipe.steps[0].name} by an engine makes it otherwise"
                )
        return Done()

    def _mapped(self, descriptor: int) -> mmap.mmap:
        """The memory of an exchange, which is mapped once."""
        try:
            file = os.fstat(descriptor)
            if file.st_ino not in self._exchanges:
                self._exchanges[file.st_ino] = mmap.mmap(descriptor, file.st_size)
                if len(self._exchanges) > _MAX_MAPPED:
                    self._exchanges.popitem(last=False)
            self._exchanges.move_to_end(file.st_ino)
            return self._exchanges[file.st_ino]
        finally:
            os.close(descriptor)


class _Samples:
    """The samples of a portion as arrays over the memory of an exchange."""

    def __init__(self, portion: Portion, memory: mmap.mmap) -> None:
        self._ids = np.frombuffer(portion.sample_ids, np.int64)
        self._epochs = np.frombuffer(portion.epochs, np.int64)
        self._memory = memory
        self._inputs = [
            (
                each.name,
                dtype_of(each.dtype),
                (-1, *each.shape) if each.is_ragged else each.shape,
                np.frombuffer(each.offsets, np.int64).tolist(),
                np.frombuffer(each.sizes, np.int64).tolist(),
            )
            for each in portion.inputs
        ]
        self._outputs = [
            (
                out.name,
                np.ndarray((len(self._ids), *out.shape), dtype_of(out.dtype), memory, out.offset),
            )
            for out in portion.outputs
            if not out.ends
        ]
        self._ragged = [_RaggedColumn(each, memory) for each in portion.outputs if each.ends]

    @property
    def have_places(self) -> bool:
        """Whether fields of one shape have a place in the exchange."""
        return bool(self._outputs)

    def identity(self, number: int) -> tuple[int, int]:
        return int(self._ids[number]), int(self._epochs[number])

    def stored(self, number: int) -> Sample:
        sample = {}
        for name, dtype, shape, offsets, sizes in self._inputs:
            count = sizes[number] // dtype.itemsize
            array = np.frombuffer(self._memory, dtype, count, offsets[number]).reshape(shape)
            array.flags.writeable = False
            sample[name] = array
        return sample

    def out(self, number: int) -> Sample:
        return {name: rows[number, ...] for name, rows in self._outputs}

    def put_ragged(self, number: int, values: list[np.ndarray[Any, Any]]) -> None:
        for column, value in zip(self._ragged, values, strict=True):
            column.put(number, value)


class _RaggedColumn:
    """One ragged output field of the samples of a portion."""

    def __init__(self, field: Output, memory: mmap.mmap) -> None:
        self._ends = np.frombuffer(field.ends, np.int64).tolist()
        shape = (self._ends[-1], *field.shape)
        self._elements = np.ndarray(shape, dtype_of(field.dtype), memory, field.offset)
        self._lengths = np.ndarray(len(self._ends) - 1, "<i4", memory, field.lengths)

    def put(self, number: int, value: np.ndarray[Any, Any]) -> None:
        """Tell the length of a sample, and write the sample if its place has room."""
        self._lengths[number] = len(value)
        end = self._ends[number] + len(value)
        if end <= self._ends[number + 1]:
            self._elements[self._ends[number] : end] = value


def _results(
    chain: Chain, sample: Sample, rng: np.random.Generator
) -> list[np.ndarray[Any, Any]] | None:
    """All fields that a chain makes of a sample; None if it refuses the sample."""
    out = chain.scratch()
    try:
        chain.apply(sample, rng, out)
        return [*out.values(), *chain.made_ragged(sample)]
    except TransformFailed:
        return None


@functools.lru_cache(_MAX_CHAINS)
def _chain(recipe: bytes) -> Chain:
    decoded = RECIPE_DECODER.decode(recipe)
    steps, source = _made(decoded)
    if [transform.version for _, transform in steps] != decoded.versions:
        raise ConfigError("a file of its options has changed; open the session again")
    return Chain(steps, source)


def _made(recipe: Recipe) -> tuple[list[tuple[str, Transform]], Mapping[str, Field]]:
    """The transforms of a recipe, and the fields that it begins with."""
    steps = [(step.name, _load(place, step)) for place, step in enumerate(recipe.steps)]
    if recipe.engine:
        steps = [(name, transform.with_engine(recipe.engine)) for name, transform in steps]
    source = {}
    for each in recipe.source:
        is_final = len(each.shape) == 2 and each.shape[1] == 4  # boxes of sanitize_boxes
        dtype = dtype_of(each.dtype)
        source[each.name] = Field(dtype, each.shape, image=each.image, is_final=is_final)
    return steps, source


def _load(place: int, step: Step) -> Transform:
    where, module = f"transforms[{place}] ({step.name})", step.target.partition(":")[0]
    try:
        return _with_options(step, where)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        extra = next((_EXTRAS[each] for each in _EXTRAS if module.startswith(each)), "")
        fix = f' Run pip install "gyre-ml[{extra}]".' if extra else ""
        raise ConfigError(f"{where} needs {error.name}, which is not installed.{fix}") from error
    except Exception as error:
        raise ConfigError(f"{where}: {error!s:.300}") from error


def _with_options(step: Step, where: str) -> Transform:
    module, _, name = step.target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where} cannot be loaded: {type(error).__name__}: {error!s:.300}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transform)):
        raise ConfigError(f"{where} is no Transform; derive it from gyre_daemon.transforms")
    return parse_options(found, step.options, where)
