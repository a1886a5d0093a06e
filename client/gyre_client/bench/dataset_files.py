"""A dataset's files as a user would read them without a daemon, and the places of its samples.

The daemon describes the dataset. The files must be local and readable by this user, and match the
daemon's number and sizes.
"""

import re
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest

PATTERNS = {"tokens": "*.bin", "webdataset": "*.tar"}
# The DataLoader's shuffle takes 8 bytes for each sample, and more while it is made.
MAX_SAMPLES = 100_000_000

LLM_C_BYTES = 1024
LLM_C_HEADS = (struct.pack("<ii", 20240520, 1), struct.pack("<ii", 20240801, 7))  # magic, version

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_NO_SAMPLE = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True, slots=True)
class TarPlaces:
    """The places of the samples of tar shards: N samples of F fields.

    Attributes:
        shard: int64 [N], the number of each sample's shard.
        start: int64 [N, F], the first byte of each field in its shard.
        size: int64 [N, F], the length of each field in bytes.
    """

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]


def find_files(description: pb.DatasetDescription) -> list[Path]:
    """Returns the files of a dataset in the daemon's order.

    Raises:
        InvalidRequest: The files are not local, this user cannot read them, they are not those that
            the daemon serves, or the DataLoader here cannot read such a dataset.
    """
    name = f"the dataset at {description.uri}"
    if description.format not in PATTERNS:
        raise InvalidRequest(
            f"{name} has the format {description.format!r}: "
            f"only {' and '.join(PATTERNS)} can be compared"
        )
    if description.format == "webdataset" and not all(map(_is_plain, description.fields)):
        raise InvalidRequest(
            f"{name} has optional fields or arrays of several shapes: "
            "such fields cannot be compared"
        )
    if description.num_samples > MAX_SAMPLES:
        raise InvalidRequest(
            f"{name} has more than {MAX_SAMPLES:,} samples: "
            "a DataLoader's shuffle of them would fill the memory"
        )
    scheme, separator, rest = description.uri.partition("://")
    place = rest if separator else description.uri
    if (separator and scheme.lower() not in ("file", "local")) or not place.startswith("/"):
        raise InvalidRequest(
            f"{name} is not on this machine's disk at a path from `/`: "
            "only local files can be compared"
        )
    pattern = PATTERNS[description.format]
    try:
        files = [file for path in _expanded(place) for file in _matches(Path(path), pattern)]
        num_bytes = sum(file.stat().st_size for file in files)
        for file in files:
            file.open("rb").close()
    except OSError as error:
        raise InvalidRequest(f"{name} cannot be read by this user: {error}") from error
    if (len(files), num_bytes) != (description.num_shards, description.num_bytes):
        raise InvalidRequest(
            f"{name} has {len(files)} files of {num_bytes} bytes as seen from here, but "
            f"{description.num_shards} of {description.num_bytes} as the daemon sees it: "
            "they must be the same to be compared"
        )
    return files


def _is_plain(field: pb.Field) -> bool:
    """Whether every sample has the field: as bytes, as a number, or as an array of one shape."""
    if field.name.endswith((".present", ".shape")):
        return False
    is_array = field.name.rpartition(".")[2] == "npy"
    return not field.ragged or (field.dtype == "uint8" and not is_array)


def token_start(file: Path, header_bytes: int | None) -> int:
    """Returns the first byte of a file's token ids, behind a header of npy or llm.c if it has one.

    Args:
        file: A shard that the daemon serves.
        header_bytes: The length of another header; None if the dataset's definition has none.
    """
    if header_bytes is not None:
        return header_bytes
    with file.open("rb") as opened:
        head = opened.read(8)
    if head.startswith(b"\x93NUMPY"):
        return int(np.load(file, mmap_mode="r").offset)
    return LLM_C_BYTES if head in LLM_C_HEADS else 0


def token_stride(
    description: pb.DatasetDescription,
    files: list[Path],
    stride: int,
    header_bytes: int | None = None,
) -> int:
    """Returns how many tokens are between the starts of two samples.

    Args:
        description: The daemon's description of a `tokens` dataset.
        files: Its shards.
        stride: The stride in the dataset's definition; 0 if it is not known.
        header_bytes: See `token_start`.

    Raises:
        InvalidRequest: With this stride the files have another number of samples than the dataset.
    """
    field = description.fields[0]
    itemsize, length = np.dtype(field.dtype).itemsize, int(field.shape[0])
    stride = stride or length
    sizes = [(file.stat().st_size - token_start(file, header_bytes)) // itemsize for file in files]
    counts = [max(0, (size - length) // stride + 1) for size in sizes]
    if sum(counts) != description.num_samples:
        raise InvalidRequest(
            f"the samples of the dataset at {description.uri} do not begin every {stride} tokens. "
            "Name its files with --format tokens and the --option stride=... and "
            "--option header_bytes=... that it has."
        )
    return stride


def scan_tars(files: list[Path], fields: list[str]) -> TarPlaces:
    """Reads all headers, which every reader needs that reads tar shards by random access.

    Raises:
        InvalidRequest: A shard is no archive, or a sample lacks a field.
    """
    shards: list[int] = []
    rows: list[list[tuple[int, int]]] = []
    for shard, file in enumerate(files):
        try:
            for members in _samples(file):
                rows.append([members[field] for field in fields])
                shards.append(shard)
        except (tarfile.TarError, KeyError) as error:
            raise InvalidRequest(
                f"{file} cannot be compared: a member or field is missing or damaged ({error})"
            ) from error
    places = np.array(rows, np.int64).reshape(len(rows), len(fields), 2)
    return TarPlaces(np.array(shards, np.int64), places[:, :, 0], places[:, :, 1])


def _samples(file: Path) -> Iterator[dict[str, tuple[int, int]]]:
    """Yields for each sample the start and size of its members, by extension."""
    key, members = None, dict[str, tuple[int, int]]()
    with tarfile.open(file) as archive:
        for member in archive:
            match = _MEMBER.fullmatch(member.name)
            if not member.isreg() or not match or _NO_SAMPLE.match(member.name):
                continue
            if match[1] != key:
                if members:
                    yield members
                key, members = match[1], {}
            members[match[2].lower()] = member.offset_data, member.size
    if members:
        yield members


def _expanded(text: str) -> list[str]:
    """Returns all texts of a brace list such as `{000..127}` or `{a,b}`."""
    braces = _BRACES.search(text)
    if not braces:
        return [text]
    numbers = _RANGE.fullmatch(braces[1])
    if numbers:
        width = len(numbers[1])
        parts = [f"{number:0{width}}" for number in range(int(numbers[1]), int(numbers[2]) + 1)]
    else:
        parts = braces[1].split(",")
    before, after = text[: braces.start()], text[braces.end() :]
    return [each for part in parts for each in _expanded(before + part + after)]


def _matches(path: Path, pattern: str) -> list[Path]:
    """Returns a file itself, or those of a folder or of a glob, sorted as the daemon sorts them."""
    if path.is_dir():
        found = path.glob(pattern)
    elif path.exists() or not any(letter in str(path) for letter in "*?["):
        return [path]
    else:
        found = Path("/").glob(str(path.relative_to("/")))
    return [file for file in sorted(found, key=str) if file.is_file()]
