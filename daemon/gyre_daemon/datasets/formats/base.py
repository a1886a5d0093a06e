"""The seam between storage formats and the rest of the daemon.

A format describes how samples are stored in shards. It only computes: the daemon does all reading.
To open a dataset, the daemon uses a `Format` in this order:

1. `pattern` selects the shards among the files of a folder.
2. `inspection` gathers the facts that the format needs about the shards. A `Scan` reads every shard
   once, from its beginning to its end. A `Probe` asks for a few byte ranges. Either returns arrays,
   which the daemon keeps in sidecar files and hands back the next time.
3. `assemble` turns these arrays into a `SampleIndex`, which maps sample ids to byte ranges: of
   shards, or of decoded shards where samples are rows of chunks (see `chunk_index`).

Where each file is a sample, a `ListedFormat` does instead. The daemon lists the files below a
folder, at any depth, or reads a manifest, or makes one of files that describe others. To all other
code they are one shard, in which each file comes after its *head*: its path, and the texts that the
manifest has of it.

A format may come from another package: an entry point of the group `gyre.formats`, of the format's
name, that leads to a `FormatEntry`; see `known_formats`.

A new format of this package consists of a module or package here, a line of `known_formats`, and a
subclass of `FormatContract` in `tests/contract`. Nothing else in the daemon knows the format's
name, its options or its arrays. This is a complete format, in which every line of a
text file is a sample:

    from dataclasses import dataclass
    import numpy as np
    from gyre_daemon.datasets.formats import FormatEntry
    from gyre_daemon.datasets.formats.base import FieldSpec, Scan, array_of
    from gyre_daemon.datasets.formats.sample_table import SampleTable
    from gyre_daemon.datasets.formats.values import check_text
    from gyre_daemon.errors import CorruptSample

    @dataclass(frozen=True)
    class LinesOptions:
        field: str = "line"

    class LinesFormat:
        pattern = "*.txt"
        unpacks_gzip = False

        def __init__(self, options):
            self._field = options.field

        @property
        def inspection(self):
            return Scan("lines/1", self._scan, lambda scan: len(scan["size"]), self._check)

        def _check(self, scan, file_bytes):
            size = array_of(scan, "size", np.int64)
            if (size < 0).any() or size.sum() != file_bytes:
                raise ValueError("its lines are not those of the shard")

        def _scan(self, shard, file):
            sizes = []
            for line in file:
                try:
                    check_text(line)
                except ValueError as error:
                    facts = {"shard": shard, "reason": str(error)}
                    raise CorruptSample(f"shard {shard}: {error}", facts) from error
                sizes.append(len(line))
            return {"size": np.array(sizes, np.int64)}

        def assemble(self, shards, inspected):
            sizes = [scan["size"] for scan in inspected]
            starts = [np.cumsum(each) - each for each in sizes]
            return SampleTable(
                [FieldSpec(self._field, np.dtype(np.uint8), (), ragged=True, codec="text")],
                [len(each) for each in sizes],
                np.concatenate(starts)[:, None],
                np.concatenate(sizes)[:, None],
                identity=b"lines",
            )

    LINES = FormatEntry.of(LinesFormat, LinesOptions)
"""

import importlib.util
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.config import parse_options
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.order.permutation import BlockTable
from gyre_daemon.storage.shard import FileTable, Shard, Texts

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


def presence_of(name: str) -> FieldSpec:
    """The indexed field that says which samples have the optional field of this name."""
    return FieldSpec(name + PRESENT_SUFFIX, np.dtype(np.bool_), (), ragged=False, codec="indexed")


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


def may_be_array(name: str) -> bool:
    """Whether a file of this name may be a JSON array: its bytes tell."""
    return name.removesuffix(".gz").removesuffix(".zst").removesuffix(".zstd").endswith(".json")


def require_library(module: str, reader: str, extra: str, package: str = "") -> None:
    """Refuse a reader of files whose library is not installed.

    Args:
        module: of the library.
        reader: for the message, such as `the format arrow needs`.
        extra: that installs it.
        package: its name, if not that of the module.

    Raises:
        ConfigError: names the extra.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{reader} {package or module}, which is not installed. "
            f'Run pip install "gyre-ml[{extra}]".'
        )


def corrupt(shard: str, offset: int | None, reason: str, **facts: str) -> CorruptSample:
    """The error for a damaged shard, at a byte if that is known."""
    where = "" if offset is None else f" at byte {offset}"
    place: dict[str, str | int] = {} if offset is None else {"offset": offset}
    return CorruptSample(
        f"shard {shard}{where}: {reason}", {"shard": shard, **place, "reason": reason, **facts}
    )


T = TypeVar("T")
Arrays = Mapping[str, np.ndarray]  # the results of an inspection, by names that the format chooses


def array_of(
    arrays: Arrays, name: str, dtype: npt.DTypeLike, num_dims: int = 1
) -> npt.NDArray[Any]:
    """One of several arrays that may be forged.

    Raises:
        ValueError: it is missing, or has another dtype or number of dims.
    """
    array = arrays.get(name)
    if array is None or array.dtype != np.dtype(dtype) or array.ndim != num_dims:
        raise ValueError(f"its array `{name}` is missing or of another kind")
    return array


# Of a JSON document among the arrays of a shard.
MAX_JSON_BYTES = 4 << 20


def json_of(arrays: Arrays, name: str, decoder: "msgspec.json.Decoder[T]", otherwise: str) -> T:
    """A small JSON document among arrays that may be forged.

    Raises:
        ValueError: there is no such document; says so.
    """
    text = array_of(arrays, name, np.uint8)
    try:
        if len(text) <= MAX_JSON_BYTES:
            return decoder.decode(text.tobytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(otherwise) from error
    raise ValueError(otherwise)


def require(holds: object, otherwise: str) -> None:
    """Refuse arrays that may be forged.

    Raises:
        ValueError: the condition does not hold; says what it means.
    """
    if not holds:
        raise ValueError(otherwise)


class SampleIndex(Protocol):
    """All samples of a dataset, by sample id in `[0, num_samples)`.

    Ids follow the order of the shards, and within a shard the order of the bytes.
    """

    @property
    def num_samples(self) -> int:
        """N."""

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """The tensors of a sample, the stored ones before the indexed ones."""

    def locate(self, sample_ids: npt.NDArray[np.int64]) -> Extents:
        """The places of samples; `sample_ids` is int64 [n]. Vectorised arithmetic without I/O."""

    def max_ragged_bytes(self, num_samples: int) -> int:
        """An upper bound of the bytes of all ragged fields at `num_samples` successive positions.

        The positions may span several epochs.
        """

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """The samples cut into blocks of about `io_block_bytes`, each within one shard.

        The same size gives the same object while it is one of the last few that were asked for.
        """

    def digest(self) -> bytes:
        """A digest that changes if a sample id would mean other bytes of the same shards."""


@dataclass(frozen=True, slots=True)
class Scan:
    """An inspection that reads each shard once, from its beginning to its end or where it seeks.

    Attributes:
        version: name and version of the arrays; a sidecar of another version is made again.
        run: takes a shard's name and its bytes, and returns the arrays of this shard. It raises
            CorruptSample if the shard is damaged, with the shard and the offset.
        num_samples: takes a shard's arrays and returns how many samples it has.
        check: takes stored arrays, which may be forged, and the size of the shard. It raises
            ValueError if `run` could not have returned them for a shard of that size.
        seeks: whether `run` must seek. It then gets a file that asks the storage for each range.
        skips: whether `run` passes over parts of the file, always forward. It then gets one that
            can seek. Of an object, large such parts are not read.
        ragged: names of fields of lists that stay ragged even if all of them have one length.
    """

    version: str
    run: Callable[[str, BinaryIO], Arrays]
    num_samples: Callable[[Arrays], int]
    check: Callable[[Arrays, int], None]
    seeks: bool = False
    skips: bool = False
    ragged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Byte ranges that a probe asks for; the daemon reads all of them at once.

    Attributes:
        shard: n indices of shards.
        start: n first bytes.
        stop: n ends, exclusive; a range is cut off at the end of its file.
        suffix: if not empty, read the files next to the shards with this suffix in place of
            their own.
        is_optional: whether the files next to the shards may be absent.
    """

    shard: Sequence[int]
    start: Sequence[int]
    stop: Sequence[int]
    suffix: str = ""
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """The bytes that a probe asked for.

    Attributes:
        pieces: n byte strings.
        file_bytes: n sizes of the whole files.
    """

    pieces: Sequence[bytes]
    file_bytes: Sequence[int]


# Yields requests and is sent the responses, or None if an optional file is absent. Returns arrays.
ProbeSteps = Generator[ProbeRequest, ProbeResponse | None, Arrays]


# Shards whose heads are requested together and held in memory: at most 10 MiB. More would gain
# nothing, since the storage has far fewer requests in flight.
_HEADS_AT_ONCE = 1024


def probe_heads(
    shards: Sequence[Shard],
    num_bytes: int,
    read: Callable[[Shard, bytes, int], T],
    suffix: str = "",
) -> Generator[ProbeRequest, ProbeResponse | None, list[T]]:
    """Part of a probe: read the first bytes of all shards, or of the files next to them.

    Args:
        shards: of the dataset.
        num_bytes: of each head; a shorter file is its own head.
        read: takes a shard, the head, and the size of its file; its results are returned.
        suffix: see `ProbeRequest`.
    """
    found = []
    for begin in range(0, len(shards), _HEADS_AT_ONCE):
        some = range(begin, min(begin + _HEADS_AT_ONCE, len(shards)))
        response = yield ProbeRequest(some, [0] * len(some), [num_bytes] * len(some), suffix)
        assert response is not None
        heads = zip(some, response.pieces, response.file_bytes, strict=True)
        found += [read(shards[shard], head, file_bytes) for shard, head, file_bytes in heads]
    return found


@dataclass(frozen=True, slots=True)
class Probe:
    """An inspection that reads a few byte ranges of the shards, or of files next to them.

    Attributes:
        version: name and version of the arrays; a sidecar of another version is made again.
        run: takes all shards and asks for bytes. It raises CorruptSample if a shard is nothing that
            this format stores.
        check: takes stored arrays, which may be forged, and all shards. It raises ValueError if
            `run` could not have returned them.
    """

    version: str
    run: Callable[[Sequence[Shard]], ProbeSteps]
    check: Callable[[Arrays, Sequence[Shard]], None]


@dataclass(frozen=True, slots=True)
class DamagedSample:
    """A sample that a format found damaged although its shard can be read.

    Attributes:
        shard: number of the shard.
        sample: its id in the dataset.
        offset: the byte of the shard at which it begins.
        reason: the damage, in words.
    """

    shard: int
    sample: int
    offset: int
    reason: str


@runtime_checkable
class TolerantFormat(Protocol):
    """A format that can find some samples damaged, and serve the others."""

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleIndex, Sequence[DamagedSample]]:
        """As `Format.assemble`, with the samples that it would refuse, in the order of their ids.

        The index has them too, so that ids do not depend on damage; they are never read.
        """


class Format(Protocol):
    """One way to store samples in shards, with the options of one dataset."""

    @property
    def pattern(self) -> str:
        """Which files of a folder are shards: a glob, or a brace list such as `*.{tar,tgz}`."""

    @property
    def unpacks_gzip(self) -> bool:
        """Whether shards named `*.gz` or `*.tgz` are unpacked before the format sees them."""

    @property
    def inspection(self) -> Scan | Probe | None:
        """The inspection to do before `assemble`; None if offsets are plain arithmetic."""

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """The index of a whole dataset.

        Args:
            shards: of the dataset, in its order.
            inspected: after a scan, the arrays of each shard; after a probe, its one result; empty
                if there is no inspection.

        Raises:
            CorruptSample: the shards do not make one dataset; names the first that does not fit.
            ConfigError: the options do not fit the shards.
        """


@dataclass(frozen=True, slots=True)
class ManifestColumn:
    """One column of a manifest, with a value for each of n files.

    Attributes:
        name: of the column.
        kind: `text`, `json`, `number` or `class`.
        values: of text and JSON the bytes; else int64, float64 or int32 [n].
        categories: the meanings of the values of a class, or numbers in JSON.
    """

    name: str
    kind: Literal["text", "json", "number", "class"]
    values: Texts | npt.NDArray[Any]
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A list of files, in the dataset's order.

    Attributes:
        names: their paths, relative to the folder of the manifest.
        columns: with other facts about them.
    """

    names: Texts
    columns: tuple[ManifestColumn, ...]


@dataclass(frozen=True, slots=True)
class Described:
    """Which files of a folder are samples, and which describe them.

    Attributes:
        names: of the n samples, in the dataset's order.
        texts: int64 [n], for each the number of the file that describes it; -1 if there is none.
        about: the facts that the format has about all samples.
    """

    names: Texts
    texts: npt.NDArray[np.int64]
    about: Any


class ManifestPlace(NamedTuple):
    """The place of a manifest.

    Attributes:
        path: of the manifest.
        folder: that its paths are relative to, and that they do not leave.
    """

    path: str
    folder: str


@runtime_checkable
class ListedFormat(Protocol):
    """A format in which each file is a sample, with the options of one dataset."""

    @property
    def pattern(self) -> str:
        """The files usually meant; see `Format.pattern`."""

    def is_wanted(self, name: str) -> bool:
        """Whether a file of this name, without its folder, is one of the dataset."""

    def manifest_of(self, path: str) -> ManifestPlace | None:
        """The place of the manifest for a location of this path; None if its files are listed."""

    def index_of(self, table: FileTable, columns: Sequence[ManifestColumn]) -> SampleIndex:
        """The index of files, and of the columns that a manifest has of them.

        Raises:
            ConfigError: the options do not fit the files.
        """


@runtime_checkable
class ManifestFormat(ListedFormat, Protocol):
    """A format whose manifest is one file."""

    @property
    def reads_apart(self) -> bool:
        """Whether a separate process reads a manifest, whose parsing would block others."""

    def read_manifest(self, name: str, data: bytes) -> Manifest:
        """A manifest of this name and these bytes.

        Raises:
            CorruptSample: it is damaged.
            ConfigError: it lacks columns.
        """


@runtime_checkable
class DescribedFormat(ListedFormat, Protocol):
    """A format in which a file describes each sample, and the manifest's place has a file for all.

    `is_wanted` takes the files that describe samples, too.
    """

    def described(self, name: str, data: bytes, names: Texts) -> Described:
        """The samples among files.

        Args:
            name: of the file that describes all of them.
            data: its bytes.
            names: of all wanted files, sorted.

        Raises:
            CorruptSample: the file is damaged.
            ConfigError: it does not fit the files.
        """

    def manifest(self, described: Described, texts: Sequence[bytes]) -> Manifest:
        """The manifest that the files make, called in a separate process.

        Args:
            described: the n samples.
            texts: n, the description of each; empty if there is none.

        Raises:
            CorruptSample: one of them is damaged; names it, and the line.
        """


def _never(_head: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The keys of a dataset whose format takes none."""


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """A known format.

    Attributes:
        pattern: of the names of its shards; empty if no name says that this is the format.
        make: takes the keys of a dataset's configuration, and the place of the keys for error
            messages.
        recognises: takes up to 512 first bytes of a file, and says whether only this format begins
            so. Never, if its files have no signature.
        keys: that `make` knows.
        ambiguous_pattern: of names that other files have, too; such files are shards only where
            a folder has none of the pattern.
    """

    pattern: str
    make: Callable[[Mapping[str, Any], str], Format | ListedFormat]
    recognises: Callable[[bytes], bool] = _never
    keys: frozenset[str] = frozenset()
    ambiguous_pattern: str = ""

    @classmethod
    def of(cls, format_class: type[Any], options: type[Any]) -> "FormatEntry":
        """The entry of a class of formats.

        Args:
            format_class: has a `pattern`, and is made from its options. It may have `recognises`
                and an `ambiguous_pattern`.
            options: a dataclass with the keys of a dataset, and their defaults.
        """
        return cls(
            format_class.pattern,
            lambda keys, where: format_class(parse_options(options, keys, where)),
            getattr(format_class, "recognises", _never),
            frozenset(each.name for each in fields(options)),
            getattr(format_class, "ambiguous_pattern", ""),
        )
