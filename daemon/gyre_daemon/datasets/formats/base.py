"""The seam between storage formats and the rest of the daemon.

A format describes how samples are stored in shards. It only computes: the daemon does all reading.
To open a dataset, the daemon uses a `Format` in this order:

1. `pattern` selects the shards among the files of a folder.
2. `inspection` gathers the facts that the format needs about the shards. A `Scan` reads every shard
   once, from its beginning to its end. A `Probe` asks for a few byte ranges. Either returns arrays,
   which the daemon keeps in sidecar files and hands back the next time.
3. `assemble` turns these arrays into a `SampleIndex`, which maps sample ids to byte ranges: of
   shards, or of decoded shards where samples are rows of chunks (see `indexes.chunk_index`).

Where each file is a sample, a `ListedFormat` does instead; see `listed`.

A format may come from another package: an entry point of the group `gyre.formats`, of the format's
name, that leads to a `FormatEntry`; see `installed`.

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
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.field_spec import (
    MASK,
    OFFSETS_SUFFIX,
    PRESENT_SUFFIX,
    SAMPLE_ID,
    SHAPE_SUFFIX,
    CodecName,
    Extents,
    FieldSpec,
    indexed_fields,
    stored_fields,
)
from gyre_daemon.errors import CorruptSample
from gyre_daemon.order.block_order import BlockTable
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.order.shuffle.blocks import BlockTable
from gyre_daemon.storage.shard import Shard

__all__ = [
    "MASK",
    "OFFSETS_SUFFIX",
    "PRESENT_SUFFIX",
    "SAMPLE_ID",
    "SHAPE_SUFFIX",
    "Arrays",
    "CodecName",
    "DamagedSample",
    "Extents",
    "FieldSpec",
    "Format",
    "Probe",
    "ProbeRequest",
    "ProbeResponse",
    "ProbeSteps",
    "SampleIndex",
    "Scan",
    "TolerantFormat",
    "array_of",
    "corrupt",
    "indexed_fields",
    "probe_heads",
    "require_library",
    "stored_fields",
]


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
