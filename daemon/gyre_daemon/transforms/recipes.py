"""The interface of transforms, their names, and requests to the compute workers that run them.

The body of a request is the head, and for `DESCRIBE` a `Recipe`. `TRANSFORM` brings the descriptor
of an exchange with a `Portion`, too, and so does `VERIFY`, which tells whether an engine makes the
same. Each is answered by a `Described` or a `Done`. Answers may come from a process that hostile
bytes have taken over. No transform is imported to name it.
"""

import functools
import importlib
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from gyre_daemon.errors import ConfigError, NotAllowed
from gyre_daemon.runtime.plug_ins import entry_points_of, included

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


def shown(shape: Sequence[int | None]) -> str:
    """A shape as messages have it, with stars for lengths in which samples differ."""
    return f"[{', '.join('*' if length is None else str(length) for length in shape)}]"


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


def set_of(transform: Transform, **values: object) -> None:
    """Set attributes that a transform derives from its options."""
    for name, value in values.items():
        object.__setattr__(transform, name, value)  # it is frozen


class TooLarge(ValueError):
    """A file may be sound, and declares more than is decoded."""


@dataclass(frozen=True)
class OneField(Transform):
    """A transform of one field, which draws no random numbers unless it says so.

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
class OfField(OneField):
    """A transform that makes others of one field, which samples no longer have afterwards."""

    @property
    def drops(self) -> Sequence[str]:
        return [self.field]

    def require_bytes(self, fields: Mapping[str, Field]) -> None:
        """Refuse a field other than the bytes of files or texts.

        Raises:
            ValueError: it has another dtype, or one shape.
        """
        stored = fields[self.field]
        if stored.dtype != np.uint8 or stored.shape != (None,):
            raise ValueError(
                f"{self.field!r:.100} is {stored.dtype.name}, no bytes of files or texts"
            )


# numpy has none, and would call it by a name that says its size alone. torch and clients have it.
BFLOAT16 = "bfloat16"


def name_of(dtype: np.dtype[np.generic]) -> str:
    """The name of a dtype, in which its byte order is if it has one."""
    return BFLOAT16 if dtype.name == BFLOAT16 else dtype.str


def dtype_of(name: str) -> np.dtype[np.generic]:
    """The dtype of a name.

    Raises:
        ModuleNotFoundError: it is bfloat16, and `ml_dtypes` is not installed.
    """
    if name == BFLOAT16:
        bfloat16: np.dtype[np.generic] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        return bfloat16
    return np.dtype(name)


# Kind; where the portion begins and ends in the exchange. Then the numbers of the samples, int32.
HEAD = struct.Struct("<3q")
MAX_PACKET_BYTES = 128 << 10  # of a request or a reply
_MAX_DIMS, _MAX_LENGTH = 8, 1 << 32
_Length = Annotated[int, Meta(ge=1, le=_MAX_LENGTH)]


class Kind(IntEnum):
    """The kinds of request."""

    DESCRIBE = 1
    TRANSFORM = 2
    VERIFY = 3


class Step(msgspec.Struct, frozen=True):
    """One transform of a chain.

    Attributes:
        name: as it was declared.
        target: where its class is, `MODULE:CLASS`.
        options: as they were declared.
    """

    name: str
    target: str
    options: dict[str, Any]


class SourceField(msgspec.Struct, frozen=True, omit_defaults=True):
    """A field of a stored sample, or of one that transforms made before; see `Field`."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    image: str = ""


class Recipe(msgspec.Struct, frozen=True):
    """A chain as plain data.

    Attributes:
        steps: its transforms.
        source: the fields that it begins with.
        versions: of its transforms, when it was described; empty before.
        engine: the faster program to use where it can; empty for none.
    """

    steps: list[Step]
    source: list[SourceField]
    versions: list[int] = []
    engine: str = ""


class MadeField(msgspec.Struct, frozen=True):
    """A field that a chain makes; where the first length is None, samples differ in it.

    Attributes:
        name, dtype, shape, image, max_length: see `Field`.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    dtype: Annotated[str, Meta(max_length=10)]
    shape: Annotated[tuple[_Length | None, ...], Meta(max_length=_MAX_DIMS)]
    image: Annotated[str, Meta(max_length=200)] = ""
    max_length: Annotated[int, Meta(ge=0, le=_MAX_LENGTH)] = 0


class Described(msgspec.Struct, frozen=True):
    """The properties of a chain.

    Attributes:
        error: why there can be none; empty if there can.
        versions: of its transforms.
        made, passed, read, cost: see `Chain`.
        engines: that may do it faster, the fastest first.
        random: the places of the transforms that may draw random numbers.
    """

    error: str = ""
    versions: list[int] = []
    made: list[MadeField] = []
    passed: list[str] = []
    read: list[str] = []
    cost: Cost = "heavy"
    engines: list[str] = []
    random: list[int] = []


class Input(msgspec.Struct, frozen=True):
    """The place of a stored field of n samples in an exchange.

    Attributes:
        name: of the field.
        dtype: of its elements.
        shape: of one sample, or of one element if samples differ in length.
        is_ragged: whether they do.
        offsets: int64 [n], in bytes.
        sizes: int64 [n], in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_ragged: bool
    offsets: bytes
    sizes: bytes


class Output(msgspec.Struct, frozen=True):
    """Where a field of n samples goes in an exchange: one behind the other from an offset on.

    Attributes:
        name: of the field.
        dtype: of its elements.
        shape: of one sample, or of one element if samples differ in length.
        offset: in bytes.
        ends: int64 [n + 1], the element at which the place of each sample begins, and the end of
            the last; empty if samples do not differ in length.
        lengths: if they do, the byte of the exchange from which on the process writes the number of
            elements of each sample, int32 [n]. One with more than its place has room for is only
            told.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    ends: bytes = b""
    lengths: int = 0


class Portion(msgspec.Struct, frozen=True):
    """Samples to transform together.

    Attributes:
        recipe: an encoded `Recipe`.
        seed: of the job.
        sample_ids: int64 [n].
        epochs: int64 [n].
        inputs: the fields that the chain reads.
        outputs: the fields that it makes; only those that differ in length, with no room, where
            samples are measured.
    """

    recipe: bytes
    seed: int
    sample_ids: bytes
    epochs: bytes
    inputs: list[Input]
    outputs: list[Output]


class Done(msgspec.Struct, frozen=True):
    """The answer to `TRANSFORM` and `VERIFY`.

    Attributes:
        failed: the sample of the portion that could not be transformed; -1 if all were.
        transform: which one refused it.
        reason: why.
        cpu_s: processor time that it took.
    """

    failed: int = -1
    transform: str = ""
    reason: str = ""
    cpu_s: float = 0.0


RECIPE_DECODER = msgspec.msgpack.Decoder(Recipe)
PORTION_DECODER = msgspec.msgpack.Decoder(Portion)
DESCRIBED_DECODER = msgspec.msgpack.Decoder(Described)
DONE_DECODER = msgspec.msgpack.Decoder(Done)
ENCODER = msgspec.msgpack.Encoder()


GROUP = "gyre.transforms"
_HERE = "gyre_daemon.transforms"
BUILT_IN: Mapping[str, str] = {
    "cache": f"{_HERE}.built_in:Cache",
    "copy": f"{_HERE}.built_in:Copy",
    "drop": f"{_HERE}.built_in:Drop",
    "cast": f"{_HERE}.built_in:Cast",
    "crop_or_pad": f"{_HERE}.built_in:CropOrPad",
    "truncate": f"{_HERE}.built_in:Truncate",
    "tokenize": f"{_HERE}.tokenizer:Tokenize",
    "chat": f"{_HERE}.chat:Chat",
    "python": f"{_HERE}.built_in:PythonFunction",
}
_FUNCTION = "python"
_INSTEAD = (
    f"Ask its operator to install a package with an entry point of the group {GROUP}, or use a "
    "private daemon"
)
# Options with paths. Clients of a shared daemon must not have it open files of their choice.
_FILES: Mapping[str, str] = {"tokenize": "tokenizer", "chat": "tokenizer"}
# Most chains have a dozen transforms, and ten views of an image some eighty. More would let one
# request take the memory of a worker.
_MAX_STEPS = 128
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def own_target(name: str) -> str:
    """The place of a transform of the daemon or of `gyre_media`; empty for other names."""
    return BUILT_IN.get(name) or (included(GROUP)[name].value if name in included(GROUP) else "")


def to_steps(
    declared: Collection[Mapping[str, Any]],
    installed: Collection[str],
    *,
    allow_modules: bool,
    allow_files: bool,
) -> list[Step]:
    """The declared transforms, each with the place of its class.

    Args:
        declared: tables with the key `name` and the options.
        installed: names of other packages' transforms that the operator enables.
        allow_modules: whether a name may be `MODULE:CLASS`.
        allow_files: whether options may be paths.

    Raises:
        ConfigError: a name is missing or unknown.
        NotAllowed: `MODULE:CLASS` is not served here, or a path.
    """
    if len(declared) > _MAX_STEPS:
        raise ConfigError(f"there are {len(declared)} transforms; at most {_MAX_STEPS} are served")
    steps = []
    for place, table in enumerate(declared):
        options = dict(table)
        name = options.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ConfigError(f'transforms[{place}] has no name; give it one, name = "crop_or_pad"')
        path = options.get(_FILES.get(name, ""))
        if isinstance(path, str) and "/" in path and not allow_files:
            raise NotAllowed(
                f"transforms[{place}] ({name}): this daemon opens no files that clients name. Ask "
                "its operator to declare the transform with the dataset, or use a private daemon."
            )
        steps.append(Step(name, _target(place, name, installed, allow_modules), options))
    return steps


def _target(place: int, name: str, installed: Collection[str], allow_modules: bool) -> str:
    if name == _FUNCTION and not allow_modules:
        raise NotAllowed(
            f"transforms[{place}]: this daemon runs no functions of scripts. {_INSTEAD}"
        )
    if target := own_target(name):
        return target
    if ":" in name:
        if not _TARGET.fullmatch(name):
            raise ConfigError(f"transforms[{place}]: {name!r:.100} is not of the form MODULE:CLASS")
        if not allow_modules:
            raise NotAllowed(
                f"transforms[{place}]: this daemon runs no code that clients name ({name:.100}). "
                f"{_INSTEAD}"
            )
        return name
    found = {entry.value for entry in entry_points_of(GROUP, name)}
    if found and name not in installed:
        fix = "Ask the operator to list it in `installed_transforms` of the daemon's configuration"
        if allow_modules:
            fix = f"Name its class: {min(found)}"
        raise ConfigError(f"transforms[{place}]: {name!r:.100} is installed and not enabled. {fix}")
    if not found:
        known = ", ".join(sorted({*BUILT_IN, *included(GROUP), *installed}))
        raise ConfigError(
            f"transforms[{place}] is {name!r:.100}, and there is no such transform; there are "
            f"{known}"
        )
    if len(found) > 1:
        raise ConfigError(
            f"transforms[{place}]: several packages declare {name!r:.100}: "
            f"{', '.join(sorted(found))}; uninstall all but one"
        )
    return found.pop()


_Decode = Callable[[memoryview], object]


def check_media(media_type: str, data: memoryview) -> str:
    """Decode an image or a sound, such as `image/png`, as `decode_image` and `decode_audio` do.

    Returns:
        Why it was not decoded; empty if it was.

    Raises:
        ValueError: it cannot be decoded.
    """
    kind, _, form = media_type.partition("/")
    if form == "mp4":
        return f"{media_type} is not decoded here"
    try:
        decode = _decoder(kind)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    try:
        decode(data)
    except TooLarge as error:
        return str(error)
    return ""


@functools.cache
def _decoder(kind: str) -> _Decode:
    """A decoder of images or sounds.

    Raises:
        ModuleNotFoundError: a library is missing.
    """
    module, _, name = own_target(f"decode_{kind}").partition(":")
    decoder: Any = getattr(import_module(module), name)
    if kind == "image":
        image = decoder("")
        return lambda data: image.decoded(data, 1)
    decode: _Decode = decoder("", rate=16_000, max_seconds=24 * 3600).decoded
    return decode
