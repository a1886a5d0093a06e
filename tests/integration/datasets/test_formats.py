"""Files of each format by its own writer, through a real daemon, equal those of its own reader."""

import csv
import gzip
import io
import itertools
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from array_record.python import array_record_module
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CorruptSample, InvalidRequest, ShardMissing
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.summary.writer.record_writer import RecordWriter
from webdataset import TarWriter

from benchmarks.loader.mosaic import streaming
from tests.conftest import S3Server, StartDaemon
from tests.object_server.process import object_server

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
    stored = store_jsonl(folder)
    keys = {"columns": ["*"], "rename": {"id": "number"}, "cast": {"number": "int16"}}
    return Stored({**stored.keys, **keys}, [_columns(each["json"]) for each in stored.samples])


def _columns(document: str) -> Sample:
    found: Sample = json.loads(document)
    return {"number": found.pop("id"), **found}


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
    store_text,
    store_jsonl,
    store_json_columns,
    store_compressed_jsonl,
    store_csv,
    store_mds,
    store_compressed_mds,
    store_npy,
    store_tfrecord,
    store_arrayrecord,
    store_files,
]


def value(batch: Mapping[str, torch.Tensor], name: str, place: int) -> Any:
    if f"{name}.offsets" not in batch:
        return batch[name][place]
    begin, end = batch[f"{name}.offsets"][place : place + 2].tolist()
    return batch[name][begin:end].numpy().tobytes().decode(errors="surrogateescape")


def check(loader: Loader, stored: Stored) -> None:
    seen = set()
    with loader:
        for batch in loader:
            for place, sample_id in enumerate(batch["sample_id"].tolist()):
                for name, wanted in stored.samples[sample_id].items():
                    found = value(batch, name, place)
                    if isinstance(found, torch.Tensor):
                        assert torch.equal(found, torch.tensor(wanted, dtype=found.dtype))
                    else:
                        assert found == wanted, name
                seen.add(sample_id)
    assert seen == set(range(len(stored.samples)))


@pytest.mark.parametrize("store", FORMATS, ids=lambda store: store.__name__)
def test_every_sample_is_that_of_the_formats_own_reader(
    store: Callable[[Path], Stored], gyred: StartDaemon, s3_server: S3Server, tmp_path: Path
) -> None:
    stored, bucket = store(tmp_path / "set"), store.__name__.replace("_", "-")
    s3_server.make_bucket(bucket)
    for path in (tmp_path / "set").rglob("*"):
        if path.is_file():
            key = path.relative_to(tmp_path).as_posix()
            s3_server.put(bucket, key, path.read_bytes())
    settings = s3_server.storage_settings
    remote = {"uri": f"s3://{bucket}/set/", "storage": settings, **stored.keys}
    datasets = {"local": {"uri": str(tmp_path / "set"), **stored.keys}, "remote": remote}
    daemon = gyred({"datasets": datasets})
    for name in datasets:
        check(Loader(name, batch_size=7, epochs=1, tail="pad", address=daemon.address), stored)


@pytest.mark.parametrize(
    "store", [store_jsonl, store_mds, store_npy, store_tfrecord, store_arrayrecord]
)
def test_a_file_that_was_cut_off_is_named_wherever_it_lies(
    store: Callable[[Path], Stored], gyred: StartDaemon, tmp_path: Path
) -> None:
    stored = store(tmp_path / "set")
    paths = sorted(path for path in (tmp_path / "set").iterdir() if path.name != "index.json")
    paths[-1].write_bytes(paths[-1].read_bytes()[:-3])
    with object_server(tmp_path) as server:
        settings = server.storage_settings
        names = ",".join(path.name for path in paths)
        datasets: dict[str, dict[str, Any]] = {
            "local": {"uri": str(tmp_path / "set")},
            "s3": {"uri": "s3://set/", "storage": settings},
            "http": {"uri": f"{server.url}/set/{{{names}}}"},
        }
        daemon = gyred(
            {"datasets": {name: {**each, **stored.keys} for name, each in datasets.items()}}
        )
        for name in datasets:
            with (
                pytest.raises(CorruptSample, match=re.escape(paths[-1].name)) as caught,
                Loader(name, batch_size=NUM_SAMPLES, address=daemon.address) as loader,
            ):
                next(loader)
            assert caught.value.facts["shard"] == paths[-1].name


def test_a_path_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = store_csv(tmp_path / "set")
    (tmp_path / "set/README.md").write_text("what this is")
    with Loader(tmp_path / "set", batch_size=7) as loader:
        assert next(loader)["text"].dtype == torch.uint8
        assert loader.num_samples == len(stored.samples)
    assert main(["describe", str(tmp_path / "set")]) == 0
    assert re.search(r"format +csv\n", capsys.readouterr().out)


def test_a_folder_of_folders_of_files_is_found(tmp_path: Path) -> None:
    stored = store_files(tmp_path / "set")
    (tmp_path / "set/README.md").write_text("what this is")
    with Loader(tmp_path / "set", batch_size=7) as loader:
        batch = next(loader)
        assert loader.categories == {"class": ("part-0", "part-1", "part-2")}
        for sample_id, value in zip(batch["sample_id"], batch["class"], strict=True):
            assert stored.samples[int(sample_id)]["class"] == int(value)


def unnamed(name: str, number: int) -> bytes:
    """A file of seven samples."""
    stream = io.BytesIO()
    table = pa.table({"number": np.arange(7) + number})
    match name:
        case "jsonl":
            stream.write(b'{"a": 1}\n' * 7)
        case "npy":
            np.save(stream, np.zeros((7, 3)))
        case "tfrecord":
            records = RecordWriter(stream)
            for step in range(7):
                records.write(Event(step=step).SerializeToString())
        case "parquet":
            pq.write_table(table, stream)
        case "arrayrecord":
            with tempfile.NamedTemporaryFile() as file:
                write_records(Path(file.name), [b"record"] * 7, "group_size:1")
                stream.write(Path(file.name).read_bytes())
        case "arrow":
            with pa.ipc.new_file(stream, table.schema) as writer:
                writer.write_table(table)
        case _:
            with TarWriter(stream) as tar:
                for sample in range(7):
                    tar.write({"__key__": f"{number}/{sample}", "txt": "text"})
    return stream.getvalue()


@pytest.mark.parametrize(
    "name", ["jsonl", "npy", "tfrecord", "parquet", "arrow", "arrayrecord", "webdataset"]
)
def test_files_whose_names_say_nothing_are_known_by_their_first_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(3):
        (folder / f"part-{number:05}-of-00003").write_bytes(unnamed(name, number))
    (folder / "README").write_text("what this is")
    caplog.set_level("INFO", "gyre_client")
    with Loader(folder, batch_size=7, epochs=1, tail="drop") as loader:
        assert loader.format == name
        assert f"dataset {folder}: 21 samples, format {name}" in caplog.messages
        assert sum(len(batch["sample_id"]) for batch in loader) == 21
    (folder / "part-x").write_text("something else")
    with pytest.raises(InvalidRequest, match=r"begin differently: .*, part-x \(unknown\)"):
        Loader(folder, batch_size=7)


def test_what_is_several_formats_or_none_is_refused(tmp_path: Path) -> None:
    store_csv(tmp_path / "set")
    (tmp_path / "set/notes.txt").write_text("what this is")
    with pytest.raises(
        InvalidRequest,
        match=r"several formats: notes.txt \(text, 1 such\), part-0.csv \(csv, 3 such\)",
    ):
        Loader(tmp_path / "set", batch_size=7)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.xyz").write_text("what this is")
    with pytest.raises(
        ShardMissing, match=r"1 other files, such as a.xyz. Looked for \*.bin \(tokens\), "
    ):
        Loader(str(tmp_path / "other"), batch_size=7)
