"""Datasets of each format, written by its own writer, and what its own reader says of them."""

import csv
import gzip
import io
import itertools
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import webdataset
import zstandard
from array_record.python import array_record_module

from benchmarks.loader.mosaic import streaming
from tests.token_files import llm_c, megatron_idx

NUM_SAMPLES = 101
Sample = dict[str, Any]


class Stored(NamedTuple):
    """A dataset on disk.

    Attributes:
        keys: of its table in the configuration, but for the location.
        samples: what the format's own reader says, in the order of the ids.
    """

    keys: Mapping[str, Any]
    samples: list[Sample]


def rows() -> Iterator[tuple[int, str, float]]:
    generator = np.random.default_rng(0)
    for number in range(NUM_SAMPLES):
        yield (
            number,
            'wörd, "two"\n' * int(generator.integers(20)) + "end",
            float(generator.random()),
        )


def parts(folder: Path, ending: str) -> Iterator[tuple[Path, list[tuple[int, str, float]]]]:
    folder.mkdir()
    every = list(rows())
    for number, some in enumerate((every[:50], every[50:51], every[51:])):
        yield folder / f"part-{number}.{ending}", some


def store_text(folder: Path) -> Stored:
    samples: list[Sample] = []
    for path, some in parts(folder, "txt"):
        path.write_text("".join(text.replace("\n", " ") + "\n" for _, text, _ in some), "utf-8")
        samples += [{"text": line} for line in path.read_text("utf-8").splitlines()]
    return Stored({"format": "text"}, samples)


def store_jsonl(folder: Path) -> Stored:
    samples: list[Sample] = []
    for path, some in parts(folder, "jsonl.gz"):
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"id": row[0], "text": row[1]}) + "\n" for row in some)
        with gzip.open(path, "rt", encoding="utf-8") as file:
            samples += [{"json": line.removesuffix("\n")} for line in file]
    return Stored({"format": "jsonl"}, samples)


def store_json_columns(folder: Path) -> Stored:
    samples: list[Sample] = []
    for path, some in parts(folder, "jsonl"):
        documents = [
            {"id": number, "text": text, "ids": list(range(number % 7))} for number, text, _ in some
        ]
        path.write_text("".join(json.dumps(each) + "\n" for each in documents))
        for line in path.read_text().splitlines():
            found = json.loads(line)
            ids = as_text(np.array(found["ids"], np.int16))
            samples.append({"number": found["id"], "text": found["text"], "ids": ids})
    cast = {"number": "int16", "ids": "int16"}
    keys = {"columns": ["*"], "rename": {"id": "number"}, "cast": cast}
    return Stored({"format": "jsonl", **keys}, samples)


def as_text(array: np.ndarray) -> str:
    """The bytes of a list, as `value` in the tests has them."""
    return array.tobytes().decode(errors="surrogateescape")


SCORES = pa.list_(pa.float64())


def table(some: Sequence[tuple[int, str, float]]) -> Any:
    columns = {
        "number": pa.array([number for number, _, _ in some], pa.int32()),
        "text": [text for _, text, _ in some],
        "scores": pa.array([[score] * (number % 5) for number, _, score in some], SCORES),
        "pair": pa.array([[score, number] for number, _, score in some], pa.list_(pa.float32(), 2)),
    }
    return pa.table(columns)


def rows_of(found: Any) -> list[Sample]:
    """What pyarrow says of a table whose lists are served as float32."""
    return [
        {**row, "scores": as_text(np.array(row["scores"], np.float32))} for row in found.to_pylist()
    ]


def store_parquet(folder: Path) -> Stored:
    samples: list[Sample] = []
    for path, some in parts(folder, "parquet"):
        pq.write_table(table(some), path, row_group_size=20)
        samples += rows_of(pq.read_table(path))
    return Stored({"format": "parquet", "cast": {"scores": "float32"}}, samples)


def store_arrow(folder: Path, compression: str | None = None) -> Stored:
    samples: list[Sample] = []
    options = pa.ipc.IpcWriteOptions(compression=compression)
    for number, (path, some) in enumerate(parts(folder, "arrow")):
        made = table(some)
        make = pa.ipc.new_stream if number == 0 else pa.ipc.new_file
        with make(str(path), made.schema, options=options) as writer:
            writer.write_table(made, max_chunksize=20)
        opened = pa.ipc.open_stream if number == 0 else pa.ipc.open_file
        with path.open("rb") as file:
            samples += rows_of(opened(file).read_all())
    return Stored({"format": "arrow", "cast": {"scores": "float32"}}, samples)


def store_compressed_arrow(folder: Path) -> Stored:
    return store_arrow(folder, "zstd")


def store_webdataset(folder: Path) -> Stored:
    samples: list[Sample] = []
    for path, some in parts(folder, "tar"):
        with webdataset.TarWriter(str(path)) as writer:
            for number, text, score in some:
                array = np.full((2, 3), score, np.float32)
                key = f"{number:04}"
                writer.write({"__key__": key, "txt": text, "cls": number, "npy": array})
        with path.open("rb") as file:
            found = webdataset.tariterators.tar_file_iterator(file)
            members = ({**member, "__url__": path.name} for member in found)
            decode = webdataset.autodecode.Decoder([])
            for each in webdataset.tariterators.group_by_keys(members):
                sample = decode(each)
                samples.append({name: sample[name] for name in ("txt", "cls", "npy")})
    return Stored({"format": "webdataset"}, samples)


def ids_of(some: Sequence[tuple[int, str, float]]) -> np.ndarray:
    return np.array([number * 7 + place for number, _, _ in some for place in range(11)])


def windows_of(stored: np.ndarray) -> list[Sample]:
    """Of ten ids; they do not overlap."""
    begins = range(0, len(stored) - 9, 10)
    return [{"tokens": stored[begin : begin + 10].astype(np.int64)} for begin in begins]


def store_tokens(folder: Path) -> Stored:
    """As nanoGPT writes and reads them."""
    samples: list[Sample] = []
    for path, some in parts(folder, "bin"):
        ids_of(some).astype(np.uint16).tofile(path)
        samples += windows_of(np.memmap(path, np.uint16, "r"))
    return Stored({"format": "tokens", "dtype": "uint16", "sequence_length": 10}, samples)


def store_llm_c(folder: Path) -> Stored:
    """As `_load_data_shard` of modded-nanogpt reads them, and llm.c by the same header."""
    samples: list[Sample] = []
    for path, some in parts(folder, "bin"):
        path.write_bytes(llm_c(ids_of(some).astype("<u2")))
        magic, version, num_tokens = np.fromfile(path, "<i4", 256)[:3].tolist()
        assert (magic, version) == (20240520, 1)
        samples += windows_of(np.fromfile(path, "<u2", num_tokens, offset=256 * 4))
    return Stored({"format": "tokens", "sequence_length": 10}, samples)


def store_megatron(folder: Path) -> Stored:
    return Stored(
        {"format": "tokens", "sequence_length": 10},
        [window for documents in megatron(folder) for window in windows_of(np.hstack(documents))],
    )


def store_megatron_documents(folder: Path) -> Stored:
    documents = [document for its in megatron(folder) for document in its]
    samples: list[Sample] = [{"tokens": as_text(each)} for each in documents]
    return Stored({"format": "tokens", "samples": "documents"}, samples)


def megatron(folder: Path) -> Iterator[list[np.ndarray]]:
    """The documents of each file, as `IndexedDataset` of Megatron-LM reads them.

    A row is a sequence, and two sequences are a document.
    """
    for path, some in parts(folder, "bin"):
        rows = [ids_of([row])[: 1 + row[0] % 11].astype("<i4") for row in some]
        np.hstack(rows).tofile(path)
        bounds = [*range(0, len(rows), 2), len(rows)]
        index = megatron_idx([len(row) for row in rows], 4, 4, bounds)
        path.with_suffix(".idx").write_bytes(index)
        places, count = 34 + 4 * len(rows), len(rows)
        lengths = np.frombuffer(index, "<i4", count, 34)
        pointers = np.frombuffer(index, "<i8", count, places)
        documents = np.frombuffer(index, "<i8", offset=places + 8 * count).tolist()
        found = [
            np.fromfile(path, "<i4", length, offset=pointer)
            for length, pointer in zip(lengths.tolist(), pointers.tolist(), strict=True)
        ]
        yield [np.hstack(found[a:b]) for a, b in itertools.pairwise(documents)]


def store_compressed_jsonl(folder: Path) -> Stored:
    samples: list[Sample] = []
    for path, some in parts(folder, "jsonl.zst"):
        lines = "".join(json.dumps({"id": row[0], "text": row[1]}) + "\n" for row in some)
        path.write_bytes(b"".join(zstandard.compress(each) for each in cut(lines.encode(), 900)))
        with path.open("rb") as stored:
            reader = zstandard.ZstdDecompressor().stream_reader(stored, read_across_frames=True)
            with io.TextIOWrapper(reader, encoding="utf-8") as file:
                samples += [{"json": line.removesuffix("\n")} for line in file]
    return Stored({"format": "jsonl"}, samples)


def cut(data: bytes, num_bytes: int) -> list[bytes]:
    return [data[begin : begin + num_bytes] for begin in range(0, len(data), num_bytes)]


def store_csv(folder: Path) -> Stored:
    samples: list[Sample] = []
    for path, some in parts(folder, "csv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([("class", "text", "score"), *some])
        with path.open(encoding="utf-8", newline="") as file:
            samples += [
                {"label": int(row["class"]), "text": row["text"], "score": float(row["score"])}
                for row in csv.DictReader(file)
            ]
    columns = ["label=class", "text", "score"]
    types = {"class": "int64", "score": "float64"}
    return Stored({"format": "csv", "columns": columns, "types": types}, samples)


def unpacked(folder: Path) -> Path:
    """The same shards, decompressed by the library: its local reader takes no others."""
    raw, decompress = folder.with_name("raw"), streaming.base.compression.decompress
    shutil.copytree(folder, raw)
    for path in raw.glob("*.zstd"):
        path.with_suffix("").write_bytes(decompress("zstd", path.read_bytes()))
    return raw


def store_compressed_mds(folder: Path) -> Stored:
    return store_mds(folder, "zstd")


def store_mds(folder: Path, compression: str | None = None) -> Stored:
    columns = {
        "a_number": "int",
        "bytes": "bytes",
        "text": "str",
        "small": "uint8",
        "score": "float64",
        "array": "ndarray:float32:2,3",
        "digits": "str_int",
        "document": "json",
    }
    with streaming.MDSWriter(
        out=str(folder), columns=columns, size_limit=8192, compression=compression
    ) as writer:
        for number, text, score in rows():
            array = np.full((2, 3), score, np.float32)
            document = {"text": text}
            writer.write(
                {
                    "a_number": number, "bytes": text.encode()[::-1], "text": text, "small": number,
                    "score": score, "array": array, "digits": number, "document": document,
                }
            )  # fmt: skip
    assert len(list(folder.glob("*.mds*"))) > 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its index open
        reader = streaming.LocalDataset(str(unpacked(folder) if compression else folder))
    samples = [dict(reader[number]) for number in range(len(reader))]
    for sample in samples:
        sample["bytes"] = sample["bytes"].decode(errors="surrogateescape")
        sample["document"] = json.dumps(sample["document"])
    return Stored({"format": "mds"}, samples)


def store_npy(folder: Path) -> Stored:
    samples: list[Sample] = []
    for path, some in parts(folder, "npy"):
        np.save(path, np.array([[[score, number]] for number, _, score in some]))
        samples += [{"array": row} for row in np.load(path)]
    return Stored({"format": "npy"}, samples)


def store_tfrecord(folder: Path) -> Stored:
    # Seconds, for this alone.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    from tensorboard.summary.writer.record_writer import RecordWriter

    samples: list[Sample] = []
    for path, some in parts(folder, "tfrecord"):
        with path.open("wb") as file:
            writer = RecordWriter(file)
            for number, text, _ in some:
                writer.write(Event(step=number, file_version=text).SerializeToString())
        reader = PyRecordReader_New(str(path))
        for _ in some:
            reader.GetNext()
            samples.append({"record": reader.record().decode(errors="surrogateescape")})
    return Stored({"format": "tfrecord"}, samples)


def store_arrayrecord(folder: Path) -> Stored:
    """Single records of the first half, groups of the second."""
    samples: list[Sample] = []
    ways = itertools.cycle(["group_size:1", "group_size:8"])
    for path, some in parts(folder, "array_record"):
        write_records(path, [text.encode() for _, text, _ in some], next(ways))
        found = array_record_module.ArrayRecordReader(str(path)).read_all()
        samples += [{"record": record.decode()} for record in found]
    return Stored({"format": "arrayrecord"}, samples)


def write_records(path: Path, records: Sequence[bytes], options: str) -> None:
    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


def store_files(folder: Path) -> Stored:
    for number, text, _ in rows():
        path = folder / f"part-{number % 3}" / f"{number * 7919 % 101}.JPG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.JPG"))
    samples: list[Sample] = [
        {
            "image": (folder / name).read_text(),
            "path": name,
            "class": int(name.removeprefix("part-").partition("/")[0]),
        }
        for name in found
    ]
    return Stored({"format": "files", "fields": ["image=file", "class", "path"]}, samples)


FORMATS: list[Callable[[Path], Stored]] = [
    store_arrayrecord,
    store_arrow,
    store_compressed_arrow,
    store_compressed_jsonl,
    store_compressed_mds,
    store_csv,
    store_files,
    store_json_columns,
    store_jsonl,
    store_llm_c,
    store_mds,
    store_megatron,
    store_megatron_documents,
    store_npy,
    store_parquet,
    store_text,
    store_tfrecord,
    store_tokens,
    store_webdataset,
]
