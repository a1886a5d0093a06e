"""The fields of a sample, their names and media types, and their places. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import ConfigError

# A batch has these tensors besides its fields, and names derived from a field's name with these
# suffixes. No field may have such a name.
SAMPLE_ID = "sample_id"
MASK = "mask"
OFFSETS_SUFFIX = ".offsets"  # of a ragged field: where each sample begins
PRESENT_SUFFIX = ".present"  # of an optional field: which samples have it
SHAPE_SUFFIX = ".shape"  # of a field of flattened arrays: the shape of each sample

CodecName = Literal[
    "bytes",
    "ids",
    "text",
    "quoted",
    "json",
    "integer",
    "number",
    "npy",
    "cast",
    "default",
    "indexed",
]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One named tensor of a sample.

    Attributes:
        name: its key in the batch.
        dtype: of the tensor.
        shape: of one sample; of one element if the field is ragged.
        ragged: whether samples differ in length along the first dim.
        codec: how the stored bytes become the tensor. `bytes` are stored as the tensor is in
            memory. The values of an `indexed` field are in the index, and nothing is read.
        token_ids: whether the elements are token ids; clients may widen unsigned ones.
        vocabulary: with the codec `ids`, every id must be at least 0 and below this number.
        categories: the meanings of the values of an integer field, such as the names of classes;
            empty if they are just numbers.
        media_type: of bytes that hold an encoded file: the type of all samples, such as
            `image/jpeg` or `image/*`; empty if unknown.
        cast_from: with the codec `cast`, the codec and the dtype of the stored values.
        default: with the codec `default`, the bytes of every sample; nothing is stored.
        forms: how each schema of the shards stores the field; empty if all store it as this says.
        length: the elements that each sample of a ragged field has, where all have as many; batches
            then have the field as an array of one shape. 0 where samples differ, or may differ.
        image: of boxes and masks that transforms made: the field with the image that they belong
            to. Readers of the field do not depend on it.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    ragged: bool
    codec: CodecName
    token_ids: bool = False
    vocabulary: int = 0
    categories: tuple[str, ...] = ()
    media_type: str = ""
    cast_from: "tuple[CodecName, np.dtype[np.generic]] | None" = None
    default: bytes = b""
    forms: "tuple[FieldSpec, ...]" = ()
    length: int = field(default=0, compare=False)
    image: str = field(default="", compare=False)

    @property
    def element_bytes(self) -> int:
        """The bytes of one sample, or of one element if the field is ragged."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def served(self) -> "FieldSpec":
        """The field as a batch has it: an array of one shape where all samples have one length."""
        if not self.length:
            return self
        return replace(self, shape=(self.length, *self.shape), ragged=False, length=0)

    def form(self, schema: int) -> "FieldSpec":
        """How shards of one schema store the field."""
        return replace(self.forms[schema], name=self.name) if self.forms else self


def stored_fields(fields: Sequence[FieldSpec]) -> Sequence[FieldSpec]:
    """The fields read from storage; in an index they come before the indexed ones."""
    return [spec for spec in fields if spec.codec != "indexed"]


def indexed_fields(fields: Sequence[FieldSpec]) -> Sequence[FieldSpec]:
    """The fields whose values are in the index."""
    return [spec for spec in fields if spec.codec == "indexed"]


@dataclass(frozen=True, slots=True)
class Extents:
    """The places of n samples with F stored fields, and the values of their indexed fields.

    Attributes:
        shard: int64 [n], index of the shard.
        start: int64 [n, F], first byte in the shard.
        size: int64 [n, F], stored bytes; 0 if the sample lacks the field.
        lengths: int64 [n, F], bytes that each field takes in a ragged tensor; None if it is
            `size` everywhere.
        absent: bool [n, F], which samples lack which fields; None if none may.
        indexed: for each indexed field its values, [n, *shape].
        schema: int64 [n], the number of the schema of each sample's shard, for fields with `forms`;
            None if there is only one.
    """

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64] | None = None
    absent: npt.NDArray[np.bool_] | None = None
    indexed: tuple[npt.NDArray[np.generic], ...] = ()
    schema: npt.NDArray[np.int64] | None = None

    @property
    def tensor_bytes(self) -> npt.NDArray[np.int64]:
        """Int64 [n, F], the bytes that each field takes in its tensor if it is ragged."""
        return self.size if self.lengths is None else self.lengths

    def part(self, some: slice) -> "Extents":
        """The extents of some of the samples."""
        lengths = None if self.lengths is None else self.lengths[some]
        absent = None if self.absent is None else self.absent[some]
        indexed = tuple(values[some] for values in self.indexed)
        schema = None if self.schema is None else self.schema[some]
        return Extents(
            self.shard[some], self.start[some], self.size[some], lengths, absent, indexed, schema
        )


_SUFFIXES = (OFFSETS_SUFFIX, PRESENT_SUFFIX, SHAPE_SUFFIX)
TAKEN = (
    f"a batch has {SAMPLE_ID}, {MASK} and offsets itself, and names that end with "
    f"{', '.join(_SUFFIXES)}"
)


def is_servable(name: str) -> bool:
    """Whether a tensor may have this name."""
    is_taken = name in (SAMPLE_ID, MASK) or name.endswith(_SUFFIXES)
    return name != "" and name.isprintable() and not is_taken


def renamed(texts: Sequence[str], key: str) -> list[tuple[str, str]]:
    """For each wanted column the name of its field and its own name, from `NAME` or `FIELD=NAME`.

    Args:
        texts: as the operator wrote them.
        key: where; for the error.

    Raises:
        ConfigError: no batch can have such fields.
    """
    parts = [each.partition("=") for each in texts]
    pairs = [(field, column if sign else field) for field, sign, column in parts]
    check_names([field for field, _ in pairs], key)
    return pairs


def check_names(names: Sequence[str], key: str) -> None:
    """Refuse names that no batch can have.

    Raises:
        ConfigError: with the name.
    """
    for name in names:
        if not is_servable(name):
            raise ConfigError(
                f"no field can have the name {name!r:.100}: {TAKEN}; rename it in `{key}`: "
                "FIELD=COLUMN"
            )
        if names.count(name) > 1:
            raise ConfigError(f"`{key}` has {name!r:.100} twice")


def ragged_fields(lengths: Mapping[str, int], pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The names of the fields whose columns have the length 0.

    Args:
        lengths: by the names of columns.
        pairs: names of the fields, and of their columns; empty where both are the same.
    """
    ragged = {name for name, length in lengths.items() if not length}
    served = [field for field, column in pairs if column in ragged]
    return (*served, *sorted(ragged - {column for _, column in pairs}))


MEDIA_TYPES = {
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
    "bmp": "image/bmp",
    "tif": "image/tiff",
    "tiff": "image/tiff",
    "ppm": "image/x-portable-pixmap",
    "avif": "image/avif",
    "jp2": "image/jp2",
    "j2k": "image/j2c",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "ogg": "audio/ogg",
    "opus": "audio/ogg",
    "m4a": "audio/mp4",
    "mp4": "video/mp4",
    "webm": "video/webm",
    "mkv": "video/x-matroska",
    "mov": "video/quicktime",
}
IMAGES, AUDIO = (
    tuple(name for name, media_type in MEDIA_TYPES.items() if media_type.startswith(kind))
    for kind in ("image/", "audio/")
)


def media_type_of(extensions: Iterable[str]) -> str:
    """The type of files with any of these extensions: `image/jpeg`, `image/*`, or empty."""
    kinds = {MEDIA_TYPES.get(extension.lower(), "") for extension in extensions}
    if len(kinds) == 1:
        return kinds.pop()
    types = {kind.partition("/")[0] for kind in kinds}
    return f"{types.pop()}/*" if len(types) == 1 else ""
