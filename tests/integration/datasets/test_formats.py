"""Files of each format by its own writer, through a real daemon, equal those of its own reader."""

import io
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CorruptSample, InvalidRequest, ShardMissing
from webdataset import TarWriter

from tests.conftest import Daemon, S3Server, StartDaemon
from tests.integration.datasets.stored_formats import (
    FORMATS,
    NUM_SAMPLES,
    Stored,
    store_arrayrecord,
    store_arrow,
    store_compressed_jsonl,
    store_compressed_mds,
    store_csv,
    store_files,
    store_jsonl,
    store_llm_c,
    store_mds,
    store_megatron,
    store_npy,
    store_parquet,
    store_tfrecord,
    store_webdataset,
    write_records,
)
from tests.object_server.process import ObjectServerProcess, object_server

BESIDE = (".json", ".idx")
"""Endings of files that are no shards: MDS's list of them, and Megatron's indexes."""


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


@pytest.fixture(scope="module")
def web_server() -> Iterator[ObjectServerProcess]:
    with object_server() as process:
        yield process


@pytest.fixture(scope="module")
def served(
    shared_gyred: StartDaemon,
    s3_server: S3Server,
    web_server: ObjectServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Daemon, dict[str, Stored]]:
    """One daemon with every format on disk, in S3, and on a web server, which lists nothing.

    So the files there are named. Its datasets are `FORMAT-local`, `FORMAT-s3` and `FORMAT-http`.
    """
    folder = tmp_path_factory.mktemp("formats")
    formats: dict[str, Stored] = {}
    tables: dict[str, dict[str, Any]] = {}
    s3_server.make_bucket("formats")
    for store in FORMATS:
        name, names = store.__name__, []
        stored = formats[name] = store(folder / name)
        for path in sorted((folder / name).rglob("*")):
            if path.is_file():
                key = path.relative_to(folder).as_posix()
                s3_server.put("formats", key, path.read_bytes())
                web_server.put(f"/{key}", path.read_bytes())
                names += [path.name] * (path.suffix not in BESIDE)
        uris: dict[str, dict[str, Any]] = {
            "local": {"uri": str(folder / name)},
            "s3": {"uri": f"s3://formats/{name}/", "storage": s3_server.storage_settings},
            "http": {"uri": f"{web_server.url}/{name}/{{{','.join(names)}}}"},
        }
        if store is store_files:  # a manifest lists them: `test_files_of_a_manifest_are_served`
            del uris["http"]
        tables |= {f"{name}-{where}": {**each, **stored.keys} for where, each in uris.items()}
    return shared_gyred({"datasets": tables}), formats


@pytest.mark.parametrize("store", [store.__name__ for store in FORMATS])
def test_every_sample_is_that_of_the_formats_own_reader(
    store: str, served: tuple[Daemon, dict[str, Stored]]
) -> None:
    daemon, formats = served
    for where in ("local", "s3") if store == "store_files" else ("local", "s3", "http"):
        name = f"{store}-{where}"
        check(
            Loader(name, batch_size=7, epochs=1, tail="pad", address=daemon.address),
            formats[store],
        )


@pytest.mark.parametrize(
    "store",
    [
        store_jsonl,
        store_mds,
        store_npy,
        store_tfrecord,
        store_arrayrecord,
        store_arrow,
        store_parquet,
        store_compressed_jsonl,
        store_compressed_mds,
        store_webdataset,
        store_llm_c,
        store_megatron,
    ],
)
def test_a_file_that_was_cut_off_is_named_wherever_it_lies(
    store: Callable[[Path], Stored], gyred: StartDaemon, tmp_path: Path
) -> None:
    stored = store(tmp_path / "set")
    paths = sorted(path for path in (tmp_path / "set").iterdir() if path.suffix not in BESIDE)
    paths[-1].write_bytes(paths[-1].read_bytes().rstrip(b"\0")[:-3])  # zeros fill a tar's end
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
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter

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
