"""Measures Gyre and other libraries on the user's own files, as people use them: `gyre bench`.

Each loader runs alone, twice, the second time in the opposite order, with the same batch size.
Before anything is measured, the files are read once if they fit into the page cache, and batches of
Gyre are compared with those of each map-style opponent.

A *map-style* opponent is a torch DataLoader that reads samples by their numbers, so it has a full
shuffle. webdataset, and `datasets` when it streams, shuffle files and a buffer of samples. Each
gives the stored fields: images as bytes, text as text.

Separate processes time loaders, one of them Gyre: a DataLoader's workers are forked, and a process
that uses gRPC must not fork. A reader touches every cache line of every batch, as a copy to a
device would.
"""

import contextlib
import importlib.util
import io
import mmap
import multiprocessing
import os
import re
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gyre_protos.program import die_with
from gyre_protos.v1 import loader_pb2 as pb
from torch.utils.data import DataLoader, Dataset, Sampler

from gyre_client.errors import DaemonFault, InvalidRequest

# Samples that a streaming opponent shuffles, as in its own examples.
BUFFER = 1000
# A map-style shuffle takes 8 bytes for each sample, and more while it is made.
MAX_SAMPLES = 100_000_000
GYRE, MAP, TABLE, STREAM, PIPELINE = "gyre", "map", "table", "stream", "pipeline"
_LABELS = {
    GYRE: "Gyre",
    MAP: "DataLoader",
    TABLE: "DataLoader of `datasets`",
    STREAM: "`datasets`, streaming",
    PIPELINE: "webdataset",
}
_PACKAGES = {TABLE: "datasets", STREAM: "datasets", PIPELINE: "webdataset"}
# Of a format: the kinds that read it, and the builder of `datasets`.
_KINDS: Mapping[str, tuple[Sequence[str], str]] = {
    "tokens": ((MAP,), ""),
    "npy": ((MAP,), ""),
    "webdataset": ((MAP, PIPELINE, STREAM), "webdataset"),
    "files": ((MAP,), ""),
    "text": ((TABLE, STREAM), "text"),
    "jsonl": ((TABLE, STREAM), "json"),
    "csv": ((TABLE, STREAM), "csv"),
    "tsv": ((TABLE, STREAM), "csv"),
    "parquet": ((TABLE, STREAM), "parquet"),
    "arrow": ((TABLE, STREAM), "arrow"),
}
_SUFFIXES = {
    "tokens": (".bin",),
    "npy": (".npy",),
    "webdataset": (".tar",),
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet", ".parq"),
    "arrow": (".arrow", ".arrows", ".ipc", ".feather"),
}
_LLM_C_BYTES, _LLM_C_HEADS = 1024, ((20240520, 1), (20240801, 7))  # magic, version
_BRACES, _RANGE = re.compile(r"\{([^{}]*)\}"), re.compile(r"(\d+)\.\.(\d+)")
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)

Batch = Mapping[str, Any]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Contender:
    """One loader of the comparison.

    `kind` is the library, and how it reads. Gyre has no worker processes.
    """

    label: str
    kind: str
    num_workers: int = 0


def contenders_of(data_format: str) -> tuple[list[Contender], list[str]]:
    """Returns Gyre and its opponents, and the packages that further ones would need."""
    kinds, _ = _KINDS.get(data_format, ((), ""))
    missing = {
        package
        for kind in kinds
        if (package := _PACKAGES.get(kind)) and importlib.util.find_spec(package) is None
    }
    found = [Contender(_LABELS[GYRE], GYRE)]
    for kind in kinds:
        if _PACKAGES.get(kind) not in missing:
            found.append(Contender(f"{_LABELS[kind]}, in process", kind))
            found.append(Contender(f"{_LABELS[kind]}, 2 workers", kind, 2))
    return found, sorted(missing)


def find_files(description: pb.DatasetDescription) -> list[Path]:
    """Returns the files of a dataset in the daemon's order; none of a format without opponents.

    Raises:
        InvalidRequest: They are not local, this user cannot read them, or they are not those that
            the daemon serves.
    """
    if description.format not in _KINDS:
        return []
    name = f"the dataset at {description.uri}"
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
    suffixes = _SUFFIXES.get(description.format)
    try:
        files = [file for path in _expanded(place) for file in _matches(Path(path), suffixes)]
        num_bytes = sum(file.stat().st_size for file in files)
        for file in files:
            file.open("rb").close()
    except OSError as error:
        raise InvalidRequest(f"{name} cannot be read by this user: {error}") from error
    if suffixes and num_bytes != description.num_bytes:
        raise InvalidRequest(
            f"{name} has {num_bytes} bytes in {len(files)} files as seen from here, but "
            f"{description.num_bytes} as the daemon sees it: they must be the same to be compared"
        )
    return files


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


def _matches(path: Path, suffixes: tuple[str, ...] | None) -> list[Path]:
    """Returns a file itself, or those of a folder or of a glob, sorted as the daemon sorts them."""
    if path.is_dir():
        found = (each for each in path.rglob("*") if suffixes is None or each.suffix in suffixes)
    elif path.exists() or not any(letter in str(path) for letter in "*?["):
        return [path]
    else:
        found = Path("/").glob(str(path.relative_to("/")))
    return [file for file in sorted(found, key=str) if file.is_file()]


class Windows(Dataset[Batch]):
    """Windows of the tokens in flat files, or rows of npy files: memory maps."""

    def __init__(self, files: Sequence[Path], task: Mapping[str, Any]) -> None:
        self._name, dtype, shape, _ = task["fields"][0]
        stored, options = np.dtype(dtype).newbyteorder("<"), task["options"] or {}
        self._parts = []
        for file in files:
            if task["format"] == "npy":
                self._parts.append(np.load(file, mmap_mode="r"))
                continue
            start = _token_start(file, options.get("header_bytes"))
            if file.stat().st_size - start >= shape[0] * stored.itemsize:
                tokens = np.asarray(np.memmap(file, stored, "r", start))
                windows = np.lib.stride_tricks.sliding_window_view(tokens, shape[0])
                self._parts.append(windows[:: int(options.get("stride", 0)) or shape[0]])
        self._first = np.cumsum([0, *map(len, self._parts)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitems__(self, indices: Indices) -> Batch:
        if len(self._parts) == 1:
            return {self._name: torch.from_numpy(self._parts[0][indices])}
        out = np.empty((len(indices), *self._parts[0].shape[1:]), self._parts[0].dtype)
        part = np.searchsorted(self._first, indices, side="right") - 1
        for each in np.unique(part).tolist():
            chosen = part == each
            out[chosen] = self._parts[each][indices[chosen] - self._first[each]]
        return {self._name: torch.from_numpy(out)}


def _token_start(file: Path, header_bytes: int | None) -> int:
    """Returns the first byte of a file's token ids, behind a header if it has one."""
    if header_bytes is not None:
        return header_bytes
    with file.open("rb") as opened:
        head = opened.read(8)
    is_llm_c = len(head) == 8 and tuple(np.frombuffer(head, "<i4")) in _LLM_C_HEADS
    return _LLM_C_BYTES if is_llm_c else 0


class TarMembers(Dataset[Batch]):
    """Samples of tar shards, by the places of their members."""

    def __init__(self, files: Sequence[Path], task: Mapping[str, Any]) -> None:
        self._files = files
        self._names = [name for name, *_ in task["fields"] if not name.endswith(".present")]
        self._samples = [
            (number, members)
            for number, file in enumerate(files)
            for members in _members_of(file)
            if members
        ]

    def __len__(self) -> int:
        return len(self._samples)

    @cached_property
    def _mappings(self) -> list[memoryview]:
        """The shards, mapped in the process that reads them: the worker."""
        mappings = []
        for path in self._files:
            with path.open("rb") as file:
                mappings.append(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
        return mappings

    def __getitems__(self, indices: Indices) -> Batch:
        batch: dict[str, list[Any]] = {name: [] for name in self._names}
        for shard, members in map(self._samples.__getitem__, indices.tolist()):
            for name in self._names:
                begin, size = members.get(name, (0, 0))
                batch[name].append(_decoded(name, self._mappings[shard][begin : begin + size]))
        return batch


def _members_of(file: Path) -> Iterator[dict[str, tuple[int, int]]]:
    """Yields for each sample the start and size of its members, by extension."""
    key, members = "", dict[str, tuple[int, int]]()
    with tarfile.open(file) as archive:
        for member in archive:
            match = _MEMBER.fullmatch(member.name)
            if not member.isreg() or not match or match[1].startswith("__"):
                continue
            if match[1] != key:
                yield members
                key, members = match[1], {}
            members[match[2].lower()] = member.offset_data, member.size
    yield members


def _decoded(name: str, data: memoryview) -> Any:
    extension = name.rpartition(".")[2]
    if extension == "npy":
        return np.load(io.BytesIO(data), allow_pickle=False)
    return int(bytes(data)) if extension in ("cls", "index") and data else bytes(data)


class WholeFiles(Dataset[Batch]):
    """Files, such as images in folders; each is a sample."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitems__(self, indices: Indices) -> Batch:
        return {"data": [self._files[index].read_bytes() for index in indices.tolist()]}


class Table(Dataset[Batch]):
    """Rows of a table of the library `datasets`."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows.with_format("numpy")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, indices: Indices) -> Batch:
        batch: Batch = self._rows[indices]
        return batch


class EndlessShuffle(Sampler[Indices]):
    """Batches of a new full shuffle for every epoch, without a pause between epochs."""

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._generator = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[Indices]:
        while True:
            order = self._generator.permutation(self._num_samples)
            for end in range(self._batch_size, self._num_samples + 1, self._batch_size):
                yield order[end - self._batch_size : end]


def samples_of(task: Mapping[str, Any], kind: str) -> Any:
    """Returns a map-style opponent, `map` or `table`, which reads whole batches."""
    files = [Path(file) for file in task["files"]]
    if kind == TABLE:
        return Table(_load(task))
    if task["format"] == "webdataset":
        return TarMembers(files, task)
    return WholeFiles(files) if task["format"] == "files" else Windows(files, task)


def batches_of(task: Mapping[str, Any], kind: str, num_workers: int) -> Iterator[Batch]:
    """Yields batches of an opponent without an end."""
    size, seed = task["batch_size"], task["seed"]
    more: Any = {"num_workers": num_workers, "collate_fn": _as_is}
    if num_workers:
        more["prefetch_factor"] = 4  # torch's default of 2 is slower
    if kind in (MAP, TABLE):
        samples = samples_of(task, kind)
        sampler: Any = EndlessShuffle(len(samples), size, seed)
        yield from DataLoader(samples, batch_sampler=sampler, **more)
    elif kind == PIPELINE:
        import webdataset  # noqa: PLC0415  # it is optional

        files = task["files"]
        pipeline = webdataset.WebDataset(
            files, shardshuffle=len(files), seed=seed, empty_check=False
        )
        pipeline = pipeline.shuffle(BUFFER).batched(size, collation_fn=_columns, partial=False)
        yield from DataLoader(pipeline.repeat(), batch_size=None, **more)
    else:
        rows = _load(task, streaming=True).shuffle(seed=seed, buffer_size=BUFFER)
        more["collate_fn"] = _columns
        while True:
            yield from DataLoader(rows, batch_size=size, drop_last=True, **more)


def _load(task: Mapping[str, Any], *, streaming: bool = False) -> Any:
    """Returns the files as a table of `datasets`, or as a stream; images stay bytes."""
    import datasets  # noqa: PLC0415  # it is optional

    datasets.disable_progress_bars()
    _, builder = _KINDS[task["format"]]
    more: dict[str, Any] = {"sep": "\t"} if task["format"] == "tsv" else {}
    rows = datasets.load_dataset(
        builder,
        data_files=task["files"],
        split="train",
        streaming=streaming,
        cache_dir=task["cache"],
        **more,
    )
    for name, feature in (rows.features or {}).items():
        if hasattr(feature, "decode"):
            rows = rows.cast_column(name, type(feature)(decode=False))
    return rows


def _columns(samples: Sequence[Mapping[str, Any]]) -> Batch:
    return {name: [each[name] for each in samples] for name in samples[0]}


def _as_is(batch: Any) -> Any:
    return batch


_READ_BYTES = 1 << 24

Results = Mapping[str, float]
Show = Callable[[int, int, str], None]


def compare(
    description: pb.DatasetDescription, task: Mapping[str, Any], show: Show
) -> tuple[bool, Sequence[str], Mapping[Contender, Results]]:
    """Returns the measurements.

    Args:
        description: The dataset, as the daemon describes it.
        task: dataset, is_location, batch_size, seconds, seed, address, daemon_user and options, as
            the user gave them.
        show: Is told how many measurements are done, how many there are, and the next one.

    Returns:
        Whether the files were in the page cache before; packages that further opponents would need;
        and for each loader the medians over its turns of the results of `measure`.

    Raises:
        InvalidRequest: The files cannot be read from here, or hold other data than the daemon
            serves, or optional fields.
    """
    contenders, missing = contenders_of(description.format)
    compared = any(each.kind in (MAP, TABLE) for each in contenders)
    if compared and any(each.name.endswith((".present", ".shape")) for each in description.fields):
        raise InvalidRequest(
            f"the dataset at {description.uri} has optional fields or arrays of several shapes: "
            "such fields cannot be compared"
        )
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="gyre-bench-"))
        task = {**task, **task_of(description, task["options"], cache)}
        is_warm = _warm(task["files"], description.num_bytes)
        spawn = multiprocessing.get_context("spawn")
        # Gyre has a process without the others: DataLoader's workers are forked, and a process
        # that uses gRPC must not fork.
        ready = partial(_begin, multiprocessing.get_start_method(), os.getpid())
        opponents, gyre = (
            stack.enter_context(ProcessPoolExecutor(1, spawn, ready)) for _ in range(2)
        )
        for kind in dict.fromkeys(each.kind for each in contenders if each.kind in (MAP, TABLE)):
            if differs := _asked(gyre, differing, task, kind):
                raise InvalidRequest(
                    f"the files at {description.uri} differ from the daemon's data: {differs} "
                    "differs, so they cannot be compared"
                )
        rounds: list[dict[Contender, Results]] = []
        for order in (contenders, contenders[::-1]):
            rounds.append({})
            for contender in order:
                num_done = sum(map(len, rounds))
                show(num_done, 2 * len(contenders), contender.label)
                process = gyre if contender.kind == GYRE else opponents
                rounds[-1][contender] = _asked(
                    process, measure, task, contender.kind, contender.num_workers
                )
    medians = {
        contender: {
            key: statistics.median(results[contender][key] for results in rounds)
            for key in rounds[0][contender]
        }
        for contender in contenders
    }
    return is_warm, missing, medians


def task_of(
    description: pb.DatasetDescription, options: Mapping[str, Any] | None, cache: str
) -> dict[str, Any]:
    """Returns the entries of a task that follow from the dataset.

    Raises:
        InvalidRequest: See `find_files`.
    """
    return {
        "options": options,
        "files": [str(file) for file in find_files(description)],
        "format": description.format,
        "num_samples": description.num_samples,
        "cache": cache,
        "fields": [
            (field.name, field.dtype, list(field.shape), field.ragged)
            for field in description.fields
        ],
    }


def _begin(start_method: str, parent: int) -> None:
    """Makes a process ready to measure: libraries print no warnings, and torch uses one core.

    DataLoader starts its workers as it does in the parent. The process ends with the parent.
    """
    die_with(parent)
    multiprocessing.set_start_method(start_method, force=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    torch.set_num_threads(1)


def _asked(process: ProcessPoolExecutor, function: Callable[..., Any], *arguments: object) -> Any:
    try:
        return process.submit(function, *arguments).result()
    except Exception as error:  # those of any library
        reason = f"{type(error).__name__}: {error}"
        raise DaemonFault(f"the comparison stopped: {reason}") from error


def _warm(files: list[str], num_bytes: int) -> bool:
    """Reads the files once if they fit into the page cache, and returns whether they do."""
    if num_bytes > _available_bytes() // 2:
        return False
    for path in files:
        with Path(path).open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
    return True


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


CACHE_LINE_BYTES = 64
WARMUP_S = 0.3  # fills the prefetch windows of all loaders
_NUM_COMPARED = 3  # batches
_NO_DATA = ("sample_id", "__key__", "__url__", "__local_path__")


def measure(task: dict[str, Any], kind: str, num_workers: int) -> dict[str, float]:
    """Reads for `task["seconds"]` after a warm-up.

    Returns:
        samples_per_s; bytes_per_s; first_batch_s, the time to the first batch when the modules are
        imported; and cpu_s_per_1000, the processor time that the reading thread itself spends on
        1000 samples.
    """
    began = time.perf_counter()
    with contextlib.closing(_batches(task, kind, num_workers)) as batches:
        _touch(next(batches))
        first_batch_s = time.perf_counter() - began
        _read(batches, min(WARMUP_S, task["seconds"]))
        num_batches, num_bytes, elapsed_s, cpu_s = _read(batches, task["seconds"])
    num_samples = num_batches * task["batch_size"]
    return {
        "samples_per_s": num_samples / elapsed_s,
        "bytes_per_s": num_bytes / elapsed_s,
        "first_batch_s": first_batch_s,
        "cpu_s_per_1000": cpu_s / num_samples * 1000,
    }


def differing(task: dict[str, Any], kind: str) -> str:
    """Compares Gyre's first batches with the same samples of a map-style opponent.

    Returns:
        The difference: the number of samples, or a field of one name; empty if there is none.
    """
    theirs = samples_of(task, kind)
    if len(theirs) != task["num_samples"]:
        return f"the number of samples, {len(theirs)} as read from here,"
    with contextlib.closing(_batches(task, GYRE, 0)) as batches:
        for _, batch in zip(range(_NUM_COMPARED), batches, strict=False):
            other = theirs.__getitems__(batch["sample_id"].numpy())
            for name in other.keys() & batch.keys():
                rows, offsets = batch[name], batch.get(f"{name}.offsets")
                if offsets is not None:
                    rows = rows.tensor_split(offsets[1:-1])
                if not all(map(_same, rows, other[name])):
                    return f"the field {name!r}"
    return ""


def _batches(task: dict[str, Any], kind: str, num_workers: int) -> Any:
    """Yields batches without an end."""
    if kind != GYRE:
        yield from batches_of(task, kind, num_workers)
        return
    # Imported late: the DataLoader's workers are forked, and no thread of gRPC may run then.
    from gyre_client.loader.loader import Loader  # noqa: PLC0415

    names = ("dataset", "batch_size", "seed", "address", "daemon_user", "options")
    more = {"format": task["format"]} if task["is_location"] else {}
    # `stored`: ids of the same dtype as in the files
    with Loader(**{name: task[name] for name in names}, **more, token_dtype="stored") as loader:
        yield from loader.stream()


def _same(row: torch.Tensor, value: Any) -> bool:
    """Whether a sample's field has the bytes of a value, if the value is not parsed."""
    own = row.numpy()
    is_parsed = own.ndim > 0 and np.ndim(value) == 0 and not isinstance(value, str | bytes)
    if value is None or isinstance(value, Mapping) or is_parsed:
        return True
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        value = np.asarray(value).astype(own.dtype).tobytes()
    return bool(own.tobytes() == value)


def _read(batches: Iterator[Batch], duration_s: float) -> tuple[int, int, float, float]:
    """Returns batches, bytes, seconds, and the processor time of this thread inside the loader."""
    num_batches, num_bytes, cpu_s, began = 0, 0, 0.0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < duration_s:
        before_s = time.thread_time()
        batch = next(batches)
        cpu_s += time.thread_time() - before_s
        num_bytes += _touch(batch)
        num_batches += 1
    return num_batches, num_bytes, elapsed_s, cpu_s


def _touch(value: Any) -> int:
    """Reads one element of every cache line of a batch; returns the bytes of its fields."""
    if isinstance(value, Mapping):
        names = (name for name in value if name not in _NO_DATA and not name.endswith(".offsets"))
        return sum(_touch(value[name]) for name in names)
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object):
        return sum(map(_touch, value))
    if isinstance(value, str):
        return len(value)
    data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
    np.ascontiguousarray(data).reshape(-1).view(np.uint8)[::CACHE_LINE_BYTES].sum()
    return data.nbytes
